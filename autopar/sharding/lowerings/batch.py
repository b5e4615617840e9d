"""Batch norm with statistics over a sharded batch, and ops whose batch size is an argument.

Statistics are two all_reduces forward (of the sum, then of squared deviations from the true mean:
a sum of squares would cancel) and two backward (of the gradients of shift and scale).
"""

from __future__ import annotations

from autopar.ir.graph import Arg, Dtype, Node, Ref, TensorMeta
from autopar.sharding.lowerings.context import LowerContext, all_reduce, local_args


def batch_norm(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``batch_norm(x, weight?, bias?, running_mean?, running_var?, momentum, eps)``."""
    x, weight, bias, running_mean, running_var, momentum, eps = local_args(node, operands)
    assert isinstance(x, Ref)
    assert isinstance(momentum, float)
    y_meta, mean_meta, invstd_meta = ctx.result_metas()[:3]
    assert y_meta is not None
    assert mean_meta is not None
    assert invstd_meta is not None
    count = _count(ctx, 0, axes)
    wide = _cast(ctx, x, mean_meta.dtype)
    total = all_reduce(ctx, _channel_sum(ctx, wide, mean_meta), "sum", axes)
    mean = _scaled(ctx, total, 1.0 / count)
    centred = _per_channel(ctx, "aten.sub.Tensor", wide, mean)
    square = ctx.emit("aten.mul.Tensor", (centred, centred), ctx.meta(centred))
    var = _scaled(
        ctx, all_reduce(ctx, _channel_sum(ctx, square, mean_meta), "sum", axes), 1.0 / count
    )
    shifted = ctx.emit("aten.add.Scalar", (var, eps), ctx.meta(var))
    invstd = ctx.emit("aten.rsqrt.default", (shifted,), ctx.meta(var))
    y = _per_channel(ctx, "aten.mul.Tensor", centred, invstd)
    if isinstance(weight, Ref):
        y = _per_channel(ctx, "aten.mul.Tensor", y, weight)
    if isinstance(bias, Ref):
        y = _per_channel(ctx, "aten.add.Tensor", y, bias)
    unbiased = _scaled(ctx, var, count / max(count - 1, 1))
    return (
        _cast(ctx, y, y_meta.dtype),
        mean,
        invstd,
        _updated(ctx, running_mean, mean, momentum),
        _updated(ctx, running_var, unbiased, momentum),
    )


def batch_norm_backward(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``batch_norm_backward(dy, x, weight?, mean, invstd, eps) -> (dx, dweight, dbias)``.

    ``dx = weight invstd (dy - mean(dy) - xhat mean(dy xhat))``, both means over the whole batch.
    """
    dy, x, weight, mean, invstd = local_args(node, operands)[:5]
    assert isinstance(dy, Ref)
    assert isinstance(x, Ref)
    assert isinstance(mean, Ref)
    assert isinstance(invstd, Ref)
    channel = ctx.meta(mean)
    count = _count(ctx, 1, axes)
    dy, x = _cast(ctx, dy, channel.dtype), _cast(ctx, x, channel.dtype)
    centred = _per_channel(ctx, "aten.sub.Tensor", x, mean)
    xhat = _per_channel(ctx, "aten.mul.Tensor", centred, invstd)
    product = ctx.emit("aten.mul.Tensor", (dy, xhat), ctx.meta(xhat))
    dbias = all_reduce(ctx, _channel_sum(ctx, dy, channel), "sum", axes)
    dweight = all_reduce(ctx, _channel_sum(ctx, product, channel), "sum", axes)
    along = _per_channel(ctx, "aten.mul.Tensor", xhat, _scaled(ctx, dweight, 1.0 / count))
    flat = _per_channel(ctx, "aten.sub.Tensor", dy, _scaled(ctx, dbias, 1.0 / count))
    dx = ctx.emit("aten.sub.Tensor", (flat, along), ctx.meta(flat))
    dx = _per_channel(ctx, "aten.mul.Tensor", dx, invstd)
    if isinstance(weight, Ref):
        dx = _per_channel(ctx, "aten.mul.Tensor", dx, weight)
    results = (dx, dweight, dbias)
    return tuple(
        None
        if meta is None
        else _cast(ctx, ref, meta.dtype)
        if meta.numel
        else ctx.emit("aten.slice.Tensor", (ref, 0, 0, 0), meta)
        for ref, meta in zip(results, ctx.result_metas(), strict=True)
    )


def group_norm(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``native_group_norm(x, weight?, bias?, N, ...)`` with the local N."""
    return _with_batch(ctx, node, operands, 3)


def group_norm_backward(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``native_group_norm_backward(dy, x, mean, rstd, weight?, N, ...)`` with the local N."""
    return _with_batch(ctx, node, operands, 5)


def grouped_convolution(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """A convolution, or its backward, with the local number of groups."""
    backward = "backward" in node.op
    args = local_args(node, operands)
    at = 9 if backward else 8
    groups = args[at]
    assert isinstance(groups, int)
    for axis in axes:
        groups //= ctx.axis_size(axis)
    args[at] = groups
    metas = ctx.result_metas()
    if not backward:
        return (ctx.emit(node.op, tuple(args), metas[0]),)
    if isinstance(args[3], tuple) and metas[2] is not None:
        args[3] = metas[2].shape
    return _emit_several(ctx, node, args)


def _with_batch(
    ctx: LowerContext, node: Node, operands: list[Ref], position: int
) -> tuple[Ref | None, ...]:
    args = local_args(node, operands)
    args[position] = ctx.meta(operands[0]).shape[0]
    return _emit_several(ctx, node, args)


def _emit_several(ctx: LowerContext, node: Node, args: list[Arg]) -> tuple[Ref | None, ...]:
    metas = ctx.result_metas()
    whole = ctx.emit(node.op, tuple(args), metas, node.kwargs)
    return tuple(None if meta is None else ctx.item(whole, i) for i, meta in enumerate(metas))


def _count(ctx: LowerContext, operand: int, axes: tuple[str, ...]) -> int:
    """Elements of each channel that share statistics, of an operand (n, c, ...).

    An axis that shards the batch without this lowering (micro-batches with statistics of their
    own) has a share of the batch to itself.
    """
    shape = ctx.global_meta(operand).shape
    count = shape[0]
    for axis in ctx.operand_axes(operand, 0):
        if axis not in axes:
            count //= ctx.axis_size(axis)
    for size in shape[2:]:
        count *= size
    return count


def _channel_sum(ctx: LowerContext, x: Ref, channel: TensorMeta) -> Ref:
    rank = len(ctx.meta(x).shape)
    dims = (0, *range(2, rank))
    return ctx.emit("aten.sum.dim_IntList", (x, dims), TensorMeta(channel.shape, ctx.meta(x).dtype))


def _per_channel(ctx: LowerContext, op: str, x: Ref, channel: Ref) -> Ref:
    """``op`` of a tensor (n, c, ...) and one value per channel."""
    meta = ctx.meta(x)
    if len(meta.shape) > 2:
        shape = (ctx.meta(channel).shape[0], *(1 for _ in meta.shape[2:]))
        channel = ctx.emit(
            "aten.view.default", (channel, shape), TensorMeta(shape, ctx.meta(channel).dtype)
        )
    return ctx.emit(op, (x, channel), meta)


def _scaled(ctx: LowerContext, x: Ref, factor: float) -> Ref:
    return ctx.emit("aten.mul.Scalar", (x, factor), ctx.meta(x))


def _updated(ctx: LowerContext, old: Arg, new: Ref, momentum: float) -> Ref:
    """``(1 - momentum) old + momentum new`` in the dtype of ``old``; empty if there is no old."""
    if not isinstance(old, Ref):
        meta = TensorMeta((0,), ctx.meta(new).dtype)
        return ctx.emit("aten.slice.Tensor", (new, 0, 0, 0), meta)
    fresh = _cast(ctx, _scaled(ctx, new, momentum), ctx.meta(old).dtype)
    return ctx.emit("aten.add.Tensor", (_scaled(ctx, old, 1.0 - momentum), fresh), ctx.meta(old))


def _cast(ctx: LowerContext, x: Ref, dtype: str) -> Ref:
    if ctx.meta(x).dtype == dtype:
        return x
    meta = TensorMeta(ctx.meta(x).shape, dtype)
    return ctx.emit("aten._to_copy.default", (x,), meta, (("dtype", Dtype(dtype)),))
