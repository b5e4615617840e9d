"""Layer, RMS, batch and group norm.

The dims that statistics are taken over are whole, except the batch of batch norm, whose lowering
synchronises the statistics, or which the user allows to differ by micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.placement import Partial, Placement, R, Shard, Varying
from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature

MICROBATCH_STATISTICS = "microbatch_statistics"
"""Factor of the splits under which every micro-batch has its own statistics: opt-in, axis mb."""


def _norm_dims(call: OpCall, naming: Naming, x: int, normal: int) -> tuple[Dims, Dims, Dims]:
    """Dims of x, of its statistics and of the weights; ``normal`` dims at the end are whole."""
    shape = call.shape_at(x)
    rank = len(shape)
    dims = naming.dims(shape, whole=range(rank - normal, rank))
    return dims, (*dims[: rank - normal], *(() for _ in range(normal))), dims[rank - normal :]


def _forward(call: OpCall, normal: int) -> OpSignature:
    """Any of ``(x, normalized_shape, weight?, bias?, eps) -> (y, statistics...)``."""
    naming = Naming()
    dims, statistics, weights = _norm_dims(call, naming, 0, normal)
    return naming.build(
        [dims, *(weights for _ in call.operands[1:])],
        [dims, *(statistics for _ in call.results[1:])],
        padded=naming.sizes.keys() - naming.whole,
    )


def _layer_norm(call: OpCall) -> OpSignature:
    """``native_layer_norm(x, normalized_shape, weight?, bias?, eps) -> (y, mean, rstd)``."""
    return _forward(call, len(call.integers(1) or ()))


def _backward(call: OpCall, statistics_at: tuple[int, ...]) -> OpSignature:
    """``(dy, x, normalized_shape, statistics..., weight?, bias?, mask) -> (dx, dweight, dbias)``.

    Linear in dy; gradients of the weights are sums over the outer dims.
    """
    naming = Naming()
    normal = len(call.integers(2) or ())
    dims, statistics, weights = _norm_dims(call, naming, 1, normal)
    numbers = {call.operand(position) for position in statistics_at}
    inputs = [
        dims if number < 2 else statistics if number in numbers else weights
        for number in range(len(call.operands))
    ]
    results = (dims, *(weights for _ in call.results[1:]))
    outer = naming.sizes.keys() - naming.whole
    return naming.build(
        inputs,
        [None if m is None else d for m, d in zip(call.results, results, strict=True)],
        reductions=dict.fromkeys(sorted(outer), "sum"),
        linear=call.linear_positions((0,)),
        padded=outer,
    )


def _layer_norm_backward(call: OpCall) -> OpSignature:
    """``native_layer_norm_backward``: mean and rstd are arguments 3 and 4."""
    return _backward(call, (3, 4))


def _rms_norm_backward(call: OpCall) -> OpSignature:
    """``_fused_rms_norm_backward``: rstd is argument 3."""
    return _backward(call, (3,))


def _group_norm(call: OpCall) -> OpSignature:
    """``native_group_norm(x, weight?, bias?, N, C, HxW, groups, eps) -> (y, mean, rstd)``.

    Only the batch splits, and its size is an argument: a lowering. Channels and groups are whole.
    """
    naming = Naming()
    dims = naming.dims(call.shape(0), whole=range(len(call.shape(0))))
    statistics = (dims[0], naming.dim("g", call.integer(6), whole=True))
    weight = dims[1:2]
    sharded: tuple[Placement, ...] = (Shard(0), *(R for _ in call.operands[1:]))
    extra = AxisStrategy(sharded, (Shard(0),) * 3, "d0", "group_norm")
    return naming.build(
        [dims, *(weight for _ in call.operands[1:])],
        [dims, statistics, statistics],
        extra=[extra if "d0" in naming.sizes else None],
    )


def _group_norm_backward(call: OpCall) -> OpSignature:
    """``native_group_norm_backward(dy, x, mean, rstd, weight?, N, C, HxW, groups, mask)``."""
    naming = Naming()
    dims = naming.dims(call.shape(0), whole=range(len(call.shape(0))))
    statistics = (dims[0], naming.dim("g", call.integer(8), whole=True))
    weight = dims[1:2]
    inputs = [dims, dims, statistics, statistics, *(weight for _ in call.operands[4:])]
    results = (dims, weight, weight)
    placements: tuple[Placement, ...] = (Shard(0), Partial(), Partial())
    extra = AxisStrategy(
        (*(Shard(0) for _ in range(4)), *(R for _ in call.operands[4:])),
        tuple(R if m is None else p for m, p in zip(call.results, placements, strict=True)),
        "d0",
        "group_norm_backward",
    )
    return naming.build(
        inputs,
        [None if m is None else d for m, d in zip(call.results, results, strict=True)],
        linear=call.linear_positions((0,)),
        extra=[extra if "d0" in naming.sizes else None],
    )


def _batch_dims(naming: Naming, shape: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Dims of x and of a tensor per channel; only channels split without a lowering."""
    n = naming.dim("n", shape[0], whole=True)
    c = naming.dim("c", shape[1])
    return (n, c, *naming.dims(shape[2:], prefix="x", whole=range(len(shape)))), (c,)


