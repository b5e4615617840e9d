"""The one place that decides local form: one stage of a joint graph over local shapes.

Per stage, operators are emitted in execution order over local shapes; where an operand is not in
the layout that its reader wants, a reshard is emitted at the reader, once per (value, layout,
pass). Then the stage's operators are divided into programs (:mod:`autopar.sharding.split`).

Rules that the solver's prices rely on:

* a reshard is shared by all readers of the same pass in the same stage;
* a backward reader that needs a forward value in a *larger* layout gathers it again in backward
  (the gathered copy is not kept); one that needs a resolved pending sum, or a smaller block that
  forward has made already, reads what forward made;
* gradients stay pending over ``mb`` and ``dp`` until the ``reduce`` program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Input, Node, Output, OutputKind, Phase, Ref, TensorMeta
from autopar.sharding.decisions import Decisions
from autopar.sharding.emitter import Emitter
from autopar.sharding.placement import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    local_shape,
)
from autopar.sharding.programs import AXES
from autopar.sharding.signature import AxisStrategy, OpSignature
from autopar.sharding.stages import StageDemand, StageMap

Signatures = Mapping[str, OpSignature | None]


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layout of every value of the joint graph, over the axes that split."""

    graph: Graph
    decisions: Decisions
    metas: Mapping[str, TensorMeta]
    table: Mapping[str, Layout]
    nodes: Mapping[str, Node]
    inputs: Mapping[str, Input]

    @staticmethod
    def of(graph: Graph, decisions: Decisions) -> Layouts:
        """Read them off the choices."""
        axes = decisions.axes
        table: dict[str, Layout] = {}
        metas: dict[str, TensorMeta] = {}
        for entry in graph.inputs:
            full = decisions.input_layout(entry.name)
            table[entry.name] = tuple(full[AXES.index(a)] for a in axes)
            if entry.meta is not None:
                metas[entry.name] = entry.meta
        for node in graph.nodes:
            if node.op == "getitem":
                key = f"{node.refs()[0]}#{node.args[1]}"
                table[node.name], metas[node.name] = table[key], metas[key]
                continue
            strategies = [decisions.strategy(a, node.name) for a in axes]
            for index, meta in enumerate(node.metas()):
                key = f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name
                table[key] = tuple(R if s is None else s.outputs[index] for s in strategies)
                if meta is not None:
                    metas[key] = meta
        return Layouts(graph, decisions, metas, table, graph.node_map(), graph.input_map())

    def full(self, name: str) -> Layout:
        """Layout over all of :data:`AXES`."""
        by_axis = dict(zip(self.decisions.axes, self.table[name], strict=True))
        return tuple(by_axis.get(a, R) for a in AXES)


@dataclass(slots=True)
class StageBody:
    """One stage's operators over local shapes, before they are divided into programs.

    Attributes:
        emitter: Forward and backward operators, in order.
        prologue: Operators that run once per step on the whole batch.
        received: Global value -> stage that it comes from.
        read_inputs: Names of graph inputs that the forward or backward operators read.
        prologue_inputs: Names of graph inputs that the prologue reads.
        prologue_values: Name in the emitter -> reference in the prologue.
        sends: Global value -> local reference, for values that other stages need.
        results: (kind, target, reference, layout) of losses, outputs and mutations.
        grads: Parameter -> (reference, layout over the splitting axes).
    """

    index: int
    emitter: Emitter
    prologue: Emitter
    received: dict[str, int] = field(default_factory=dict)
    read_inputs: dict[str, None] = field(default_factory=dict)
    prologue_inputs: dict[str, None] = field(default_factory=dict)
    prologue_values: dict[str, Ref] = field(default_factory=dict)
    sends: dict[str, Ref] = field(default_factory=dict)
    results: list[tuple[OutputKind, str, Ref, Layout]] = field(default_factory=list)
    grads: dict[str, tuple[Ref, Layout]] = field(default_factory=dict)


