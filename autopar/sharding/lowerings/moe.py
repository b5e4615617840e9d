"""Mixture of experts where ranks hold experts: each rank computes the rows of its own experts.

*All ranks have the same tokens* (form E): nothing is moved to sort or to compute. Every rank sorts
all slots, turns the order so that its own experts' rows come first, and counts only those. What all
ranks combine is a pending sum.

*Each rank has tokens of its own* (form X): a rank sorts its slots and sends each row to the rank of
its expert (``comm.all_to_all_rows``, run-time sizes). What arrives is ordered by sender, then by
expert; products want it by expert. Combining goes the same way back. In ``order``, which has room
for as many rows as the rank receives, the slots of its own tokens come first.

Either way a rank has room for a budget of rows. Where that could be too little the fullest rank's
number is shared, so that all ranks raise the same error before anything is computed.
"""

from __future__ import annotations

from autopar.errors import ShardingError
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.sharding.lowerings.context import LowerContext, all_reduce, block_start, local_args
from autopar.sharding.placement import Routed, RoutedForm


def moe_route(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``moe_route(ids, experts, k) -> (order, counts, splits)`` of a rank's own experts."""
    ids, experts, k = local_args(node, operands)
    assert isinstance(experts, int)
    assert isinstance(k, int)
    order_meta, counts_meta, splits_meta = ctx.result_metas()
    assert order_meta is not None
    assert counts_meta is not None
    assert splits_meta is not None
    slots = ctx.meta(operands[0]).shape[0]
    every = TensorMeta((experts,), counts_meta.dtype)
    sorted_slots = TensorMeta((slots,), order_meta.dtype)
    whole = ctx.emit(node.op, (ids, experts, k), (sorted_slots, every, splits_meta))
    order, counts = ctx.item(whole, 0), ctx.item(whole, 1)
    room = order_meta.shape[0]
    exchanged = _exchanged_axis(ctx.result_rows(0), node)
    metas = (order_meta, counts_meta, splits_meta)
    if exchanged:
        parts = ctx.axis_size(exchanged)
        arrive = ctx.emit("comm.all_to_all", (counts, 0, 0, exchanged, experts), every)
        own = ctx.emit("local.own_exchange", (order, counts, arrive, parts, room), metas)
        most = slots * parts
    else:
        start = block_start(ctx, ctx.result_axes(1, 0), experts)
        size = counts_meta.shape[0]
        own = ctx.emit("local.own_runs", (order, counts, start, size, room), metas)
        most = slots
    order, counts, splits = (ctx.item(own, i) for i in range(3))
    if room < most:
        splits = _checked(ctx, node, splits, room)
    return order, counts, splits


def _checked(ctx: LowerContext, node: Node, splits: Ref, room: int) -> Ref:
    """``splits``, once all ranks know that the fullest of them has room."""
    meta = ctx.meta(splits)
    row = ctx.emit(
        "aten.slice.Tensor", (splits, 0, 1, 2, 1), TensorMeta((1, meta.shape[1]), meta.dtype)
    )
    needed = ctx.emit("aten.sum.dim_IntList", (row, (1,)), TensorMeta((1,), "int64"))
    # micro-batches run one after the other: those of one time are compared
    axes = [axis for axis, _ in ctx.result_rows(0) if axis != "mb"]
    needed = all_reduce(ctx, needed, "max", axes)
    where = f" ({node.source})" if node.source else ""
    scope = f" of {node.scope}" if node.scope else ""
    what = f"{node.name}{scope}{where}"
    return ctx.emit("autopar.check_rows", (splits, needed, room, what), meta)


def moe_dispatch(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``moe_dispatch(x, order, splits, k)``: a rank's rows, sent to the ranks of their experts."""
    x, order, splits = operands
    k, meta, axis = node.args[3], ctx.result_metas()[0], _exchanged_axis(ctx.result_rows(0), node)
    assert isinstance(k, int)
    assert meta is not None
    slots, parts = ctx.meta(x).shape[0] * k, ctx.axis_size(axis)
    mine = TensorMeta((slots, *meta.shape[1:]), meta.dtype)
    rows = ctx.emit(node.op, (x, _first(ctx, order, slots), splits, k), mine)
    arrived = ctx.emit("comm.all_to_all_rows", (rows, splits, axis, meta.shape[0], False), meta)
    return (ctx.emit("local.group_runs", (arrived, splits, parts, True), meta),)


def moe_combine(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``moe_combine(rows, order, splits, k, shape)``: rows sent back to their tokens' ranks."""
    rows, order, splits = operands
    k, meta, axis = node.args[3], ctx.result_metas()[0], _exchanged_axis(ctx.operand_rows(0), node)
    assert isinstance(k, int)
    assert meta is not None
    slots, parts = meta.shape[0] * k, ctx.axis_size(axis)
    ready = ctx.emit("local.group_runs", (rows, splits, parts, False), ctx.meta(rows))
    mine = TensorMeta((slots, *meta.shape[1:]), meta.dtype)
    back = ctx.emit("comm.all_to_all_rows", (ready, splits, axis, slots, True), mine)
    # what this rank received as a server of experts it now gets back as the owner of tokens
    turned = ctx.emit("aten.flip.default", (splits, (0,)), ctx.meta(splits))
    args = (back, _first(ctx, order, slots), turned, k, meta.shape)
    return (ctx.emit(node.op, args, meta),)


def grouped_product(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``grouped_mm`` or ``grouped_mm_weight`` with the share of rows that a rank expects."""
    args = local_args(node, operands)
    share = args[3]
    assert isinstance(share, float)
    expected = ctx.global_meta(0).shape[0]
    for axis, _ in ctx.operand_rows(0):
        expected //= ctx.axis_size(axis)
    args[3] = share * min(1.0, expected / max(1, ctx.meta(operands[0]).shape[0]))
    return (ctx.emit(node.op, tuple(args), ctx.result_metas()[0]),)


def _first(ctx: LowerContext, order: Ref, slots: int) -> Ref:
    meta = ctx.meta(order)
    if meta.shape[0] == slots:
        return order
    return ctx.emit("aten.slice.Tensor", (order, 0, 0, slots, 1), TensorMeta((slots,), meta.dtype))


def _exchanged_axis(rows: tuple[tuple[str, Routed], ...], node: Node) -> str:
    """The axis over which rows are exchanged; "" if there is none."""
    found = [axis for axis, p in rows if p.form is RoutedForm.EXCHANGED]
    experts = [axis for axis, p in rows if p.form is not RoutedForm.TOKENS]
    if found and len(experts) > 1:
        raise ShardingError(
            f"{node.name}: rows exchanged over {found[0]!r} and experts split over {experts} can't "
            "be combined; split the experts over one axis"
        )
    return found[0] if found else ""
