"""The price of a plan from the programs that its ranks will run.

This is the judge of a candidate: its decisions are localized, every program is priced by
:mod:`cost_models.evaluate`, memory is the peak of liveness, and the event simulator runs the action
lists. Nothing of the solver's own tables is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cluster import Cluster
from autopar.ir.graph import Graph, OutputKind, TensorMeta
from autopar.plan.actions import Action, ActionKind
from autopar.plan.orders import receives_ahead
from autopar.plan.types import CollectiveTotal, MemoryParts, MeshShape, ScheduleKind, TimeParts
from autopar.sharding.host_copies import HOST_COPIES
from autopar.sharding.placement import local_shape
from autopar.sharding.programs import LocalPrograms, ParamSpec, StagePrograms
from autopar.sharding.split_backward import BackwardHalves, split_backward
from autopar.solver.exact_memory import local_bytes, stage_memory
from autopar.solver.exact_step import ExactStep
from autopar.solver.order_times import in_flight_of
from cost_models.base import CostModel, HostCosts, slowest_group
from cost_models.evaluate import ProgramCost, evaluate_program
from cost_models.flops import tensors
from cost_models.lanes import Lane, Segment
from cost_models.local import is_cpu
from cost_models.memory import optimizer_state_bytes
from cost_models.memory_timeline import (
    StageMemory,
    memory_timelines,
    order_peak,
    order_peak_bytes,
)
from cost_models.offload import CopyPrice, copy_price, offload_s_per_byte, resident_bytes
from cost_models.simulate import Simulation, StageSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage's figures.

    Attributes:
        time: Seconds.
        memory: Bytes on one of its devices, as if it were alone there; each part at its largest.
        held: The same for a timeline.
        collectives: Calls and bytes per step.
        num_in_flight: Most micro-batches alive at once.
        parameters: Elements of the parameters that it owns.
        host_bytes: What it keeps of one micro-batch in host memory.
        host_state_bytes: Optimizer state in host memory.
    """

    time: TimeParts
    memory: MemoryParts
    held: StageMemory
    collectives: tuple[CollectiveTotal, ...]
    num_in_flight: int
    parameters: int
    host_bytes: int = 0
    host_state_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactFigures:
    """A plan's figures.

    Attributes:
        step_s: Seconds of a step, optimizer included.
        rank_bytes: Peak per pipeline rank.
        stages: By stage.
        step: The step up to the last reduction, without the optimizer's.
        scopes: By stage its own scopes by those of a stage that it is priced as.
        host_s: Part of the step that lies outside of its programs, on a host that was measured:
            calls, ranks that share cores, waiting for slower ones.
    """

    step_s: float
    rank_bytes: tuple[int, ...]
    stages: tuple[StageFigures, ...]
    step: ExactStep
    scopes: tuple[Mapping[str, str], ...]
    host_s: float = 0.0

    @property
    def simulation(self) -> Simulation:
        """The step up to the last reduction, without the optimizer's; made when it is asked for."""
        return self.step.simulation()

    @property
    def peak_bytes(self) -> int:
        """Peak of the worst device."""
        return max(self.rank_bytes)

    @property
    def peak_at(self) -> str:
        """When the worst device has most alive, in words."""
        worst = max(range(len(self.rank_bytes)), key=lambda rank: (self.rank_bytes[rank], -rank))
        own = self.step.mesh.stages_of(worst)
        held = [
            stage.held.named(self.scopes[s]) if s in own and self.scopes[s] else stage.held
            for s, stage in enumerate(self.stages)
        ]
        if self.step.is_plain:  # nothing overlaps: the order tells it too
            return order_peak(worst, self.step.rank_list(worst), {s: held[s] for s in own}).where
        return memory_timelines(self.simulation, held, ranks=[worst])[0].peak.where


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What surrounds the programs.

    Attributes:
        cluster: Where they run.
        model: Prices.
        mesh: Shape.
        schedule: Order of forwards and backwards.
        num_microbatches: Per step.
        zero_levels: By stage.
        optimizer: For the bytes of its state.
        optimizer_s_per_byte: Seconds of its step per byte of stored parameter.
        warmup: Forwards before the first backward, by pipeline rank, for 1F1B.
        offloads: Whether the optimizer's state is kept in host memory.
    """

    cluster: Cluster
    model: CostModel
    mesh: MeshShape
    schedule: ScheduleKind
    num_microbatches: int
    zero_levels: tuple[int, ...]
    optimizer: str
    optimizer_s_per_byte: float
    warmup: tuple[int, ...] | None = None
    offloads: bool = False

    def groups(self) -> dict[str, Sequence[int]]:
        """Slowest group along each axis in space."""
        mesh = MeshShape(dp=self.mesh.dp, tp=self.mesh.tp)
        return {axis: slowest_group(self.cluster, mesh, axis) for axis in ("dp", "tp")}


def exact_figures(programs: LocalPrograms, setting: Setting) -> ExactFigures:
    """Seconds and bytes of a localized plan."""
    mesh, count = setting.mesh, setting.num_microbatches
    groups = setting.groups()
    flights = in_flight_of(setting.schedule, mesh, count, setting.warmup)
    links, shared_s = _message_seconds(programs, setting), _shared_seconds(programs, setting)
    stages: list[StageFigures] = []
    seconds: list[StageSeconds] = []
    finish_s = 0.0
    own: dict[int, list[ParamSpec]] = {}
    for spec in programs.params.values():
        for index in spec.stages:
            own.setdefault(index, []).append(spec)
    yields = {r.stage for r in programs.results if r.kind is OutputKind.OUTPUT}
    known: dict[object, tuple[StageFigures, StageSeconds, float]] = {}
    for stage in programs.stages:
        index = stage.index
        # stages that are alike share their programs
        key = (
            id(stage.forward), id(stage.backward), setting.zero_levels[index],
            index in yields, bool(yields) and index < mesh.pp,
        )  # fmt: skip
        if key not in known:
            known[key] = _stage(programs, stage, own.get(index, []), setting, groups, flights)
        figures, stage_seconds, last_s = known[key]
        figures = replace(
            figures,
            memory=figures.held.at_most(flights[index]),
            num_in_flight=flights[index],
        )
        p2p_s = max((s for (source, _), s in links.items() if source == stage.index), default=0.0)
        sync_s = figures.time.sync_s + (shared_s if index < mesh.pp else 0.0)  # once on every rank
        stages.append(replace(figures, time=replace(figures.time, p2p_s=p2p_s, sync_s=sync_s)))
        seconds.append(stage_seconds)
        finish_s = max(finish_s, last_s)
    finish_s += shared_s
    ties = [
        (param.owner, other)
        for param in programs.params.values()
        for other in param.stages
        if other != param.owner
    ]
    step = ExactStep(
        kind=setting.schedule,
        mesh=mesh,
        num_microbatches=count,
        warmup=setting.warmup,
        zero_levels=tuple(setting.zero_levels),
        forward_edges=frozenset(programs.forward_edges),
        backward_edges=frozenset(programs.backward_edges),
        ties=tuple(ties),
        stages=seconds,
        links=links,
    )
    is_apart = mesh.virtual == 1 and not setting.schedule.splits_backward
    lists = () if is_apart else step.memory_lists()
    if setting.schedule.splits_backward:
        stages = [_with_own_peak(s, index, lists, mesh) for index, s in enumerate(stages)]
    run_s = step.makespan_s()
    update_s = max(
        sum(stages[s].time.optimizer_s for s in mesh.stages_of(rank)) for rank in range(mesh.pp)
    )
    makespan_s, call_s = run_s, 0.0
    if isinstance(setting.model, HostCosts):
        busy = [_compute_s(stages, mesh, rank, count) for rank in range(mesh.pp)]
        comm_s = max(_comm_s(stages, mesh, rank, count) for rank in range(mesh.pp))
        makespan_s = setting.model.shared_step_s(makespan_s, busy, comm_s)
        makespan_s += max(
            _waiting_s(stages, setting, setting.model, rank, busy[rank]) for rank in range(mesh.pp)
        )
        owned = [_num_owned(programs, mesh, rank) for rank in range(mesh.pp)]
        call_s = setting.model.call_time_s(max(owned))
    return ExactFigures(
        step_s=makespan_s + finish_s + call_s + update_s,
        host_s=max(0.0, makespan_s - run_s) + call_s,
        rank_bytes=_rank_bytes(stages, setting, lists),
        stages=tuple(stages),
        step=step,
        scopes=tuple(stage.scopes for stage in programs.stages),
    )


def _stages_of(stages: Sequence[StageFigures], mesh: MeshShape, rank: int) -> list[StageFigures]:
    return [stages[s] for s in mesh.stages_of(rank)]


def _compute_s(
    stages: Sequence[StageFigures], mesh: MeshShape, rank: int, num_microbatches: int
) -> float:
    """Seconds that a pipeline rank computes in a step."""
    times = [s.time for s in _stages_of(stages, mesh, rank)]
    per_microbatch = [
        t.forward_s - t.forward_comm_s + t.backward_s - t.backward_comm_s for t in times
    ]
    return num_microbatches * sum(per_microbatch)


def _comm_s(
    stages: Sequence[StageFigures], mesh: MeshShape, rank: int, num_microbatches: int
) -> float:
    """Seconds that a pipeline rank communicates in a step."""
    times = [s.time for s in _stages_of(stages, mesh, rank)]
    once_s = sum(t.reduce_s + t.unshard_s for t in times)
    return once_s + num_microbatches * sum(t.forward_comm_s + t.backward_comm_s for t in times)


def _waiting_s(
    stages: Sequence[StageFigures],
    setting: Setting,
    model: HostCosts,
    rank: int,
    compute_s: float,
) -> float:
    """Seconds that a pipeline rank waits for slower ones in a step.

    It meets its group at each collective of a micro-batch, at all that are issued together once,
    and its neighbours at each message that it receives.
    """
    mesh, count = setting.mesh, setting.num_microbatches
    own = _stages_of(stages, mesh, rank)
    total_s = 0.0
    for axis, size in (("dp", mesh.dp), ("tp", mesh.tp)):
        totals = [t for stage in own for t in stage.collectives if t.axis == axis]
        waits = sum(t.count for t in totals if t.where != "once per step")
        waits += any(t.where == "once per step" for t in totals)
        if size > 1 and waits:
            total_s += model.waiting_s(size, waits, compute_s)
    if mesh.pp > 1:
        total_s += model.waiting_s(2, 2 * count * len(own), compute_s)
    return total_s


def _num_owned(programs: LocalPrograms, mesh: MeshShape, rank: int) -> int:
    """Parameters of a pipeline rank."""
    return sum(mesh.pipeline_rank(p.owner) == rank for p in programs.params.values())


def _rank_bytes(
    stages: Sequence[StageFigures], setting: Setting, lists: Sequence[Sequence[Action]]
) -> tuple[int, ...]:
    """Peak per pipeline rank.

    With one stage and whole backwards every part is at its largest at once. Else what a device
    holds is followed through its list: its stages are not at their peaks at the same time.
    """
    mesh = setting.mesh
    if not lists:
        return tuple(stage.memory.total_bytes for stage in stages)
    return tuple(
        order_peak_bytes(lists[rank], {s: stages[s].held for s in mesh.stages_of(rank)})
        for rank in range(mesh.pp)
    )


def _with_own_peak(
    figures: StageFigures, index: int, lists: Sequence[Sequence[Action]], mesh: MeshShape
) -> StageFigures:
    """A stage whose backwards are split, with the bytes of its worst moment as if it were alone.

    How much a micro-batch holds then depends on which half of its backward has run.
    """
    actions = lists[mesh.pipeline_rank(index)]
    peak = order_peak(0, actions, {index: figures.held})
    return replace(figures, memory=peak.parts)


def _message_seconds(programs: LocalPrograms, setting: Setting) -> dict[tuple[int, int], float]:
    """Seconds of the messages of one micro-batch between two stages."""
    if setting.mesh.pp == 1:
        return {}
    ends = slowest_group(setting.cluster, setting.mesh, "pp")
    seconds: dict[tuple[int, int], float] = {}
    for edges in (programs.forward_edges, programs.backward_edges):
        for edge, names in edges.items():
            amounts = [programs.edge_metas[n].bytes for n in names]
            seconds[edge] = sum(setting.model.collective_time_s("p2p", b, ends) for b in amounts)
    return seconds


def _shared_seconds(programs: LocalPrograms, setting: Setting) -> float:
    """Seconds until the losses and outputs of a step are on all pipeline ranks."""
    if setting.mesh.pp == 1:
        return 0.0
    ends = slowest_group(setting.cluster, setting.mesh, "pp")
    shared = (OutputKind.LOSS, OutputKind.OUTPUT)
    amounts = [r.spec.meta.bytes for r in programs.results if r.kind in shared]
    return sum(setting.model.collective_time_s("broadcast", b, ends) for b in amounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Forward and backward of a stage; with seconds of the sums over micro-batches."""

    forward: ProgramCost
    backward: ProgramCost
    backward_s: float
    weight_s: float
    halves: BackwardHalves | None
    segments: Mapping[ActionKind, Sequence[Segment]]


