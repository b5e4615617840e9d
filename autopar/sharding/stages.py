"""Which stage every operator runs in.

Stages are contiguous in the forward order: stage ``k`` begins at a given operator. A backward
operator runs where its forward twin does, never later than the gradients it reads (gradients flow
towards earlier stages); one without a twin (the sum of two gradients) goes by dataflow alone. What
depends on call arguments alone, and views of parameters, belongs to no stage: every stage that
needs it makes its own.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TypeGuard

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, InputKind, Node, Output, OutputKind
from autopar.sharding.dim_classes import argument_only_values

VIEW_OPS = frozenset(
    {
        "aten.view.default",
        "aten.permute.default",
        "aten.expand.default",
        "aten.slice.Tensor",
        "aten.select.int",
        "getitem",
    }
)


@dataclass(frozen=True, slots=True)
class StageMap:
    """Stage of every operator.

    Attributes:
        stage: Operator -> stage; operators that every stage makes for itself are left out.
        backward: Operators that depend on a tangent.
        forward_needed: Operators that losses, outputs or mutations depend on.
        num_stages: Number of stages.
    """

    stage: dict[str, int]
    backward: frozenset[str]
    forward_needed: frozenset[str]
    num_stages: int

    def is_own(self, name: str) -> TypeGuard[str]:
        """Whether an operator belongs to one stage."""
        return name in self.stage


def ancestors(graph: Graph, roots: set[str]) -> frozenset[str]:
    """Operators that ``roots`` depend on, themselves included."""
    needed = set(roots)
    for node in reversed(graph.nodes):
        if node.name in needed:
            needed.update(node.refs())
    return frozenset(n.name for n in graph.nodes if n.name in needed)


def backward_operators(graph: Graph) -> frozenset[str]:
    """Operators that depend on a tangent."""
    reached = {i.name for i in graph.of_kind(InputKind.TANGENT)}
    for node in graph.nodes:
        if any(ref in reached for ref in node.refs()):
            reached.add(node.name)
    return frozenset(n.name for n in graph.nodes if n.name in reached)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What does not depend on where stages begin.

    Attributes:
        position: Of every operator.
        backward: As in :class:`StageMap`.
        needed: Likewise ``forward_needed``.
        shared: Operators that every stage makes for itself.
    """

    position: dict[str, int]
    backward: frozenset[str]
    needed: frozenset[str]
    shared: set[str]


def _facts_of(graph: Graph) -> _Facts:
    """Found once for each graph: plans are localized again and again."""
    found = graph.kept.get("stages")
    if isinstance(found, _Facts):
        return found
    backward = backward_operators(graph)
    forward_roots = {
        o.value.name
        for o in graph.outputs
        if o.value is not None
        and o.kind in (OutputKind.LOSS, OutputKind.OUTPUT, OutputKind.MUTATION)
    }
    needed = ancestors(graph, forward_roots)
    position = {node.name: index for index, node in enumerate(graph.nodes)}
    facts = _Facts(position, backward, needed, _shared(graph, needed | backward))
    graph.kept["stages"] = facts
    return facts


def assign_stages(graph: Graph, firsts: tuple[str, ...]) -> StageMap:
    """Stage of every operator.

    Args:
        graph: The joint graph.
        firsts: First forward operator of stages 1, 2, ..., in execution order.

    Raises:
        ShardingError: A first operator does not exist or they are out of order.
    """
    facts = _facts_of(graph)
    position, backward, needed, shared = facts.position, facts.backward, facts.needed, facts.shared
    starts = []
    for name in firsts:
        if name not in position:
            raise ShardingError(f"stage boundary {name!r} is no operator of the graph")
        starts.append(position[name])
    if starts != sorted(set(starts)):
        raise ShardingError(f"stage boundaries {firsts} are not in execution order")
    stage: dict[str, int] = {}
    last = len(firsts)
    for index, node in enumerate(graph.nodes):
        if node.name in shared:
            continue
        if node.op == "getitem":
            stage[node.name] = stage[node.refs()[0]]
        elif node.name in needed:
            stage[node.name] = bisect_right(starts, index)
        else:
            stage[node.name] = _by_dataflow(node, stage, backward, last)
    return StageMap(stage, backward, needed, last + 1)


