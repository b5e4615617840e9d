"""Operators whose arguments name the rank's place in the whole: dropout and attention."""

from __future__ import annotations

from autopar.ir.graph import Arg, Node, Ref
from autopar.sharding.lowerings.context import LowerContext, block_start, local_args
from autopar.sharding.rules.attention import argument_names


def dropout(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``dropout(x, key, p, op_id, global_shape, offsets)`` with the offsets of the block."""
    args = local_args(node, operands)
    shape = ctx.global_meta(0).shape
    args[5] = tuple(
        block_start(ctx, ctx.operand_axes(0, dim), size) for dim, size in enumerate(shape)
    )
    return _emit(ctx, node, args)


def random(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``uniform(key, op_id, shape, global_shape, offsets, dtype)`` of the block."""
    args = local_args(node, operands)
    result, whole = ctx.result_metas()[0], node.metas()[0]
    assert result is not None
    assert whole is not None
    args[2] = result.shape
    args[4] = tuple(
        block_start(ctx, ctx.result_axes(0, dim), size) for dim, size in enumerate(whole.shape)
    )
    return (ctx.emit(node.op, tuple(args), result, node.kwargs),)


def attention(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """Attention or its backward with the block's first query, and its place for dropout."""
    at = {name: position for position, name in enumerate(argument_names(node.op))}
    args = local_args(node, operands)
    refs = [position for position, arg in enumerate(node.args) if isinstance(arg, Ref)]
    query = refs.index(at["q"])
    shape = ctx.global_meta(query).shape
    starts = tuple(block_start(ctx, ctx.operand_axes(query, dim), shape[dim]) for dim in range(3))
    args[at["offsets"]] = (*starts, 0)
    args[at["q_start"]] = _plus(ctx, starts[2], args[at["q_start"]])
    return _emit(ctx, node, args)


def _plus(ctx: LowerContext, start: Arg, base: Arg) -> Arg:
    """Sum of two integers, at least one of them known."""
    if base == 0 or base is None:
        return start
    if isinstance(start, int) and isinstance(base, int):
        return start + base
    return ctx.emit("local.plus", (start, base), None)


def _emit(ctx: LowerContext, node: Node, args: list[Arg]) -> tuple[Ref | None, ...]:
    metas = ctx.result_metas()
    whole = ctx.emit(node.op, tuple(args), metas, node.kwargs)
    return tuple(None if meta is None else ctx.item(whole, i) for i, meta in enumerate(metas))