def _passes(stage: StagePrograms, setting: Setting, groups: Mapping[str, Sequence[int]]) -> _Passes:
    count, copies = setting.num_microbatches, _copies(stage, setting)

    def price(graph: Graph, where: str) -> ProgramCost:
        return evaluate_program(
            graph, setting.model, groups, where=where, runs=count, copies=copies
        )

    forward, backward = price(stage.forward, "forward"), price(stage.backward, "backward")
    summed_s = _summing_seconds(stage, setting) * (count - 1) / count
    halves = split_backward(stage.backward) if setting.schedule.splits_backward else None
    backward_s, weight_s = backward.total_s + summed_s, 0.0
    parts = {ActionKind.FORWARD: forward, ActionKind.BACKWARD: backward}
    if halves is not None:
        first, second = price(halves.inputs, "backward"), price(halves.weights, "backward")
        parts |= {ActionKind.BACKWARD_INPUT: first, ActionKind.BACKWARD_WEIGHT: second}
        if backward.segments:  # each half waits for its own copies
            backward_s = first.total_s + second.total_s + summed_s
        # views that are made again may have to copy
        weight_s = min(second.total_s + summed_s, backward_s)
    return _Passes(
        forward=forward,
        backward=backward,
        backward_s=backward_s,
        weight_s=weight_s,
        halves=halves,
        segments=_segments(parts, summed_s),
    )


