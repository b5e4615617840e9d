"""Operators whose arguments name the rank's place in the whole: dropout and attention."""

from __future__ import annotations

from autopar.errors import ShardingError
from autopar.ir.graph import Arg, Node, Ref, TensorMeta
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
    """Attention or its backward with the block's first query, and its place for dropout.

    Where query heads are split and key heads are not, the rank's own key heads are taken, and
    their gradients put back in their places, as pending sums.
    """
    at = {name: position for position, name in enumerate(argument_names(node.op))}
    args = local_args(node, operands)
    refs = [position for position, arg in enumerate(node.args) if isinstance(arg, Ref)]
    query, key = refs.index(at["q"]), refs.index(at["k"])
    shape = ctx.global_meta(query).shape
    starts = tuple(block_start(ctx, ctx.operand_axes(query, dim), shape[dim]) for dim in range(3))
    args[at["offsets"]] = (*starts, 0)
    args[at["q_start"]] = _plus(ctx, starts[2], args[at["q_start"]])
    taken = _own_heads(ctx, query, key, starts[1])
    if taken is None:
        return _emit(ctx, node, args)
    for name in ("k", "v"):
        args[at[name]] = _take_heads(ctx, args[at[name]], taken)
    metas = list(ctx.result_metas())
    if "do" not in at:
        return _emit(ctx, node, args)
    whole = list(metas)
    for result in (1, 2):
        metas[result] = _with_heads(metas[result], taken[1])
    found = list(_emit_as(ctx, node, args, tuple(metas)))
    for result in (1, 2):
        part, meta = found[result], whole[result]
        if part is not None and meta is not None:
            found[result] = ctx.emit("local.put_heads", (part, *taken, meta.shape[1]), meta)
    return tuple(found)


def _own_heads(
    ctx: LowerContext, query: int, key: int, start: Arg
) -> tuple[Arg, int, int, int] | None:
    """Which key heads the block's query heads read; None if it holds just them.

    Returns:
        The block's first query head, the number of key heads to take, the query heads that read
        one of them, and those that read one key head in the whole.
    """
    outer, inner = ctx.operand_axes(query, 1), ctx.operand_axes(key, 1)
    kv_heads = ctx.global_meta(key).shape[1]
    if outer == inner or kv_heads == 1:
        return None
    if inner:
        raise ShardingError(
            f"key heads split over {inner} can't be combined with query heads split over {outer}"
        )
    group = ctx.global_meta(query).shape[1] // kv_heads
    own = 1
    for axis in outer:
        own *= ctx.axis_size(axis)
    own = ctx.global_meta(query).shape[1] // own
    # blocks that end between two groups take a key head for each query head
    readers = own if group % own == 0 else group if own % group == 0 else 1
    return start, own // readers, readers, group


def _take_heads(ctx: LowerContext, x: Arg, taken: tuple[Arg, int, int, int]) -> Arg:
    assert isinstance(x, Ref)
    meta = _with_heads(ctx.meta(x), taken[1])
    return ctx.emit("local.take_heads", (x, *taken), meta)


def _with_heads(meta: TensorMeta | None, heads: int) -> TensorMeta | None:
    if meta is None:
        return None
    return TensorMeta((meta.shape[0], heads, *meta.shape[2:]), meta.dtype)


def _plus(ctx: LowerContext, start: Arg, base: Arg) -> Arg:
    """Sum of two integers, at least one of them known."""
    if base == 0 or base is None:
        return start
    if isinstance(start, int) and isinstance(base, int):
        return start + base
    return ctx.emit("local.plus", (start, base), None)


def _emit(ctx: LowerContext, node: Node, args: list[Arg]) -> tuple[Ref | None, ...]:
    return _emit_as(ctx, node, args, ctx.result_metas())


def _emit_as(
    ctx: LowerContext, node: Node, args: list[Arg], metas: tuple[TensorMeta | None, ...]
) -> tuple[Ref | None, ...]:
    whole = ctx.emit(node.op, tuple(args), metas, node.kwargs)
    return tuple(None if meta is None else ctx.item(whole, i) for i, meta in enumerate(metas))