class StageLocalizer:
    """Emits one stage."""

    def __init__(
        self, index: int, layouts: Layouts, signatures: Signatures, stage_map: StageMap
    ) -> None:
        self.layouts, self.signatures, self.map = layouts, signatures, stage_map
        self.graph, self.decisions = layouts.graph, layouts.decisions
        axes = self.decisions.axes
        sizes = tuple(self.decisions.size(a) for a in axes)
        self.body = StageBody(index, Emitter(axes, sizes), Emitter(axes, sizes, prefix="pro_"))
        self._nodes, self._inputs = layouts.nodes, layouts.inputs
        # (value, layout) -> local reference made in that pass
        self._made: dict[tuple[str, Layout, Phase], Ref] = {}
        self._home: dict[str, tuple[Ref, Layout]] = {}
        self._pro_home: dict[str, tuple[Ref, Layout]] = {}
        self._pro_made: dict[tuple[str, Layout], Ref] = {}

    # -- emission --------------------------------------------------------------------------------
    def run(self, demand: StageDemand) -> StageBody:
        """Emit everything that the stage's own results and other stages need."""
        for node in demand.nodes:
            stage = self.map.stage.get(node.name)
            if stage is not None and stage != self.body.index:
                self._receive(node, stage)
            elif node.op == "getitem":
                self._home[node.name] = self._home[f"{node.refs()[0]}#{node.args[1]}"]
            else:
                self._operator(node)
            if node.name in demand.exports:
                self.body.sends[node.name] = self._home[node.name][0]
        for output in demand.results:
            self._result(output)
        return self.body

    def _receive(self, node: Node, stage: int) -> None:
        meta, layout = self.layouts.metas[node.name], self.layouts.table[node.name]
        emitter = self.body.emitter
        local = TensorMeta(local_shape(meta.shape, layout, emitter.sizes), meta.dtype)
        self._home[node.name] = (emitter.bind(node.name, local), layout)
        self.body.received[node.name] = stage

    def _input(self, name: str) -> tuple[Ref, Layout]:
        if name not in self._home:
            entry, emitter = self._inputs[name], self.body.emitter
            layout = self.layouts.table[name]
            meta = entry.meta
            if meta is not None:
                meta = TensorMeta(local_shape(meta.shape, layout, emitter.sizes), meta.dtype)
            self._home[name] = (emitter.bind(name, meta), layout)
            self.body.read_inputs[name] = None
        return self._home[name]

    def _operator(self, node: Node) -> None:
        emitter, axes = self.body.emitter, self.decisions.axes
        strategies = [self.decisions.strategy(a, node.name) for a in axes]
        phase = Phase.BACKWARD if node.name in self.map.backward else Phase.FORWARD
        refs = node.refs()
        operands = [
            self._operand(
                ref, tuple(R if s is None else s.inputs[i] for s in strategies), phase, node
            )
            for i, ref in enumerate(refs)
        ]
        results = self._emit_at(emitter, node, phase, strategies, operands)
        for index, ref in enumerate(results):
            if ref is not None:
                key = f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name
                self._home[key] = (ref, self.layouts.table[key])

    def _emit_at(
        self,
        emitter: Emitter,
        node: Node,
        phase: Phase,
        strategies: list[AxisStrategy | None],
        operands: list[Ref],
    ) -> tuple[Ref | None, ...]:
        placed = Node(
            name=node.name, op=node.op, args=node.args, meta=node.meta, kwargs=node.kwargs,
            phase=phase, twin=node.twin, scope=node.scope, source=node.source,
        )  # fmt: skip
        metas = [self.layouts.metas.get(r, TensorMeta((), "int64")) for r in node.refs()]
        return emitter.operator(placed, self.signatures.get(node.name), strategies, operands, metas)

    def _operand(self, name: str, want: Layout, phase: Phase, reader: Node) -> Ref:
        """The value in the layout that a reader wants, made if need be."""
        axes = self.decisions.axes
        have = self.layouts.table[name]
        if "mb" in axes:
            at = axes.index("mb")
            if have[at] != want[at] and not isinstance(have[at], Replicate):
                return self._from_prologue(name, want)
        ref, have = self._home[name] if name in self._home else self._input(name)
        if have == want:
            return ref
        emitter = self.body.emitter
        key = (name, want, phase)
        if key in self._made:
            return self._made[key]
        earlier = self._made.get((name, want, Phase.FORWARD))
        if earlier is not None and emitter.meta(earlier).bytes <= emitter.meta(ref).bytes:
            return earlier
        node = self._nodes.get(name)
        emitter.origin = _at_phase(node if node is not None else reader, phase, reader, name)
        emitter.phase = phase
        shape = self.layouts.metas[name].shape
        self._made[key] = emitter.reshard(ref, shape, have, want)
        return self._made[key]

    # -- once per step ---------------------------------------------------------------------------
    def _from_prologue(self, name: str, want: Layout) -> Ref:
        """A value computed on the whole batch, once per step."""
        emitter, at = self.body.emitter, self.decisions.axes.index("mb")
        whole = tuple(R if i == at else p for i, p in enumerate(want))
        ref = self._pro_made.get((name, whole))
        if ref is None:
            ref = self._pro_value(name, whole)
            self._pro_made[name, whole] = ref
        local = f"prologue_{ref.name}"
        if local not in self.body.prologue_values:
            self.body.prologue_values[local] = ref
            emitter.bind(local, self.body.prologue.meta(ref))
        if whole == want:
            return Ref(local)
        emitter.origin = None
        return emitter.reshard(Ref(local), self.layouts.metas[name].shape, whole, want)

    def _pro_value(self, name: str, want: Layout) -> Ref:
        prologue = self.body.prologue
        if name not in self._pro_home:
            wanted = {name}
            for node in reversed(self.graph.nodes):
                if node.name in wanted or any(
                    f"{node.name}#{i}" in wanted for i in range(len(node.metas()))
                ):
                    wanted.update(node.refs())
            for node in self.graph.nodes:
                if node.name in wanted and node.name not in self._pro_home:
                    self._pro_operator(node)
        ref, have = self._pro_home[name] if name in self._pro_home else self._pro_input(name)
        if have == want:
            return ref
        made = self._pro_made.get((name, want))
        if made is None:
            prologue.origin = self._nodes.get(name)
            made = prologue.reshard(ref, self.layouts.metas[name].shape, have, want)
            self._pro_made[name, want] = made
        return made

    def _whole(self, layout: Layout) -> Layout:
        axes = self.decisions.axes
        return tuple(R if a == "mb" else p for a, p in zip(axes, layout, strict=True))

    def _pro_input(self, name: str) -> tuple[Ref, Layout]:
        entry, prologue = self._inputs[name], self.body.prologue
        layout = self._whole(self.layouts.table[name])
        meta = entry.meta
        if meta is not None:
            meta = TensorMeta(local_shape(meta.shape, layout, prologue.sizes), meta.dtype)
        self._pro_home[name] = (prologue.bind(name, meta), layout)
        self.body.prologue_inputs[name] = None
        return self._pro_home[name]

    def _pro_operator(self, node: Node) -> None:
        if node.op == "getitem":
            self._pro_home[node.name] = self._pro_home[f"{node.refs()[0]}#{node.args[1]}"]
            return
        axes = self.decisions.axes
        strategies = [None if a == "mb" else self.decisions.strategy(a, node.name) for a in axes]
        operands = [
            self._pro_value(ref, tuple(R if s is None else s.inputs[i] for s in strategies))
            for i, ref in enumerate(node.refs())
        ]
        results = self._emit_at(self.body.prologue, node, Phase.FORWARD, strategies, operands)
        for index, ref in enumerate(results):
            if ref is not None:
                key = f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name
                layout = tuple(R if s is None else s.outputs[index] for s in strategies)
                self._pro_home[key] = (ref, layout)

    # -- results ---------------------------------------------------------------------------------
    def _result(self, output: Output) -> None:
        if output.value is None:
            return
        name = output.value.name
        if output.kind is OutputKind.GRAD:
            self._grad(output.target, name)
            return
        layout = self.layouts.table[name]
        want = self._result_layout(output.kind, layout)
        ref = self._final(name, want, Phase.FORWARD, self._nodes.get(name))
        self.body.results.append((output.kind, output.target, ref, want))

    def _result_layout(self, kind: OutputKind, layout: Layout) -> Layout:
        """A loss stays pending; outputs and mutations are made whole on every rank."""
        wanted: list[Placement] = []
        for axis, have in zip(self.decisions.axes, layout, strict=True):
            if kind is OutputKind.LOSS:
                wanted.append(P if axis == "mb" else have)
            else:
                wanted.append(have if axis == "mb" else R)
        return tuple(wanted)

    def _final(self, name: str, want: Layout, phase: Phase, reader: Node | None) -> Ref:
        ref, have = self._home[name] if name in self._home else self._input(name)
        if have == want:
            return ref
        return self._operand(name, want, phase, reader or next(iter(self.graph.nodes)))

    def _grad(self, target: str, name: str) -> None:
        """Gradients are sums over micro-batches; several of one parameter are added here."""
        have = self.layouts.table[name]
        want = tuple(P if a == "mb" else p for a, p in zip(self.decisions.axes, have, strict=True))
        ref = self._final(name, want, Phase.BACKWARD, self._nodes.get(name))
        if target not in self.body.grads:
            self.body.grads[target] = (ref, want)
            return
        emitter = self.body.emitter
        first, layout = self.body.grads[target]
        emitter.origin, emitter.phase = self._nodes.get(name), Phase.BACKWARD
        shape = self.layouts.metas[name].shape
        common = layout if layout == want else _common(layout, want)
        first = emitter.reshard(first, shape, layout, common)
        ref = emitter.reshard(ref, shape, want, common)
        total = emitter.emit("aten.add.Tensor", (first, ref), emitter.meta(first))
        self.body.grads[target] = (total, common)


def _at_phase(node: Node, phase: Phase, reader: Node, name: str) -> Node:
    """The value's producer, dressed as an operator of the reader's pass."""
    return Node(
        name=name, op=node.op, args=(), meta=node.meta, phase=phase,
        twin=reader.twin, scope=reader.scope, source=reader.source,
    )  # fmt: skip


def _common(left: Layout, right: Layout) -> Layout:
    """A layout that both can reach: equal parts stay, different ones become pending or whole."""
    merged: list[Placement] = []
    for a, b in zip(left, right, strict=True):
        if a == b:
            merged.append(a)
        elif isinstance(a, Partial | Replicate) and isinstance(b, Partial | Replicate):
            merged.append(P)
        elif isinstance(a, Shard):
            merged.append(a)
        else:
            merged.append(b)
    return tuple(merged)
