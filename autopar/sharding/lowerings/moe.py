"""Mixture of experts where ranks hold experts: each rank's own runs of rows come first.

Under a split of the experts with whole tokens nothing is moved to sort or to compute: every rank
sorts all slots, turns the order so that its own experts' rows come first, and counts only those.
What all ranks combine is a pending sum.
"""

from __future__ import annotations

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.sharding.lowerings.context import LowerContext, block_start, local_args


def moe_route(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``moe_route(ids, experts, k) -> (order, counts, splits)`` with own experts first."""
    experts = node.args[1]
    assert isinstance(experts, int)
    order_meta, counts_meta, splits_meta = ctx.result_metas()
    assert order_meta is not None
    assert counts_meta is not None
    assert splits_meta is not None
    every = TensorMeta((experts,), counts_meta.dtype)
    slots = ctx.meta(operands[0]).shape[0]
    whole = ctx.emit(
        node.op,
        tuple(local_args(node, operands)),
        (TensorMeta((slots,), order_meta.dtype), every, splits_meta),
    )
    order, counts = ctx.item(whole, 0), ctx.item(whole, 1)
    start = block_start(ctx, ctx.result_axes(1, 0), experts)
    own = ctx.emit(
        "local.own_runs",
        (order, counts, start, counts_meta.shape[0]),
        (order_meta, counts_meta, splits_meta),
    )
    return tuple(ctx.item(own, i) for i in range(3))


def grouped_product(
    ctx: LowerContext, node: Node, operands: list[Ref], axes: tuple[str, ...]
) -> tuple[Ref | None, ...]:
    """``grouped_mm`` or ``grouped_mm_weight`` with the share of rows that a rank expects."""
    args = local_args(node, operands)
    share = args[3]
    assert isinstance(share, float)
    expected = ctx.global_meta(0).shape[0]
    for axis in ctx.routed_axes(0):
        expected //= ctx.axis_size(axis)
    args[3] = share * min(1.0, expected / max(1, ctx.meta(operands[0]).shape[0]))
    return (ctx.emit(node.op, tuple(args), ctx.result_metas()[0]),)