def _shared(graph: Graph, placed: frozenset[str]) -> set[str]:
    """Operators that every stage makes for itself.

    Args:
        graph: The joint graph.
        placed: Operators of the forward and the backward pass; the rest serves backward alone
            (a transposed activation) and is made where it is read.
    """
    shared = argument_only_values(graph) | {i.name for i in graph.inputs}
    mutated = {o.value.name for o in graph.outputs_of(OutputKind.MUTATION) if o.value}
    tangents = {i.name for i in graph.of_kind(InputKind.TANGENT)}
    for node in graph.nodes:
        refs = node.refs()
        if node.name not in placed or (
            node.op in VIEW_OPS and refs and all(r in shared and r not in tangents for r in refs)
        ):
            shared.add(node.name)
    return {n for n in shared if n not in mutated}


def _by_dataflow(node: Node, stage: dict[str, int], backward: frozenset[str], last: int) -> int:
    """Stage of a backward operator."""
    ceiling = min((stage[r] for r in node.refs() if r in backward and r in stage), default=last)
    if node.twin is not None and node.twin in stage:
        return min(stage[node.twin], ceiling)
    forward = [stage[r] for r in node.refs() if r not in backward and r in stage]
    return min(max(forward, default=ceiling), ceiling)


@dataclass(frozen=True, slots=True)
class StageDemand:
    """What one stage must make.

    Attributes:
        wanted: Values that it computes or receives.
        nodes: The operators that make them, in order.
        exports: Values of its own that other stages read.
        readers: Own exported value -> stages that read it.
        results: Graph outputs that it yields.
    """

    wanted: set[str]
    nodes: tuple[Node, ...]
    exports: set[str]
    readers: dict[str, tuple[int, ...]]
    results: tuple[Output, ...]


def stage_demands(
    graph: Graph, stage_map: StageMap, gather_outputs: frozenset[str]
) -> tuple[StageDemand, ...]:
    """What every stage must make, by one walk from the results back.

    Args:
        graph: The joint graph.
        stage_map: Stage of every operator.
        gather_outputs: Paths of the outputs that are wanted; losses, mutations and gradients
            always are.
    """
    count = stage_map.num_stages
    needs: dict[str, set[int]] = {}
    results: list[list[Output]] = [[] for _ in range(count)]
    for output in graph.outputs:
        if output.value is None:
            continue
        if output.kind is OutputKind.OUTPUT and output.target not in gather_outputs:
            continue
        # what every stage can make is yielded by the last, gradients by the first
        default = 0 if output.kind is OutputKind.GRAD else count - 1
        stage = stage_map.stage.get(output.value.name, default)
        results[stage].append(output)
        needs.setdefault(output.value.name, set()).add(stage)
    nodes: list[list[Node]] = [[] for _ in range(count)]
    readers: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    for node in reversed(graph.nodes):
        stages = needs.get(node.name)
        if not stages:
            continue
        home = stage_map.stage.get(node.name)
        for stage in stages:
            nodes[stage].append(node)
        if home is not None:
            others = tuple(sorted(stages - {home}))
            if others:
                readers[home][node.name] = others
            if home not in stages:
                nodes[home].append(node)
            stages = {home}
        for ref in node.refs():
            needs.setdefault(ref, set()).update(stages)
    return tuple(
        StageDemand(
            wanted={n.name for n in nodes[s]},
            nodes=tuple(reversed(nodes[s])),
            exports=set(readers[s]),
            readers=readers[s],
            results=tuple(results[s]),
        )
        for s in range(count)
    )
