"""Bytes on a device over a simulated step: by part, at every moment, and the moment of the peak.

What a stage holds from the first to the last action (parameters, optimizer state, buffers) is
given; everything else follows the spans. Saved values live from the start of a micro-batch's
forward to the end of its backward, gathered parameters from UNSHARD to RESHARD, transients as the
program's own liveness says (:mod:`cost_models.liveness`) while it runs. A program's operators are
spread over its span by their seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autopar.errors import ConfigError
from autopar.ir.graph import Graph, InputKind, Node, OutputKind
from autopar.plan.actions import Action, ActionKind
from autopar.plan.types import MemoryParts
from cost_models.lanes import Lane
from cost_models.liveness import cpu_workspace, liveness
from cost_models.spans import Simulation, Span

K = ActionKind
_MESSAGES = frozenset({K.SEND_F, K.RECV_F, K.SEND_B, K.RECV_B})
_WORDS = {
    K.FORWARD: "forward",
    K.BACKWARD: "backward",
    K.BACKWARD_INPUT: "backward of the inputs",
    K.BACKWARD_WEIGHT: "backward of the weights",
    K.REDUCE_GRAD: "reduction of gradients",
    K.OPTIMIZER: "optimizer step",
    K.UNSHARD: "gathering of parameters",
    K.PROLOGUE: "prologue",
}


@dataclass(frozen=True)
class ProgramMemory:
    """What a program holds while it runs, beyond what is counted for the stage.

    Attributes:
        timeline: Bytes during each operator, in order; may be negative where inputs were freed.
        nodes: The operators; empty if they have no names.
        seconds: Of each operator, on any scale; equal ones if empty.
    """

    timeline: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()
    seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name, found in (("operators", self.nodes), ("seconds", self.seconds)):
            if found and len(found) != len(self.timeline):
                raise ConfigError(
                    f"ProgramMemory: {len(self.timeline)} moments but {len(found)} {name}; give "
                    "one for each, or none"
                )

    @property
    def peak_bytes(self) -> int:
        """The most, at least 0."""
        return max(0, max(self.timeline, default=0))

    @property
    def peak_at(self) -> int | None:
        """Which operator runs then; None if nothing is ever allocated."""
        return self.timeline.index(self.peak_bytes) if self.peak_bytes > 0 else None

    @cached_property
    def peak_moment(self) -> int:
        """The first operator with the most bytes."""
        return max(range(len(self.timeline)), key=self.timeline.__getitem__)

    def shares(self) -> list[float]:
        """Where each operator begins, as a share of the program's time."""
        weights = self.seconds or (1.0,) * len(self.timeline)
        total = sum(weights)
        if total <= 0:
            weights, total = (1.0,) * len(self.timeline), float(len(self.timeline))
        return [0.0, *(done / total for done in accumulate(weights))][: len(self.timeline)]

    def moments(self, *, every_operator: bool) -> list[tuple[int, float]]:
        """Operators to tell of and where they begin: all, or the first, most, next and last."""
        starts = self.shares()
        if every_operator:
            return list(enumerate(starts))
        last = len(starts) - 1
        peak = self.peak_moment
        return [(at, starts[at]) for at in sorted({0, peak, min(peak + 1, last), last})]

    def operator_words(self, position: int) -> str:
        """Such as ``"aten.mm of layers.5.mlp"``; "" if operators have no names."""
        if not self.nodes:
            return ""
        node = self.nodes[position]
        name = node.op.removesuffix(".default")
        return f"{name} of {node.scope}" if node.scope else name


