"""Which operators of a program can't be split: the rules that are missing, and what that costs.

Two ways in which every rank does the same work, neither of which is an error: an operator has no
rule, so it runs replicated; or it has one, but the splits of its neighbours leave it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, InputKind, Node
from autopar.sharding.build import signatures_of
from autopar.sharding.propagate import DataAxes
from autopar.sharding.signature import AxisStrategy, OpSignature
from cost_models.flops import work_of
from cost_models.undivided import divides


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Operators and arithmetic of a program, and the part of both that is not split.

    Attributes:
        num_ops: Operators.
        flops: Arithmetic of all of them.
        unruled: Operators without a rule, as ``"op at source"``.
        unruled_flops: Their arithmetic.
        whole: Operator kinds with a rule that every data rank runs whole on values of the batch,
            with their FLOPs, largest first.
    """

    num_ops: int
    flops: float
    unruled: tuple[str, ...]
    unruled_flops: float
    whole: tuple[tuple[str, float], ...]

    @property
    def unruled_share(self) -> float:
        """Share of the operators that have no rule."""
        return len(self.unruled) / max(1, self.num_ops)

    @property
    def unruled_flops_share(self) -> float:
        """Share of the arithmetic that has no rule."""
        return self.unruled_flops / max(1.0, self.flops)

    @property
    def whole_flops_share(self) -> float:
        """Share of the arithmetic that data ranks repeat although a rule exists."""
        return sum(flops for _, flops in self.whole) / max(1.0, self.flops)


def coverage(
    graph: Graph, signatures: Mapping[str, OpSignature | None] | None = None, *, dp: int = 2
) -> Coverage:
    """What of a program the rules split.

    Operators that depend on no call argument (positions, weights alone) are not repeated work of
    the batch and never count as whole.

    Args:
        graph: The joint graph.
        signatures: Named dims of its operators; made from the rules of this process if None.
        dp: Data ranks that are asked about.

    Raises:
        ShardingError: The batch can't be cut into ``dp`` parts.
    """
    signatures = signatures_of(graph) if signatures is None else signatures
    choices = DataAxes(graph, signatures).split(num_microbatches=1, dp=dp).dp.choices
    metas = graph.metas()
    of_batch = {i.name for i in graph.inputs if i.kind in (InputKind.USER, InputKind.TANGENT)}
    total = unruled_flops = 0.0
    num_ops = 0
    unruled: list[str] = []
    whole: dict[str, float] = {}
    for node in graph.nodes:
        if of_batch & set(node.refs()):
            of_batch.add(node.name)
        if node.op == "getitem":
            continue
        num_ops += 1
        flops = work_of(node.op, node.args, [metas[r] for r in node.refs()], node.meta).flops
        total += flops
        if signatures.get(node.name) is None:
            unruled.append(f"{node.op} at {node.source or node.name}")
            unruled_flops += flops
        elif node.name in of_batch and not _is_split(node, choices.get(node.name)):
            whole[node.op] = whole.get(node.op, 0.0) + flops
    return Coverage(
        num_ops=num_ops,
        flops=total,
        unruled=tuple(unruled),
        unruled_flops=unruled_flops,
        whole=tuple(sorted(whole.items(), key=lambda item: (-item[1], item[0]))),
    )


def _is_split(node: Node, choice: object) -> bool:
    """Whether each rank has a part; a single number has none."""
    if all(meta is None or meta.numel <= 1 for meta in node.metas()):
        return True
    if not isinstance(choice, AxisStrategy):
        return False
    return divides(choice)
