"""Embedding and likelihood over a sharded vocabulary: each rank serves the ids of its own block.

Ids of other blocks read row 0 and are zeroed (forward), or are counted in a row that is thrown
away (backward). A pending sum over ranks then has exactly one nonzero term. Padding of the
vocabulary needs no mask: no id points there.
"""

from __future__ import annotations

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.sharding.lowerings.context import LowerContext, block_start, local_args

_NO_CLASS = -1
"""Target that the likelihood skips; it is no class of any block."""


def vocabulary_embedding(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``embedding(weight block, ids - start)`` with the rows of foreign ids zeroed."""
    weight, ids = operands
    start = block_start(ctx, ctx.operand_axes(0, 0), ctx.global_meta(0).shape[0])
    rows = ctx.meta(weight).shape[0]
    near = _shift(ctx, ids, start, rows, fill=0)
    found = ctx.emit(node.op, (weight, near), ctx.result_metas()[0])
    return (ctx.emit("local.keep_rows", (found, ids, start, rows), ctx.meta(found)),)


def vocabulary_embedding_backward(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """Rows of the weight gradient that this block holds; foreign ids go to an extra row."""
    grad, ids = operands
    vocabulary, padding = node.args[2], node.args[3]
    assert isinstance(vocabulary, int)
    result = ctx.result_metas()[0]
    assert result is not None
    start = block_start(ctx, ctx.result_axes(0, 0), vocabulary)
    rows, width = result.shape
    near = _shift(
        ctx, ids, start, rows, fill=rows, skip=padding if isinstance(padding, int) else -1
    )
    more = ctx.emit(
        node.op, (grad, near, rows + 1, -1, False), TensorMeta((rows + 1, width), result.dtype)
    )
    return (ctx.emit("aten.slice.Tensor", (more, 0, 0, rows), result),)


def nll_loss_sum(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """The sum over the targets whose class this block holds."""
    at = 1 if len(ctx.global_meta(0).shape) > 1 else 0
    sharded = ctx.operand_axes(0, at)
    size = ctx.global_meta(0).shape[at]
    target, weight = _local_classes(
        ctx, node, operands, sharded, size, ctx.meta(operands[0]).shape[at]
    )
    args = local_args(node, operands)
    args[1:4] = [target, weight, _NO_CLASS]
    return (ctx.emit(node.op, tuple(args), ctx.result_metas()[0]),)


def nll_loss_backward(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """The block of ``dlogp`` of this rank's classes."""
    result, size = ctx.result_metas()[0], node.args[4]
    assert result is not None
    assert isinstance(size, int)
    at = 1 if len(result.shape) > 1 else 0
    sharded = ctx.result_axes(0, at)
    target, weight = _local_classes(ctx, node, operands, sharded, size, result.shape[at])
    args = local_args(node, operands)
    args[1:5] = [target, weight, _NO_CLASS, result.shape[at]]
    return (ctx.emit(node.op, tuple(args), result),)


def _local_classes(
    ctx: LowerContext,
    node: Node,
    operands: list[Ref],
    axes: tuple[str, ...],
    size: int,
    rows: int,
) -> tuple[Ref, Ref | None]:
    """Targets numbered within the block, and the block of the class weights."""
    ignored = node.args[3]
    assert isinstance(ignored, int)
    start = block_start(ctx, axes, size)
    target = _shift(ctx, operands[1], start, rows, fill=_NO_CLASS, skip=ignored)
    if len(operands) < 3:
        return target, None
    weight = operands[2]
    for axis in axes:
        count = ctx.axis_size(axis)
        meta = ctx.meta(weight)
        block = TensorMeta((-(-meta.shape[0] // count),), meta.dtype)
        weight = ctx.emit("local.shard", (weight, 0, ctx.coord(axis), count), block)
    return target, weight


def _shift(
    ctx: LowerContext, ids: Ref, start: object, rows: int, *, fill: int, skip: int | None = None
) -> Ref:
    """Ids counted from ``start``; ``fill`` for those beyond the block or equal to ``skip``."""
    assert isinstance(start, Ref | int)
    return ctx.emit("local.shift_ids", (ids, start, rows, fill, skip), ctx.meta(ids))
