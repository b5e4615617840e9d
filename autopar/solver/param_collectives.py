"""Which collectives some parameters cause: read off the programs that the ranks run.

A parameter causes what gathers it and reduces its gradient, once per step; and, in the programs of
a micro-batch, what brings the other operands of the operator that reads it, and what its result
goes through before the next arithmetic. An exchange that several operators share (one gather for
query, key and value) is caused by each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Input, InputKind, Node, OutputKind
from autopar.plan.types import CollectiveTotal, MeshShape
from autopar.sharding.programs import LocalPrograms
from autopar.sharding.stages import VIEW_OPS
from cost_models.base import CostModel
from cost_models.evaluate import collective_axis, payload_bytes

# Operators that only move data: what a collective serves lies beyond them.
_MOVES = VIEW_OPS | {
    "aten._to_copy.default", "aten.cat.default", "aten.clone.default",
    "aten.constant_pad_nd.default", "local.first", "local.mask", "local.shard",
}  # fmt: skip


def caused_collectives(
    programs: LocalPrograms,
    names: Collection[str],
    model: CostModel,
    groups: Mapping[str, Sequence[int]],
    num_reduces: Sequence[int],
    mesh: MeshShape,
) -> tuple[int, tuple[CollectiveTotal, ...]]:
    """Calls, bytes and seconds in one step on one device: that on which they take longest.

    Args:
        programs: The localized plan.
        names: First names of the parameters.
        model: Prices.
        groups: Global ranks along each mesh axis.
        num_reduces: By stage, gradient reductions per step.
        mesh: Which stages a device has.

    Returns:
        The device's pipeline rank, the first of those that are alike, and its collectives.
    """
    targets = _targets(programs, names)
    count = programs.axis_sizes[0]
    rows: list[tuple[CollectiveTotal, ...]] = []
    for rank in range(mesh.pp):
        found = _Totals(model, groups)
        for stage in (programs.stages[s] for s in mesh.stages_of(rank)):
            for graph, runs in ((stage.unshard, 1), (stage.reduce, num_reduces[stage.index])):
                found.add(graph, _on_paths(graph, targets), "once per step", runs)
            around = _around_readers(stage.backward, targets)
            around |= _before_gradients(stage.backward, targets)
            found.add(stage.forward, _around_readers(stage.forward, targets), "forward", count)
            found.add(stage.backward, around, "backward", count)
        rows.append(found.ordered())
    seconds = [sum(total.time_s for total in row) for row in rows]
    busiest = seconds.index(max(seconds))
    return busiest, rows[busiest]


@dataclass(frozen=True, slots=True)
class _Totals:
    """Collectives by when, kind and axis; more are added to them."""

    model: CostModel
    groups: Mapping[str, Sequence[int]]
    totals: dict[tuple[str, str, str], CollectiveTotal] = field(default_factory=dict)

    def add(self, graph: Graph, found: set[str], where: str, runs: int) -> None:
        """Those of ``found`` in a program that runs ``runs`` times."""
        metas = graph.metas()
        for node in graph.nodes:
            if node.name not in found:
                continue
            kind, axis = node.op.removeprefix("comm."), collective_axis(node)
            payload = payload_bytes([metas[r] for r in node.refs()][:1], node.meta)
            time_s = self.model.collective_time_s(kind, payload, self.groups.get(axis, (0,)))
            old = self.totals.get((where, kind, axis))
            self.totals[where, kind, axis] = CollectiveTotal(
                kind=kind,
                axis=axis,
                where=where,
                count=runs + (old.count if old else 0),
                payload_bytes=runs * payload + (old.payload_bytes if old else 0),
                time_s=runs * time_s + (old.time_s if old else 0.0),
            )

    def ordered(self) -> tuple[CollectiveTotal, ...]:
        """By when, kind and axis."""
        return tuple(self.totals[key] for key in sorted(self.totals))


def _targets(programs: LocalPrograms, names: Collection[str]) -> set[str]:
    """Names under which programs read and write the parameters: their own, and their parts'."""
    found = set(names)
    for name in names:
        param = programs.params.get(name)
        if param is not None:
            found.update(part.target for part in param.parts)
    return found


def _is_comm(node: Node) -> bool:
    return node.op.startswith("comm.")


def _on_paths(graph: Graph, targets: Collection[str]) -> set[str]:
    """Collectives between the parameters' inputs and their outputs, in a once-per-step program."""
    reached = {i.name for i in graph.inputs if i.target in targets}
    for node in graph.nodes:
        if any(ref in reached for ref in node.refs()):
            reached.add(node.name)
    return {node.name for node in graph.nodes if node.name in reached and _is_comm(node)}


def _around_readers(graph: Graph, targets: Collection[str]) -> set[str]:
    """Collectives around the operators that read the parameters."""
    nodes, users = graph.node_map(), graph.users()
    inputs = [i for i in graph.inputs if i.kind is InputKind.PARAM and i.target in targets]
    found: set[str] = set()
    for reader, through in _readers(inputs, nodes, users):
        others = [ref for ref in reader.refs() if ref not in through]
        found |= _comm_before(others, nodes)
        found |= _comm_after(reader.name, nodes, users)
    return found


def _readers(
    inputs: Sequence[Input], nodes: Mapping[str, Node], users: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Node, set[str]]]:
    """Operators that compute with the parameters, and the values that stand for them there."""
    for entry in inputs:
        through, waiting = {entry.name}, [entry.name]
        while waiting:
            for name in users[waiting.pop()]:
                node = nodes[name]
                if node.op in _MOVES or _is_comm(node):
                    if name not in through:
                        through.add(name)
                        waiting.append(name)
                else:
                    yield node, through


def _comm_before(names: Sequence[str], nodes: Mapping[str, Node]) -> set[str]:
    """Collectives that values went through since the last arithmetic."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        node = nodes.get(waiting.pop())
        if node is None or not (node.op in _MOVES or _is_comm(node)) or node.name in found:
            continue
        if _is_comm(node):
            found.add(node.name)
        waiting += node.refs()
    return found


def _comm_after(
    name: str, nodes: Mapping[str, Node], users: Mapping[str, Sequence[str]]
) -> set[str]:
    """Collectives that a result goes through before the next arithmetic."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for user in users[waiting.pop()]:
            node = nodes[user]
            if user in seen or not (node.op in _MOVES or _is_comm(node)):
                continue
            seen.add(user)
            if _is_comm(node):
                found.add(user)
            waiting.append(user)
    return found


def _before_gradients(graph: Graph, targets: Collection[str]) -> set[str]:
    """Collectives around the operators that make the parameters' gradients."""
    nodes = graph.node_map()
    found: set[str] = set()
    for output in graph.outputs_of(OutputKind.GRAD):
        if output.target not in targets or output.value is None:
            continue
        found |= _comm_before([output.value.name], nodes)
        maker = _maker(output.value.name, nodes)
        if maker is not None:
            found |= _comm_before(list(maker.refs()), nodes)
    return found


def _maker(name: str, nodes: Mapping[str, Node]) -> Node | None:
    """The arithmetic that a value comes from."""
    node = nodes.get(name)
    while node is not None and (node.op in _MOVES or _is_comm(node)):
        refs = node.refs()
        node = nodes.get(refs[0]) if refs else None
    return node
