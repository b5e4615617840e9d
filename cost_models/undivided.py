"""Which part of the arithmetic a split really divides.

A split can be right and still vacuous: every rank computes everything. :func:`undivided` counts the
FLOPs of matmuls, convolutions and attention of a graph, and those of operators that every rank of
an axis runs whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.sharding.decisions import Choice
from autopar.sharding.placement import Routed, Shard
from autopar.sharding.signature import AxisStrategy
from cost_models.flops import flops


@dataclass(frozen=True, slots=True)
class Undivided:
    """FLOPs of one step, and what of them is not divided.

    Attributes:
        total_flops: Of the whole graph.
        whole_flops: Of operators that every rank runs whole.
        whole: Names of those operators, the costliest first.
    """

    total_flops: float
    whole_flops: float
    whole: tuple[str, ...]

    @property
    def whole_share(self) -> float:
        """Part of the FLOPs that every rank computes, between 0 and 1."""
        return self.whole_flops / self.total_flops if self.total_flops else 0.0

    def __str__(self) -> str:
        """Such as ``12.5% of 3.2e+06 FLOPs whole on every rank: mm_4, mm_7``."""
        names = f": {', '.join(self.whole[:5])}" if self.whole else ""
        return f"{self.whole_share:.1%} of {self.total_flops:.3g} FLOPs whole on every rank{names}"


def undivided(graph: Graph, choices: Mapping[str, Choice]) -> Undivided:
    """How much of a graph's arithmetic a split over one axis divides.

    Args:
        graph: The joint graph.
        choices: Operator -> strategy over the axis, as
            :attr:`~autopar.sharding.propagate.AxisChoices.choices`; what is left out is whole.
    """
    metas = graph.metas()
    total = 0.0
    whole: dict[str, float] = {}
    for node in graph.nodes:
        amount = flops(node.op, node.args, [metas[r] for r in node.refs()], node.meta)
        total += amount
        choice = choices.get(node.name)
        if amount and not (isinstance(choice, AxisStrategy) and divides(choice)):
            whole[node.name] = amount
    names = sorted(whole, key=lambda name: (-whole[name], name))
    return Undivided(total, sum(whole.values()), tuple(names))


def divides(strategy: AxisStrategy) -> bool:
    """Whether a rank holds a share of an operand or result; a pending sum is no share."""
    return any(isinstance(p, Shard | Routed) for p in (*strategy.inputs, *strategy.outputs))
