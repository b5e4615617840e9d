"""Mixture of experts: the dims of tokens, slots and rows.

Slots are merged dims, tokens outermost. Sorting mixes tokens, so that these rules alone offer
splits of the other dims only; splits of tokens and of experts, under which rows are a rank's own,
are added where all readers of the rows allow it (:mod:`autopar.sharding.routing`).
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import ShardingError
from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.rules.template import template
from autopar.sharding.signature import Dims, OpSignature


def _slots(naming: Naming, slots: int, k: int) -> tuple[str, ...]:
    """Factors of a dim of slots."""
    if slots % k:
        raise ShardingError(f"{slots} slots are no multiple of {k} per token")
    return naming.dim("t", slots // k, whole=True) + naming.dim("k", k, whole=True)


def _route(call: OpCall) -> OpSignature:
    """``moe_route(ids, experts, k) -> (order, counts, splits)``."""
    naming = Naming()
    slots = _slots(naming, call.shape(0)[0], call.integer(2))
    experts = naming.dim("e", call.integer(1), whole=True)
    return naming.build([(slots,)], [(slots,), (experts,), ((), experts)])


def _dispatch(call: OpCall) -> OpSignature:
    """``moe_dispatch(x, order, splits, k)``."""
    naming, slots, experts = _call(call)
    rest = naming.dims(call.shape(0)[1:], prefix="h")
    return naming.build(
        [(slots[:1] if "t" in naming.sizes else (), *rest), (slots,), ((), experts)],
        [(slots, *rest)],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
    )


def _combine(call: OpCall) -> OpSignature:
    """``moe_combine(rows, order, splits, k, shape)``."""
    naming, slots, experts = _call(call)
    rest = naming.dims(call.shape(0)[1:], prefix="h")
    tokens: Dims = (slots[:1] if "t" in naming.sizes else (), *rest)
    return naming.build(
        [(slots, *rest), (slots,), ((), experts)],
        [tokens],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
        shape_arg=4,
    )


def _spread(call: OpCall) -> OpSignature:
    """``moe_spread(table, counts, order)``."""
    naming = Naming()
    experts = naming.dim("e", call.shape(0)[0], whole=True)
    rows = naming.dim("r", call.shape(2)[0], whole=True)
    rest = naming.dims(call.shape(0)[1:], prefix="h")
    return naming.build(
        [(experts, *rest), (experts,), (rows,)],
        [(rows, *rest)],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
    )


def _run_sums(call: OpCall) -> OpSignature:
    """``moe_run_sums(rows, counts)``."""
    naming = Naming()
    rows = naming.dim("r", call.shape(0)[0], whole=True)
    experts = naming.dim("e", call.shape(1)[0], whole=True)
    rest = naming.dims(call.shape(0)[1:], prefix="h")
    return naming.build(
        [(rows, *rest), (experts,)],
        [(experts, *rest)],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole,
    )


def _call(call: OpCall) -> tuple[Naming, tuple[str, ...], tuple[str, ...]]:
    naming = Naming()
    slots = _slots(naming, call.shape(1)[0], call.integer(3))
    return naming, slots, naming.dim("e", call.shape(2)[1], whole=True)


RULES: Mapping[str, Rule] = {
    "autopar.moe_route.default": _route,
    "autopar.moe_dispatch.default": _dispatch,
    "autopar.moe_combine.default": _combine,
    "autopar.moe_spread.default": _spread,
    "autopar.moe_run_sums.default": _run_sums,
    "autopar.grouped_mm.default": template(
        "(r!, k+), (e!, k+, n), (e!) -> (r!, n)", linear=((0,), (1,)), padded="k n"
    ),
    "autopar.grouped_mm_weight.default": template(
        "(r!, k), (r!, n), (e!) -> (e!, k, n)", linear=((0,), (1,)), padded="k n"
    ),
}
"""Rules by operator name."""