def program_memory(
    graph: Graph,
    *,
    held_outputs: Collection[OutputKind] = (OutputKind.SAVED,),
    freed_inputs: Collection[InputKind] = (),
    input_groups: Mapping[str, str] | None = None,
    op_time_s: Callable[[Node], float] | None = None,
    is_cpu: bool = False,
) -> ProgramMemory:
    """The memory of a program.

    Args:
        graph: The program.
        held_outputs: As of :func:`cost_models.liveness.liveness`; the timeline counts them from
            the start of the program on, so they are taken off it until they are made.
        freed_inputs: As of :func:`cost_models.liveness.liveness`.
        input_groups: As there.
        op_time_s: Seconds of an operator; equal ones if left out.
        is_cpu: Whether it runs on CPUs: see :func:`cost_models.liveness.cpu_workspace`.
    """
    found = liveness(
        graph,
        held_outputs=held_outputs,
        freed_inputs=freed_inputs,
        input_groups=input_groups,
        workspace=cpu_workspace(graph) if is_cpu else None,
        held_when_made=True,
    )
    seconds = tuple(map(op_time_s, graph.nodes)) if op_time_s is not None else ()
    return ProgramMemory(found.timeline, tuple(graph.nodes), seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a stage takes on one of its devices.

    Attributes:
        params_bytes: Parameters that are there all the time.
        gathered_bytes: Parameters that are there from UNSHARD to RESHARD; while UNSHARD runs, its
            program (if there is one) tells how many are there.
        gathers_again: Whether they are gathered more than once in a step, so that values saved by
            forwards may be there.
        grads_bytes: Gradient accumulators.
        has_lasting_grads: Whether the accumulators are there all the time; else from the end of
            the first backward on, or of its reduction, where they hold reduced gradients and a
            program tells what is there while it runs.
        unreduced_bytes: Gradients of one micro-batch, from the end of its backward to the end of
            its reduction, where the accumulators do not hold them.
        optimizer_bytes: Optimizer state.
        buffers_bytes: Module buffers, received messages, arguments, outputs.
        sent_bytes: Messages that are kept until they have arrived.
        saved_bytes: What one micro-batch keeps from its forward to its backward.
        weight_saved_bytes: What of it, and of the gradients between operators, is kept from ``I``
            to ``W`` where the backward is split.
        offloaded_bytes: What of it is in host memory from the end of OFFLOAD to the start of
            RELOAD.
        programs: Transients while an action of a kind runs.
    """

    params_bytes: int = 0
    gathered_bytes: int = 0
    gathers_again: bool = False
    grads_bytes: int = 0
    has_lasting_grads: bool = True
    unreduced_bytes: int = 0
    optimizer_bytes: int = 0
    buffers_bytes: int = 0
    sent_bytes: int = 0
    saved_bytes: int = 0
    weight_saved_bytes: int = 0
    offloaded_bytes: int = 0
    programs: Mapping[ActionKind, ProgramMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_bytes") and not value >= 0:
                raise ConfigError(f"StageMemory: {each.name} is {value}, must be at least 0")

    def named(self, scopes: Mapping[str, str]) -> StageMemory:
        """The same with operators of other scopes.

        Args:
            scopes: By present scope; what is left out keeps its own.
        """
        programs = {
            kind: replace(
                program,
                nodes=tuple(replace(n, scope=scopes.get(n.scope, n.scope)) for n in program.nodes),
            )
            for kind, program in self.programs.items()
        }
        return replace(self, programs=programs)

    def at_most(self, num_in_flight: int) -> MemoryParts:
        """An upper bound of every moment: each part at its largest.

        Args:
            num_in_flight: Most micro-batches alive at once.
        """
        # gradients are reduced after the last backward, which has freed all that forwards saved, or
        # after each of them; parameters are gathered before the first forward, unless other stages
        # take turns with this one
        saved = self.saved_bytes * num_in_flight
        reduced = self.saved_bytes * min(1, num_in_flight) if self.unreduced_bytes else saved
        freed = {
            K.REDUCE_GRAD: reduced - self.unreduced_bytes,
            K.UNSHARD: self.gathered_bytes + (0 if self.gathers_again else saved),
        }
        transients = [p.peak_bytes - freed.get(k, 0) for k, p in self.programs.items()]
        return MemoryParts(
            params_bytes=self.params_bytes + self.gathered_bytes,
            grads_bytes=self.grads_bytes,
            optimizer_bytes=self.optimizer_bytes,
            activations_bytes=num_in_flight * self.saved_bytes,
            transient_bytes=max([0, *transients]),
            buffers_bytes=self.buffers_bytes + self.sent_bytes,
        )


class MemoryPoint(NamedTuple):
    """What is alive from a moment on.

    Attributes:
        second: The moment.
        parts: Bytes by part; ``transient_bytes`` is below 0 where a backward has freed more than
            it made, and counts gradients that wait for their reduction.
        action: What the device does then; None between actions.
        program: Its program, if the point is inside it.
        operator: Position of the operator in the program.
    """

    second: float
    parts: MemoryParts
    action: Action | None = None
    program: ProgramMemory | None = None
    operator: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return self.parts.total_bytes

    @property
    def where(self) -> str:
        """What the device does then, in words; "" between actions.

        Such as ``"stage 0, backward of micro-batch 3, at aten.mm of layers.5.mlp"``.
        """
        if self.action is None:
            return ""
        what = _WORDS.get(self.action.kind, self.action.kind.value)
        text = f"stage {self.action.stage}, {what}"
        if self.action.microbatch is not None:
            text += f" of micro-batch {self.action.microbatch}"
        words = self.program.operator_words(self.operator) if self.program is not None else ""
        return f"{text}, at {words}" if words else text


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of one device (of each of a pipeline rank's devices) over a step.

    Attributes:
        rank: Pipeline rank.
        points: In order of time; each holds until the next.
        reserve_factor: What the allocator reserves, over what is alive.
    """

    rank: int
    points: tuple[MemoryPoint, ...]
    reserve_factor: float = 1.0

    @property
    def peak(self) -> MemoryPoint:
        """The first moment of the most bytes."""
        return max(self.points, key=lambda p: p.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return self.peak.total_bytes

    @property
    def reserved_bytes(self) -> int:
        """What the allocator takes from the device for it."""
        return round(self.peak_bytes * self.reserve_factor)

    def at(self, second: float) -> MemoryPoint:
        """What is alive at a moment (before the first one: at the first one)."""
        position = bisect_right(self.points, second, key=lambda p: p.second)
        return self.points[max(0, position - 1)]


def memory_timelines(
    simulation: Simulation,
    stages: Sequence[StageMemory],
    *,
    reserve_factor: float = 1.0,
    every_operator: bool = False,
    ranks: Collection[int] | None = None,
) -> tuple[MemoryTimeline, ...]:
    """Memory over time, one for each pipeline rank.

    Args:
        simulation: When what happens.
        stages: Bytes by stage.
        reserve_factor: What a caching allocator reserves over what is alive, at least 1: measured
            on the target, or 1.
        every_operator: A point for every operator; else three for a program: its start, its most
            and its end.
        ranks: Whose memory; of all ranks if left out.

    Raises:
        ConfigError: A stage has no bytes, or ``reserve_factor`` is below 1.
    """
    if not reserve_factor >= 1:
        raise ConfigError(
            f"memory_timelines: reserve_factor is {reserve_factor}, must be at least 1: an "
            "allocator reserves no less than what is alive"
        )
    made = []
    for rank, spans in enumerate(simulation.by_rank):
        if ranks is not None and rank not in ranks:
            continue
        own = [s for s in spans if s.rank == rank and s.peer is None]
        for span in own:
            if span.action.stage >= len(stages):
                raise ConfigError(
                    f"memory_timelines: rank {rank} runs {span.action}, but bytes are given for "
                    f"{len(stages)} stages"
                )
        device = _Device(stages, {s.action.stage for s in own}, every_operator)
        made.append(MemoryTimeline(rank, device.points(own), reserve_factor))
    return tuple(made)


def order_timeline(
    rank: int, actions: Sequence[Action], stages: Mapping[int, StageMemory]
) -> MemoryTimeline:
    """Memory of a pipeline rank over its action list, each action a second long.

    What a device holds follows from what it has done, not from when: the most is that of any
    simulation of the list in which nothing overlaps.

    Args:
        rank: Pipeline rank.
        actions: Its list; actions of stages that are left out of ``stages`` do nothing.
        stages: Bytes by stage.
    """
    own = [a for a in actions if a.stage in stages and a.kind not in _MESSAGES]
    spans = [
        Span(rank, Lane.COMPUTE, action, float(at), at + 1.0, position=at)
        for at, action in enumerate(own)
    ]
    device = _Device(stages, {a.stage for a in own}, every_operator=False)
    return MemoryTimeline(rank, device.points(spans))


def order_peak(
    rank: int, actions: Sequence[Action], stages: Mapping[int, StageMemory]
) -> MemoryPoint:
    """The peak of :func:`order_timeline`, without the other moments.

    Args:
        rank: Pipeline rank.
        actions: Its list; actions of stages that are left out of ``stages`` do nothing.
        stages: Bytes by stage.
    """
    own = [a for a in actions if a.stage in stages and a.kind not in _MESSAGES]
    return _Device(stages, {a.stage for a in own}, every_operator=False).peak(own)


def order_peak_bytes(actions: Sequence[Action], stages: Mapping[int, StageMemory]) -> int:
    """The most bytes of :func:`order_timeline`, without its points."""
    return order_peak(0, actions, stages).total_bytes


@dataclass(slots=True)
class _Run:
    """One action: from the start of its first part to the end of the last that holds it back."""

    action: Action
    start_s: float
    end_s: float
    is_only_overlapping: bool


def _runs(spans: Sequence[Span]) -> Iterator[_Run]:
    """The actions of a rank, in order."""
    found: dict[int, _Run] = {}
    for span in spans:
        run = found.get(span.position)
        if run is None:
            found[span.position] = _Run(span.action, span.start_s, span.end_s, span.overlaps)
        elif run.is_only_overlapping or not span.overlaps:
            if not span.overlaps:
                run.is_only_overlapping = False
            run.end_s = max(run.end_s, span.end_s)
    for position in sorted(found):
        yield found[position]


class _Device:
    """Bytes of one device while its actions are gone through."""

    def __init__(
        self,
        stages: Sequence[StageMemory] | Mapping[int, StageMemory],
        own: Collection[int],
        every_operator: bool,
    ) -> None:
        self.stages = stages
        self.every_operator = every_operator
        held = [stages[s] for s in own]
        self.lasting = MemoryParts(
            params_bytes=sum(s.params_bytes for s in held),
            grads_bytes=sum(s.grads_bytes for s in held if s.has_lasting_grads),
            optimizer_bytes=sum(s.optimizer_bytes for s in held),
            buffers_bytes=sum(s.buffers_bytes + s.sent_bytes for s in held),
        )
        self.with_grads = {s for s in own if stages[s].has_lasting_grads}
        self.gathered: set[int] = set()
        self.unreduced: set[tuple[int, int | None]] = set()
        self.moments: dict[int, list[tuple[int, float]]] = {}

    def points(self, spans: Sequence[Span]) -> tuple[MemoryPoint, ...]:
        """The step function."""
        # what ends at a moment does so before the action that follows starts
        moments: list[tuple[float, int, bool, _Run]] = []
        for number, run in enumerate(_runs(spans)):
            moments += [(run.start_s, number, False, run), (run.end_s, number, True, run)]
        moments.sort(key=lambda m: m[:3])
        state = {"params": 0, "grads": 0, "saved": 0, "waiting": 0}
        found = [MemoryPoint(0.0, self.lasting)]
        for second, _, is_end, run in moments:
            change = self._end(run.action) if is_end else self._begin(run.action)
            for part, size in change:
                state[part] += size
            parts = self._parts(state)
            found.append(MemoryPoint(second, parts, None if is_end else run.action))
            if not is_end:
                found += self._inside(run, parts)
        return tuple(found)

    def peak(self, actions: Sequence[Action]) -> MemoryPoint:
        """The first point of the most bytes, each action a second long."""
        state = {"params": 0, "grads": 0, "saved": 0, "waiting": 0}
        now = most = self.lasting.total_bytes
        found: tuple[int, bool, int, ProgramMemory | None, dict[str, int]] | None = None
        passes: dict[tuple[int, ActionKind], tuple[int, int, int] | None] = {}
        for at, action in enumerate(actions):
            key = (action.stage, action.kind)
            if key not in passes:
                passes[key] = self._pass(*key)
            plain = passes[key]
            if plain is not None:  # most actions: what they change is known, and below the most
                begin, inside, end = plain
                if now + begin + inside <= most and now + begin + end <= most:
                    now += begin + end
                    state["saved"] += begin + end
                    continue
            for is_end in (False, True):
                for part, size in self._end(action) if is_end else self._begin(action):
                    state[part] += size
                    now += size
                program = None if is_end else self._program(action)
                moment = 0 if program is None else program.peak_moment
                inside = 0 if program is None else max(0, program.timeline[moment])
                if now + inside > most:
                    most = now + inside
                    found = at, is_end, inside, program, dict(state)
        if found is None:
            return MemoryPoint(0.0, self.lasting)
        at, is_end, inside, program, state = found
        parts, second, action = self._parts(state), float(at + is_end), actions[at]
        if program is None or inside == 0:
            return MemoryPoint(second, parts, None if is_end else action)
        moment = program.peak_moment
        parts = replace(parts, transient_bytes=parts.transient_bytes + inside)
        return MemoryPoint(second + program.shares()[moment], parts, action, program, moment)

    def _pass(self, stage: int, kind: ActionKind) -> tuple[int, int, int] | None:
        """Saved bytes at the start of an action, its most beyond, saved bytes at its end.

        None where what it changes depends on what was done before.
        """
        held = self.stages[stage]
        saved, between = held.saved_bytes, held.weight_saved_bytes
        program = held.programs.get(kind)
        inside = program.peak_bytes if program is not None else 0
        if kind is K.FORWARD:
            return saved, inside, 0
        if kind is K.BACKWARD_INPUT:
            return 0, inside, between - saved
        if held.unreduced_bytes or not held.has_lasting_grads:
            return None
        if kind is K.BACKWARD:
            return 0, inside, -saved
        return (0, inside, -between) if kind is K.BACKWARD_WEIGHT else None

    def _parts(self, state: Mapping[str, int]) -> MemoryParts:
        return MemoryParts(
            params_bytes=self.lasting.params_bytes + state["params"],
            grads_bytes=self.lasting.grads_bytes + state["grads"],
            optimizer_bytes=self.lasting.optimizer_bytes,
            activations_bytes=state["saved"],
            transient_bytes=state["waiting"],
            buffers_bytes=self.lasting.buffers_bytes,
        )

    def _program(self, action: Action) -> ProgramMemory | None:
        """What an action runs; None if it holds nothing of its own."""
        program = self.stages[action.stage].programs.get(action.kind)
        if action.kind is K.UNSHARD and action.stage in self.gathered:
            return None  # they are there already
        return None if program is None or not program.timeline else program

    def _begin(self, action: Action) -> Iterator[tuple[str, int]]:
        stage = self.stages[action.stage]
        match action.kind:
            case K.UNSHARD if action.stage not in self.gathered and K.UNSHARD not in stage.programs:
                self.gathered.add(action.stage)
                yield "params", stage.gathered_bytes
            case K.FORWARD:
                yield "saved", stage.saved_bytes
            case K.RELOAD:
                yield "saved", stage.offloaded_bytes

    def _end(self, action: Action) -> Iterator[tuple[str, int]]:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        match action.kind:
            case K.UNSHARD if action.stage not in self.gathered:
                self.gathered.add(action.stage)
                yield "params", stage.gathered_bytes
            case K.RESHARD if action.stage in self.gathered:
                self.gathered.discard(action.stage)
                yield "params", -stage.gathered_bytes
            case K.OFFLOAD:
                yield "saved", -stage.offloaded_bytes
            case K.BACKWARD_INPUT:
                yield "saved", stage.weight_saved_bytes - stage.saved_bytes
            case K.BACKWARD | K.BACKWARD_WEIGHT:
                is_whole = action.kind is K.BACKWARD
                yield "saved", -(stage.saved_bytes if is_whole else stage.weight_saved_bytes)
                if not (stage.unreduced_bytes and K.REDUCE_GRAD in stage.programs):
                    yield from self._first_grads(action.stage)
                self.unreduced.add(key)
                yield "waiting", stage.unreduced_bytes
            case K.REDUCE_GRAD:
                done = {k for k in self.unreduced if k[0] == key[0] and key[1] in (k[1], None)}
                self.unreduced -= done
                yield "waiting", -len(done) * stage.unreduced_bytes
                yield from self._first_grads(action.stage)

    def _first_grads(self, stage: int) -> Iterator[tuple[str, int]]:
        if stage not in self.with_grads:
            self.with_grads.add(stage)
            yield "grads", self.stages[stage].grads_bytes

    def _inside(self, run: _Run, parts: MemoryParts) -> Iterator[MemoryPoint]:
        program = self._program(run.action)
        if program is None:
            return
        if id(program) not in self.moments:
            self.moments[id(program)] = program.moments(every_operator=self.every_operator)
        for position, share in self.moments[id(program)]:
            now = MemoryParts(
                params_bytes=parts.params_bytes,
                grads_bytes=parts.grads_bytes,
                optimizer_bytes=parts.optimizer_bytes,
                activations_bytes=parts.activations_bytes,
                transient_bytes=parts.transient_bytes + program.timeline[position],
                buffers_bytes=parts.buffers_bytes,
            )
            second = run.start_s + share * (run.end_s - run.start_s)
            yield MemoryPoint(second, now, run.action, program, position)
