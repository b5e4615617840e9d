"""From a joint graph and decisions to :class:`~autopar.sharding.programs.LocalPrograms`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import ShardingError
from autopar.ir.graph import (
    Graph,
    InputKind,
    Meta,
    Output,
    OutputKind,
    Ref,
    TensorMeta,
)
from autopar.ir.precision_rules import sum_dtype
from autopar.sharding.alike import Likeness, Words, likeness
from autopar.sharding.decisions import Decisions
from autopar.sharding.host_copies import with_host_copies
from autopar.sharding.localize import Layouts, Signatures, StageBody, StageLocalizer
from autopar.sharding.parameters import Mover, param_spec, parameter_inputs
from autopar.sharding.placement import Layout, R, Varying
from autopar.sharding.programs import (
    AXES,
    LocalPrograms,
    ParamSpec,
    ResultSpec,
    StagePrograms,
    TensorSpec,
)
from autopar.sharding.routing import with_routed_splits
from autopar.sharding.rules import Memo, Registry, default_registry
from autopar.sharding.signature import OpSignature
from autopar.sharding.split import Halves, assemble, split_forward_backward
from autopar.sharding.stages import StageDemand, StageMap, assign_stages, stage_demands

EMPTY = Graph((), (), ())


@dataclass(slots=True)
class KeptBodies:
    """Local operators of the last decisions: others that differ in what is made again share them.

    Attributes:
        decisions: The last ones, but for what is made again and how parameters rest.
        layouts: Of all values.
        bodies: By stage, of those that were localized.
    """

    decisions: Decisions | None = None
    layouts: Layouts | None = None
    bodies: dict[int, StageBody] = field(default_factory=dict)


def localize(
    graph: Graph,
    decisions: Decisions,
    signatures: Signatures,
    kept: KeptBodies | None = None,
    *,
    words: Words | None = None,
) -> LocalPrograms:
    """The programs of every stage.

    Args:
        graph: The joint graph, global shapes.
        decisions: What the plan says.
        signatures: Named dims of every operator (:func:`signatures_of`).
        words: For programs that are priced, not run: stages that are alike then share those of
            the first of them, under its names (:mod:`autopar.sharding.alike`).
        kept: What the last call for this graph with this argument has made, if that fits.

    Raises:
        ShardingError: The decisions don't fit the graph.
    """
    stage_map = assign_stages(graph, decisions.firsts)
    demands = stage_demands(graph, stage_map, decisions.gather_outputs)
    kept = kept or KeptBodies()
    key = replace(
        decisions, recompute=frozenset(), offload=frozenset(), offload_window_bytes=0,
        zero_levels=(),
    )  # fmt: skip
    if kept.decisions != key or kept.layouts is None:
        kept.decisions, kept.layouts, kept.bodies = key, Layouts.of(graph, decisions), {}
    layouts, count = kept.layouts, stage_map.num_stages
    alike = Likeness.none(count)
    if words is not None:
        alike = likeness(layouts.inputs, decisions, stage_map, demands, words)
    bodies: list[StageBody] = []
    for stage, at in enumerate(alike.of):
        if at != stage:
            bodies.append(alike.body(stage, bodies[at], demands[stage], stage_map))
            continue
        if stage not in kept.bodies:
            localizer = StageLocalizer(stage, layouts, signatures, stage_map)
            kept.bodies[stage] = localizer.run(demands[stage])
        bodies.append(kept.bodies[stage])
    made = _Builder(graph, decisions, layouts, stage_map, demands, bodies, alike)
    return made.build(signatures)


def signatures_of(
    graph: Graph,
    registry: Registry | None = None,
    memo: Memo | None = None,
    *,
    expert_capacity_percent: int = 0,
) -> dict[str, OpSignature | None]:
    """Named dims of every operator; None where there is no rule.

    Args:
        graph: The joint graph.
        registry: Rules; the built-in ones and the user's own if None.
        memo: Signatures found earlier, so that a repeated block costs nothing.
        expert_capacity_percent: Row budget where experts are split
            (:func:`~autopar.sharding.routing.with_routed_splits`).
    """
    rules = registry or default_registry()
    memo = {} if memo is None else memo
    metas = graph.metas()
    found = {
        node.name: rules.signature(node, [metas[r] for r in node.refs()], memo=memo)
        for node in graph.nodes
        if node.op != "getitem"
    }
    return with_routed_splits(graph, found, expert_capacity_percent)


@dataclass(slots=True)
class _Builder:
    graph: Graph
    decisions: Decisions
    layouts: Layouts
    map: StageMap
    demands: tuple[StageDemand, ...]
    bodies: list[StageBody]
    alike: Likeness
    values: dict[tuple[OutputKind, str], str] = field(default_factory=dict)
    own: dict[int, list[ParamSpec]] = field(default_factory=dict)  # parameters, by stage

    def build(self, signatures: Signatures) -> LocalPrograms:
        self.values = {(o.kind, o.target): o.value.name for o in self.graph.outputs if o.value}
        varying = self._has_varying()
        halves: list[Halves] = []
        for body, at in zip(self.bodies, self.alike.of, strict=True):
            halves.append(self._halves(body) if at == body.index else halves[at])
        params = self._params(halves)
        for spec in params.values():
            for stage in spec.stages:
                self.own.setdefault(stage, []).append(spec)
        forward_edges, backward_edges = self._edges()
        stages: list[StagePrograms] = []
        for body, half, at in zip(self.bodies, halves, self.alike.of, strict=True):
            if at == body.index:
                stages.append(self._programs(body, half))
                continue
            scopes = self.alike.scopes[body.index]
            stages.append(replace(stages[at], index=body.index, scopes=scopes))
        return LocalPrograms(
            axis_sizes=self.decisions.axis_sizes,
            stages=tuple(stages),
            params=params,
            buffers={
                i.target: i.meta for i in self.graph.of_kind(InputKind.BUFFER) if i.meta is not None
            },
            buffer_stages=self._stages_of(stages, InputKind.BUFFER, OutputKind.MUTATION),
            users=self._specs(InputKind.USER),
            user_stages=self._stages_of(stages, InputKind.USER, None),
            tangents=self._specs(InputKind.TANGENT),
            results=self._results(varying),
            forward_edges=forward_edges,
            backward_edges=backward_edges,
            edge_metas=self._edge_metas(),
            grads=self._grads(),
            saved={body.index: half.saved for body, half in zip(self.bodies, halves, strict=True)},
            unruled=tuple(
                f"{n.op} at {n.source or n.name}"
                for n in self.graph.nodes
                if n.op != "getitem" and signatures.get(n.name) is None
            ),
        )

    # -- helpers -----------------------------------------------------------------------------------
    def _full(self, layout: Layout) -> Layout:
        by_axis = dict(zip(self.decisions.axes, layout, strict=True))
        return tuple(by_axis.get(a, R) for a in AXES)

    def _has_varying(self) -> bool:
        return any(
            isinstance(p, Varying)
            for body in self.bodies
            for kind, _, _, layout in body.results
            if kind is OutputKind.MUTATION
            for p in layout
        )

    def _specs(self, kind: InputKind) -> dict[str, TensorSpec]:
        return {
            i.target: TensorSpec(i.meta, self.layouts.full(i.name))
            for i in self.graph.of_kind(kind)
            if i.meta is not None
        }

    def _stages_of(
        self, stages: Sequence[StagePrograms], kind: InputKind, output: OutputKind | None
    ) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {i.target: set() for i in self.graph.of_kind(kind)}
        for stage in stages:
            for program in (stage.prologue, stage.forward, stage.backward):
                for entry in program.of_kind(kind):
                    found[entry.target].add(stage.index)
            if output is not None:
                for result in stage.forward.outputs_of(output):
                    found.setdefault(result.target, set()).add(stage.index)
        return {name: tuple(sorted(where)) for name, where in found.items()}

    def _results(self, varying: bool) -> tuple[ResultSpec, ...]:
        specs = []
        for body in self.bodies:
            for kind, target, _, layout in body.results:
                full = self._full(layout)
                if kind is OutputKind.MUTATION and varying:
                    full = (Varying(), *full[1:])
                meta = self.layouts.metas[self.values[kind, target]]
                specs.append(
                    ResultSpec(
                        kind=kind, target=target, stage=body.index, spec=TensorSpec(meta, full)
                    )
                )
        return tuple(specs)

    def _grads(self) -> dict[tuple[int, str], TensorSpec]:
        found = {}
        for body in self.bodies:
            for spec in self.own.get(body.index, ()):
                targets = [p.target for p in spec.parts] or [spec.name]
                for target in targets:
                    if target in body.grads:
                        layout = self._full(body.grads[target][1])
                        found[body.index, spec.name] = TensorSpec(spec.grad_meta, layout)
        return found

    # -- edges -------------------------------------------------------------------------------------
    def _edges(
        self,
    ) -> tuple[dict[tuple[int, int], tuple[str, ...]], dict[tuple[int, int], tuple[str, ...]]]:
        forward: dict[tuple[int, int], list[str]] = {}
        backward: dict[tuple[int, int], list[str]] = {}
        for demand, body in zip(self.demands, self.bodies, strict=True):
            for name in body.sends:
                for reader in demand.readers[name]:
                    table = forward if self._goes_forward(name, body.index, reader) else backward
                    table.setdefault((body.index, reader), []).append(name)
        return (
            {edge: tuple(names) for edge, names in sorted(forward.items())},
            {edge: tuple(names) for edge, names in sorted(backward.items())},
        )

    def _goes_forward(self, name: str, source: int, reader: int) -> bool:
        if name in self.map.backward and reader > source:
            raise ShardingError(
                f"gradient {name!r} of stage {source} is read by later stage {reader}"
            )
        return reader > source

    def _edge_metas(self) -> dict[str, TensorMeta]:
        metas = {}
        for body in self.bodies:
            for name, ref in body.sends.items():
                metas[name] = body.emitter.meta(ref)
        return metas

    # -- programs ----------------------------------------------------------------------------------
    def _halves(self, body: StageBody) -> Halves:
        demand = self.demands[body.index]
        forward_roots = [ref.name for _, _, ref, _ in body.results]
        backward_roots = [ref.name for ref, _ in body.grads.values()]
        for name, ref in body.sends.items():
            for reader in demand.readers[name]:
                goes = self._goes_forward(name, body.index, reader)
                (forward_roots if goes else backward_roots).append(ref.name)
        forward_only = frozenset(n for n, stage in body.received.items() if stage < body.index)
        return split_forward_backward(
            tuple(body.emitter.nodes),
            list(dict.fromkeys(forward_roots)),
            list(dict.fromkeys(backward_roots)),
            forward_only,
            self.decisions.recompute,
        )

    def _params(self, halves: list[Halves]) -> dict[str, ParamSpec]:
        entries = parameter_inputs(self.graph)
        used: dict[str, set[int]] = {name: set() for name in entries}
        by_target = {i.target: i.param for i in self.graph.of_kind(InputKind.PARAM)}
        inputs = self.layouts.inputs
        for body, half in zip(self.bodies, halves, strict=True):
            read = {r for n in (*half.forward, *half.backward) for r in n.refs()}
            read |= {ref.name for _, _, ref, _ in body.results} | set(half.saved)
            for target in body.grads:
                used[by_target[target]].add(body.index)
            own = self.alike.names[body.index]
            for name in self.bodies[self.alike.of[body.index]].read_inputs:
                if name in read and inputs[name].kind is InputKind.PARAM:
                    used[inputs[own.get(name, name)].param].add(body.index)
        levels = self.decisions.zero_levels
        specs = {}
        for name, parts in entries.items():
            stages = tuple(sorted(used[name])) or (0,)
            level = levels[stages[0]] if stages[0] < len(levels) else 0
            specs[name] = param_spec(name, parts, stages, level, self.layouts, self.decisions)
        return specs

    def _programs(self, body: StageBody, half: Halves) -> StagePrograms:
        describe = self._describe(body)
        forward_outputs = self._forward_outputs(body, half)
        backward_outputs = self._backward_outputs(body)
        saved = set(half.saved)
        metas = body.emitter.metas
        in_backward = dict(describe)
        in_backward.update({n: (InputKind.SAVED, n, metas[n]) for n in saved})
        forward, backward = with_host_copies(
            assemble(half.forward, forward_outputs, describe),
            assemble(half.backward, backward_outputs, in_backward),
            self.decisions.offload,
            self.decisions.offload_window_bytes,
        )
        return StagePrograms(
            index=body.index,
            unshard=self._unshard(body),
            prologue=self._prologue(body),
            forward=forward,
            backward=backward,
            reduce=self._reduce(body),
            finish=self._finish(body),
        )

    def _describe(self, body: StageBody) -> dict[str, tuple[InputKind, str, Meta]]:
        inputs, metas = self.layouts.inputs, body.emitter.metas
        table: dict[str, tuple[InputKind, str, Meta]] = {}
        for name in body.read_inputs:
            table[name] = (inputs[name].kind, inputs[name].target, metas[name])
        for name in body.received:
            table[name] = (InputKind.RECV, name, metas[name])
        for name, ref in body.prologue_values.items():
            table[name] = (InputKind.PROLOGUE, name, body.prologue.meta(ref))
        return table

    def _forward_outputs(self, body: StageBody, half: Halves) -> tuple[Output, ...]:
        demand = self.demands[body.index]
        outputs = [
            Output(OutputKind.SEND, name, ref)
            for name, ref in body.sends.items()
            if any(self._goes_forward(name, body.index, r) for r in demand.readers[name])
        ]
        outputs += [Output(kind, target, ref) for kind, target, ref, _ in body.results]
        outputs += [Output(OutputKind.SAVED, name, Ref(name)) for name in half.saved]
        return tuple(outputs)

    def _backward_outputs(self, body: StageBody) -> tuple[Output, ...]:
        demand = self.demands[body.index]
        outputs = [
            Output(OutputKind.SEND, name, ref)
            for name, ref in body.sends.items()
            if any(not self._goes_forward(name, body.index, r) for r in demand.readers[name])
        ]
        outputs += [Output(OutputKind.GRAD, t, ref) for t, (ref, _) in body.grads.items()]
        return tuple(outputs)

    def _prologue(self, body: StageBody) -> Graph:
        inputs, metas = self.layouts.inputs, body.prologue.metas
        describe: dict[str, tuple[InputKind, str, Meta]] = {
            n: (inputs[n].kind, inputs[n].target, metas[n]) for n in body.prologue_inputs
        }
        outputs = tuple(
            Output(OutputKind.PROLOGUE, name, ref) for name, ref in body.prologue_values.items()
        )
        return assemble(tuple(body.prologue.nodes), outputs, describe)

    def _mover(self) -> Mover:
        return Mover(self.decisions)

    def _unshard(self, body: StageBody) -> Graph:
        mover = self._mover()
        for spec in self.own.get(body.index, ()):
            mover.unshard(spec)
        return mover.program(OutputKind.PARAM)

    def _reduce(self, body: StageBody) -> Graph:
        mover = self._mover()
        grads = {t: self._full(layout) for t, (_, layout) in body.grads.items()}
        for spec in self.own.get(body.index, ()):
            mover.reduce(spec, grads)
        return mover.program(OutputKind.GRAD)

    def _finish(self, body: StageBody) -> Graph:
        mover = self._mover()
        for kind, target, _, layout in body.results:
            if kind is OutputKind.LOSS:
                meta = self.layouts.metas[self.values[kind, target]]
                wide = TensorMeta(meta.shape, sum_dtype(meta.dtype))
                ref = mover.bind(InputKind.GRAD, target, wide, self._full(layout))
                whole = mover.move(ref, meta, self._full(layout), (R, R, R))
                mover.yields(target, mover.cast(whole, meta.dtype))
        return mover.program(OutputKind.LOSS)