def _stage(
    programs: LocalPrograms,
    stage: StagePrograms,
    own: Sequence[ParamSpec],
    setting: Setting,
    groups: Mapping[str, Sequence[int]],
    flights: Sequence[int],
) -> tuple[StageFigures, StageSeconds, float]:
    count, level = setting.num_microbatches, setting.zero_levels[stage.index]
    reduces = count if level >= 2 else 1

    at_once = setting.model
    if isinstance(at_once, HostCosts):
        at_once = at_once.in_bursts()

    def price(graph: Graph, runs: int, model: CostModel = setting.model) -> ProgramCost:
        return evaluate_program(graph, model, groups, where="once per step", runs=runs)

    passes = _passes(stage, setting, groups)
    forward, backward = passes.forward, passes.backward
    reduce = price(stage.reduce, reduces, at_once)
    unshard = price(stage.unshard, 1, at_once)
    prologue = price(stage.prologue, 1)
    finish = price(stage.finish, 1)
    costs = (forward, backward, prologue, unshard, reduce, finish)
    update_s = _update_seconds(programs, stage.index, own, setting)
    tied_s = _tied_seconds(programs, own, setting)
    once = {
        ActionKind.PROLOGUE: prologue.total_s,
        ActionKind.UNSHARD: unshard.total_s,
        ActionKind.REDUCE_GRAD: reduce.total_s,
        ActionKind.FETCH_TIED: tied_s,
        ActionKind.SYNC_TIED: tied_s,
    }
    seconds = StageSeconds(
        forward_s=forward.total_s,
        backward_s=passes.backward_s,
        once_s=once,
        weight_s=passes.weight_s,
        segments=passes.segments,
    )
    held = stage_memory(
        programs,
        stage,
        own,
        zero_level=level,
        num_microbatches=count,
        optimizer=setting.optimizer,
        pp=setting.mesh.pp,
        halves=passes.halves,
        receives_ahead=receives_ahead(setting.warmup),
        is_cpu=is_cpu(setting.cluster),
    )
    held, copy_s, state_bytes = _offloaded(held, programs, stage.index, own, setting)
    figures = StageFigures(
        time=TimeParts(
            forward_s=forward.total_s,
            backward_s=passes.backward_s,
            forward_comm_s=forward.comm_s,
            backward_comm_s=backward.comm_s,
            reduce_s=reduce.total_s * reduces,
            unshard_s=unshard.total_s,
            optimizer_s=update_s + copy_s,
            weight_s=passes.weight_s,
            copy_s=copy_s,
            offload_s=forward.copy_s,
            fetch_s=backward.copy_s,
            sync_s=prologue.total_s + finish.total_s + tied_s * (2 if backward.total_s > 0 else 1),
        ),
        memory=held.at_most(flights[stage.index]),
        held=held,
        collectives=_merged([t for cost in costs for t in cost.collectives]),
        num_in_flight=flights[stage.index],
        parameters=sum(p.meta.numel for p in own if p.owner == stage.index),
        host_bytes=forward.copied_bytes,
        host_state_bytes=state_bytes,
    )
    return figures, seconds, finish.total_s


