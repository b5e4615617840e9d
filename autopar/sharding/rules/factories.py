"""Operators without operands."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.signature import OpSignature


def _full(call: OpCall) -> OpSignature:
    """``full(sizes, value)``: each rank fills its block; zeros are a pending sum of zeros."""
    naming = Naming()
    dims = naming.dims(call.result_shape())
    zero = call.arg(1) == 0 and call.may_be_linear(())
    return naming.build(
        [None for _ in call.operands],
        [dims],
        linear=(frozenset(),) if zero else (),
        padded=naming.sizes,
        shape_arg=0,
    )


def _whole(call: OpCall) -> OpSignature:
    """Replicated only: the values depend on the global position, or are listed in the arguments."""
    naming = Naming()
    shape = call.result_shape()
    return naming.build(
        [None for _ in call.operands], [naming.dims(shape, whole=range(len(shape)))]
    )


RULES: Mapping[str, Rule] = {
    "aten.full.default": _full,
    "aten.arange.default": _whole,
    "aten.arange.start": _whole,
    "aten.arange.start_step": _whole,
    "aten.linspace.default": _whole,
    "aten.eye.default": _whole,
    "aten.tril_indices.default": _whole,
    "aten.triu_indices.default": _whole,
    "autopar.constant.default": _whole,
}
"""Rules by operator name."""
