"""Pooling and resampling of images: batch and channels split, spatial dims are whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.signature import Dims, OpSignature


def _spatial(
    call: OpCall, count: int, *, linear: bool, shape_arg: int | None = None
) -> OpSignature:
    """All tensors share their outer dims; the last ``count`` dims of each are whole.

    Args:
        call: The call.
        count: Spatial dims, at the end of every operand and result.
        linear: Whether operand 0 passes pending sums.
        shape_arg: Position of the result's sizes.
    """
    naming = Naming()

    def dims(shapes: Iterable[tuple[int, ...]], prefix: str) -> list[Dims | None]:
        found: list[Dims | None] = []
        for number, shape in enumerate(shapes):
            outer = len(shape) - count
            inner = naming.dims(shape[outer:], prefix=f"{prefix}{number}_", whole=range(len(shape)))
            found.append((*naming.dims(shape[:outer]), *inner))
        return found

    inputs = dims((call.shape(n) for n in range(len(call.operands))), "x")
    outputs = dims((call.result_shape(n) for n in range(len(call.results))), "y")
    return naming.build(
        inputs,
        outputs,
        linear=call.linear_positions((0,)) if linear else (),
        shape_arg=shape_arg,
    )


def _pool(count: int, *, linear: bool, shape_arg: int | None = None) -> Rule:
    return lambda call: _spatial(call, count, linear=linear, shape_arg=shape_arg)


RULES: Mapping[str, Rule] = {
    "aten.max_pool2d_with_indices.default": _pool(2, linear=False),
    "aten.max_pool2d_with_indices_backward.default": _pool(2, linear=True),
    "aten.avg_pool1d.default": _pool(1, linear=True),
    "aten.avg_pool2d.default": _pool(2, linear=True),
    "aten.avg_pool2d_backward.default": _pool(2, linear=True),
    "aten._adaptive_avg_pool2d.default": _pool(2, linear=True),
    "aten._adaptive_avg_pool2d_backward.default": _pool(2, linear=True),
    "aten.adaptive_max_pool2d.default": _pool(2, linear=False),
    "aten.adaptive_max_pool2d_backward.default": _pool(2, linear=True),
    "aten.upsample_nearest2d.default": _pool(2, linear=True),
    "aten.upsample_nearest2d_backward.default": _pool(2, linear=True, shape_arg=2),
    "aten.upsample_bilinear2d.default": _pool(2, linear=True),
    "aten.upsample_bilinear2d_backward.default": _pool(2, linear=True, shape_arg=2),
    "aten.upsample_bicubic2d.default": _pool(2, linear=True),
    "aten.upsample_bicubic2d_backward.default": _pool(2, linear=True, shape_arg=2),
    "aten.reflection_pad2d.default": _pool(2, linear=True),
    "aten.reflection_pad2d_backward.default": _pool(2, linear=True),
}
"""Rules by operator name."""