def _copies(stage: StagePrograms, setting: Setting) -> CopyPrice:
    """What the copies of a stage's programs to host memory take, each way."""
    if not any(node.op in HOST_COPIES for node in stage.forward.nodes):
        return CopyPrice()
    return copy_price(setting.cluster, "activations")


def _segments(
    parts: Mapping[ActionKind, ProgramCost], summed_s: float
) -> dict[ActionKind, tuple[Segment, ...]]:
    """What the programs of a stage do beside computing; empty if they copy nothing."""
    if not any(cost.segments for cost in parts.values()):
        return {}
    found = {}
    for kind, cost in parts.items():
        own = cost.segments or (Segment(lane=Lane.COMPUTE, seconds=cost.total_s),)
        sums = kind is ActionKind.BACKWARD_WEIGHT or kind is ActionKind.BACKWARD
        last = (Segment(lane=Lane.COMPUTE, seconds=summed_s),) if sums and summed_s else ()
        found[kind] = (*own, *last)
    return found


def _offloaded(
    held: StageMemory,
    programs: LocalPrograms,
    stage: int,
    own: Sequence[ParamSpec],
    setting: Setting,
) -> tuple[StageMemory, float, int]:
    """With the optimizer's state where it is kept: bytes, seconds of copies, bytes on the host."""
    if not setting.offloads:
        return held, 0.0, 0
    states = []
    for param in own:
        if param.owner == stage and param.requires_grad:
            shape = local_shape(param.meta.shape, param.storage, programs.axis_sizes)
            meta = TensorMeta(shape, param.meta.dtype)
            states.append(optimizer_state_bytes(setting.optimizer, meta))
    here = resident_bytes(sum(states), max(states, default=0), is_cpu=is_cpu(setting.cluster))
    copy_s = sum(states) * offload_s_per_byte(setting.cluster)
    return replace(held, optimizer_bytes=here), copy_s, sum(states)