def _batch_norm(call: OpCall) -> OpSignature:
    """``batch_norm(x, weight?, bias?, mean?, var?, ...) -> (y, mean, invstd, new mean, new var)``.

    Without running statistics the last two results are empty.
    """
    naming = Naming()
    dims, channels = _batch_dims(naming, call.shape(0))
    results = [channels if m is not None and m.numel else None for m in call.results[1:]]
    inputs: tuple[Placement, ...] = (Shard(0), *(R for _ in call.operands[1:]))
    others = len(call.results) - 1
    extra: list[AxisStrategy] = []
    if "n" in naming.sizes:
        naming.sizes[MICROBATCH_STATISTICS] = naming.sizes["n"]
        extra = [
            AxisStrategy(inputs, (Shard(0), *(R,) * others), "n", "batch_norm"),
            AxisStrategy(inputs, (Shard(0), *(Varying(),) * others), MICROBATCH_STATISTICS),
        ]
    return naming.build(
        [dims, *(channels for _ in call.operands[1:])],
        [dims, *results],
        extra=extra,
        padded=("c",),
    )


def _batch_norm_backward(call: OpCall) -> OpSignature:
    """``batch_norm_backward(dy, x, weight?, mean, invstd, eps) -> (dx, dweight, dbias)``.

    With the batch split the lowering reduces both sums over the batch; they are the gradients of
    the weights, which are therefore whole. Without a weight its gradients are empty.
    """
    naming = Naming()
    dims, channels = _batch_dims(naming, call.shape(1))
    weights = len(call.operands) - 4  # 0 or 1, between x and the statistics

    def strategy(
        statistics: Placement, gradient: Placement, factor: str, lowering: str
    ) -> AxisStrategy:
        inputs = (Shard(0), Shard(0), *(R,) * weights, statistics, statistics)
        outputs = (Shard(0), gradient, gradient)
        kept = tuple(
            p if meta is not None and meta.numel else R
            for meta, p in zip(call.results, outputs, strict=True)
        )
        return AxisStrategy(inputs, kept, factor, lowering)

    extra: list[AxisStrategy] = []
    if "n" in naming.sizes:
        naming.sizes[MICROBATCH_STATISTICS] = naming.sizes["n"]
        extra = [
            strategy(R, R, "n", "batch_norm_backward"),
            strategy(Varying(), Partial(), MICROBATCH_STATISTICS, ""),
        ]
    gradients = [channels if m is not None and m.numel else None for m in call.results[1:]]
    return naming.build(
        [dims, dims, *(channels for _ in call.operands[2:])],
        [dims, *gradients],
        linear=call.linear_positions((0,)),
        extra=extra,
        padded=("c",),
    )


RULES: Mapping[str, Rule] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten._fused_rms_norm.default": _layer_norm,
    "aten._fused_rms_norm_backward.default": _rms_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "autopar.batch_norm.default": _batch_norm,
    "autopar.batch_norm_backward.default": _batch_norm_backward,
}
"""Rules by operator name."""
