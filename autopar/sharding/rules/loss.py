"""Negative log-likelihood as a sum and a count, so that means under ignore_index are exact."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.placement import Partial, Placement, R, Shard
from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature


def _class_dims(
    naming: Naming, scores: tuple[int, ...], target: tuple[int, ...]
) -> tuple[Dims, Dims, Dims]:
    """Dims of scores (n, c, ...), of targets (n, ...) and of class weights (c)."""
    targets = naming.dims(target, prefix="n")
    at = 1 if len(scores) > 1 else 0
    c = naming.dim("c", scores[at], whole=True)
    return (*targets[:at], c, *targets[at:]), targets, (c,)


def _sum(call: OpCall) -> OpSignature:
    """``nll_loss_sum(logp, target, weight?, ignore_index) -> sum``."""
    naming = Naming()
    scores, targets, weights = _class_dims(naming, call.shape(0), call.shape(1))
    others: tuple[Placement, ...] = tuple(R for _ in call.operands[1:])
    at = scores.index(weights[0]) if weights[0] else 0
    extra = AxisStrategy((Shard(at), *others), (Partial(),), "c", "nll_loss_sum")
    return naming.build(
        [scores, targets, *(weights for _ in call.operands[2:])],
        [()],
        reductions={names[0]: "sum" for names in targets if names},
        linear=call.linear_positions((0,), (2,)),
        extra=[extra if weights[0] else None],
        padded=("c",),
    )


def _count(call: OpCall) -> OpSignature:
    """``nll_count(target, weight?, ignore_index) -> total weight``."""
    naming = Naming()
    targets = naming.dims(call.shape(0), prefix="n")
    weights = [
        (naming.dim("c", call.shape(n)[0], whole=True),) for n in range(1, len(call.operands))
    ]
    return naming.build(
        [targets, *weights],
        [()],
        reductions={names[0]: "sum" for names in targets if names},
        linear=call.linear_positions((1,)),
    )


def _backward(call: OpCall) -> OpSignature:
    """``nll_loss_backward(g, target, weight?, ignore_index, classes, dtype) -> dlogp``.

    g is a scalar, or one gradient per sample.
    """
    naming = Naming()
    scores, targets, weights = _class_dims(naming, call.result_shape(), call.shape(1))
    at = scores.index(weights[0]) if weights[0] else 0
    extra = AxisStrategy(tuple(R for _ in call.operands), (Shard(at),), "c", "nll_loss_backward")
    return naming.build(
        [targets if call.shape(0) else (), targets, *(weights for _ in call.operands[2:])],
        [scores],
        linear=call.linear_positions((0,), (2,)),
        extra=[extra if weights[0] else None],
        padded=("c",),
    )


RULES: Mapping[str, Rule] = {
    "autopar.nll_loss_sum.default": _sum,
    "autopar.nll_count.default": _count,
    "autopar.nll_loss_backward.default": _backward,
}
"""Rules by operator name."""
