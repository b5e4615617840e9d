"""Softmax and log-softmax over a sharded dim: exchange one maximum and one sum per row.

Forward: local maximum, all_reduce(max); local sum of exponentials, all_reduce(sum). Backward: one
all_reduce(sum). Padding of the dim counts as minus infinity, or as zero in sums.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (vocabulary-parallel cross entropy).
"""

from __future__ import annotations

from math import inf

from autopar.ir.graph import Dtype, Node, Ref, TensorMeta
from autopar.sharding.lowerings.context import LowerContext, all_reduce, mask_padding, reduced


def softmax(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``exp(x - max) / sum``."""
    exps, total, _ = _exponentials(ctx, node, operands[0], axes)
    return (ctx.emit("aten.div.Tensor", (exps, total), ctx.meta(exps)),)


def log_softmax(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``x - max - log(sum)``."""
    _, total, shifted = _exponentials(ctx, node, operands[0], axes)
    log = ctx.emit("aten.log.default", (total,), ctx.meta(total))
    return (ctx.emit("aten.sub.Tensor", (shifted, log), ctx.meta(shifted)),)


def softmax_backward(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``y dy - y sum(y dy)``."""
    grad, y = operands
    dim = _dim(ctx, node, 2)
    product = ctx.emit("aten.mul.Tensor", (grad, y), ctx.meta(grad))
    total = _row_sum(ctx, product, dim, axes=axes, size=ctx.global_meta(0).shape[dim])
    share = ctx.emit("aten.mul.Tensor", (y, total), ctx.meta(grad))
    result = ctx.emit("aten.sub.Tensor", (product, share), ctx.meta(grad))
    return (_cast(ctx, result, ctx.result_metas()[0]),)


def log_softmax_backward(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``dy - exp(y) sum(dy)``."""
    grad, y = operands
    dim = _dim(ctx, node, 2)
    total = _row_sum(ctx, grad, dim, axes=axes, size=ctx.global_meta(0).shape[dim])
    probability = ctx.emit("aten.exp.default", (y,), ctx.meta(y))
    share = ctx.emit("aten.mul.Tensor", (probability, total), ctx.meta(grad))
    result = ctx.emit("aten.sub.Tensor", (grad, share), ctx.meta(grad))
    return (_cast(ctx, result, ctx.result_metas()[0]),)


def _exponentials(
    ctx: LowerContext, node: Node, x: Ref, axes: tuple[str, ...]
) -> tuple[Ref, Ref, Ref]:
    """Shifted exponentials, their sum over the whole dim, and the shifted input."""
    dim = _dim(ctx, node, 1)
    x = _cast(ctx, x, ctx.result_metas()[0])
    size = ctx.global_meta(0).shape[dim]
    x = mask_padding(ctx, x, dim, axes=axes, size=size, fill=-inf)
    meta = ctx.meta(x)
    row = reduced(meta, (dim,))
    top = all_reduce(ctx, ctx.emit("aten.amax.default", (x, (dim,), True), row), "max", axes)
    shifted = ctx.emit("aten.sub.Tensor", (x, top), meta)
    exps = ctx.emit("aten.exp.default", (shifted,), meta)
    total = ctx.emit("aten.sum.dim_IntList", (exps, (dim,), True), row)
    return exps, all_reduce(ctx, total, "sum", axes), shifted


def _row_sum(ctx: LowerContext, x: Ref, dim: int, *, axes: tuple[str, ...], size: int) -> Ref:
    x = mask_padding(ctx, x, dim, axes=axes, size=size, fill=0.0)
    row = reduced(ctx.meta(x), (dim,))
    return all_reduce(ctx, ctx.emit("aten.sum.dim_IntList", (x, (dim,), True), row), "sum", axes)


def _dim(ctx: LowerContext, node: Node, position: int) -> int:
    dim = node.args[position]
    assert isinstance(dim, int)
    return dim % len(ctx.global_meta(0).shape)


def _cast(ctx: LowerContext, x: Ref, target: TensorMeta | None) -> Ref:
    """``x`` in the dtype of a result; itself if it is there already."""
    if target is None or ctx.meta(x).dtype == target.dtype:
        return x
    meta = TensorMeta(ctx.meta(x).shape, target.dtype)
    return ctx.emit("aten._to_copy.default", (x,), meta, (("dtype", Dtype(target.dtype)),))