def _update_seconds(
    programs: LocalPrograms, stage: int, own: Sequence[ParamSpec], setting: Setting
) -> float:
    """Seconds of the optimizer's step over the parameters that a stage owns."""
    owned = [p for p in own if p.owner == stage]
    trained = [p for p in owned if p.requires_grad]
    updated_bytes = sum(local_bytes(p.meta, p.storage, programs) for p in trained)
    update_s: float | None = None
    if isinstance(setting.model, HostCosts):
        update_s = setting.model.optimizer_time_s(setting.optimizer, len(trained), updated_bytes)
    if update_s is not None:
        return update_s
    return updated_bytes * setting.optimizer_s_per_byte


def _summing_seconds(stage: StagePrograms, setting: Setting) -> float:
    """Seconds of adding the gradients of one more micro-batch to those before."""
    if not isinstance(setting.model, HostCosts):
        return 0.0
    graph = stage.reduce if setting.zero_levels[stage.index] >= 2 else stage.backward
    metas = graph.metas()
    values = [metas[o.value.name] for o in graph.outputs_of(OutputKind.GRAD) if o.value]
    amounts = [t.bytes for t in tensors(values)]
    return setting.model.accumulate_time_s(len(amounts), sum(amounts)) if amounts else 0.0


def _tied_seconds(programs: LocalPrograms, own: Sequence[ParamSpec], setting: Setting) -> float:
    """Seconds of fetching (or returning) every tied weight of a stage."""
    tied = [p for p in own if len(p.stages) > 1]
    if setting.mesh.pp == 1 or not tied:
        return 0.0
    ends = slowest_group(setting.cluster, setting.mesh, "pp")
    return sum(
        setting.model.collective_time_s("p2p", local_bytes(p.meta, p.storage, programs), ends)
        for p in tied
    )


def _merged(totals: Sequence[CollectiveTotal]) -> tuple[CollectiveTotal, ...]:
    """Totals of one kind, axis and pass together, sorted."""
    table: dict[tuple[str, str, str], CollectiveTotal] = {}
    for total in totals:
        key = (total.where, total.kind, total.axis)
        old = table.get(key)
        table[key] = CollectiveTotal(
            kind=total.kind,
            axis=total.axis,
            where=total.where,
            count=total.count + (old.count if old else 0),
            payload_bytes=total.payload_bytes + (old.payload_bytes if old else 0),
            time_s=total.time_s + (old.time_s if old else 0.0),
        )
    return tuple(table[key] for key in sorted(table))
