"""How long every operator of a plan takes where it stands in its program.

One rank's step runs alone, with the tensors, strides and cache contents of a real step; what other
ranks would send is made up from its own values. So an operator is measured with what surrounds it,
and what running a program costs beyond its operators is what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TypeVar

import torch

from autopar.capture.reference import bind_inputs, default_floats, whole_parameters
from autopar.capture.tracing import Captured
from autopar.errors import PassError
from autopar.ir.graph import Input, InputKind
from autopar.plan.actions import Action
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.runtime.collective_math import resolve
from autopar.runtime.driving import drive
from autopar.runtime.executor import Program
from autopar.runtime.finish import finish
from autopar.runtime.gradients import Accumulator
from autopar.runtime.inputs import StepInputs
from autopar.runtime.load import LoadedPrograms, LoadedStage, load, runs_halves
from autopar.runtime.pieces import parts_of, with_common_owners
from autopar.runtime.requests import Collective, PostRecv, Request, Send, WaitRecv, WaitSends
from autopar.runtime.simulate import stored_params
from autopar.runtime.step import RankStep
from autopar.runtime.variants import schedule_actions
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.programs import LocalPrograms
from cost_models.flops import OpClass, work_of
from cost_models.measure_meter import Meter, middle_half
from cost_models.profile import Key, Point, PointKind, op_key

T = TypeVar("T")
MIN_RUNS, MAX_RUNS = 3, 11
_RNG_KEY = 7


@dataclass(slots=True)
class _Timed:
    """An operator that notes how long each of its calls takes."""

    call: Callable[..., object]
    meter: Meter
    seconds: list[float]

    def __call__(self, *operands: object) -> object:
        box: list[object] = []
        self.seconds.append(self.meter.seconds(lambda: box.append(self.call(*operands))))
        return box.pop()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operator:
    """What one operator of the programs is, and the seconds of its calls."""

    key: str
    dtype: str
    flops: int
    moved_bytes: int
    seconds: list[float]


@dataclass(slots=True)
class _Alone:
    """Answers a rank's requests from its own values."""

    sizes: Mapping[str, int]
    coordinates: Mapping[str, int]
    device: torch.device
    meter: Meter
    waited_s: float = 0.0

    def run(self, running: Generator[Request, object, T]) -> T:
        """Run a generator to its end and give what it returns."""
        return drive(running, self._timed)

    def _timed(self, request: Request) -> object:
        started_s = self.meter.clock()
        try:
            return self._answer(request)
        finally:
            self.waited_s += self.meter.clock() - started_s

    def _answer(self, request: Request) -> object:
        match request:
            case Collective():
                every = [request] * self.sizes.get(request.axis, 1)
                return resolve(every)[self.coordinates.get(request.axis, 0)]
            case PostRecv():
                return torch.zeros(request.shape, dtype=request.dtype, device=self.device)
            case WaitRecv(ticket=torch.Tensor() as tensor):
                return tensor
            case Send() | WaitSends():
                return None
        raise PassError(f"unknown request {request!r}")


class _TimedSums(Accumulator):
    """Sums of gradients that note how long it takes to add those of one more micro-batch."""

    def __init__(self, meter: Meter, sums: dict[tuple[int, int], list[float]]) -> None:
        super().__init__()
        self._meter = meter
        self._seconds = sums

    def add(self, values: Iterable[tuple[str, torch.Tensor]], held: Iterable[int]) -> None:
        """Add gradients; noted by how many tensors of how many bytes there are."""
        pairs = list(values)
        if not pairs or any(name not in self for name, _ in pairs):
            super().add(pairs, held)
            return
        amounts = [tensor.numel() * tensor.element_size() for _, tensor in pairs]
        seconds = self._meter.seconds(lambda: super(_TimedSums, self).add(pairs, held))
        self._seconds.setdefault((len(pairs), sum(amounts)), []).append(seconds)


def op_points(
    captured: Captured,
    plan: Plan,
    model: torch.nn.Module,
    call: tuple[tuple[object, ...], Mapping[str, object]],
    meter: Meter,
    *,
    busy: int,
    budget_s: float,
) -> list[Point]:
    """Points of every operator of a plan, and of what running a program costs beside them.

    Under a process group every rank must call it; those beyond ``busy`` of a node only look on.

    Args:
        captured: The model's call.
        plan: How it is split; the first rank of each stage runs, one after another.
        model: Gives the parameters.
        call: Its positional and keyword arguments.
        meter: How to measure.
        busy: Ranks of a node that compute at the same time.
        budget_s: Seconds for the repeats of one rank.
    """
    graph = captured.graph
    local = localize(graph, decisions_of(plan, graph), signatures_of(graph))
    local = with_common_owners(local, parts_of(graph))
    values = bind_inputs(captured, model, *call, graph=graph, rng_key=_RNG_KEY)
    lists = schedule_actions(local, plan, backward=captured.training, has_loss=captured.has_loss)
    found: dict[Key, Point] = {}
    mesh = plan.mesh
    for pp in range(mesh.pp):
        own = mesh.stages_of(pp)
        runner = _Runner(local, plan, own, meter, lists[pp])
        given = StepInputs(
            params=stored_params(
                local, mesh, mesh.rank_of(pp, 0, 0), whole_parameters(graph, values)
            ),
            buffers=_of_kind(graph.inputs, values, InputKind.BUFFER),
            users=_of_kind(graph.inputs, values, InputKind.USER),
            rng_key=torch.tensor(_RNG_KEY, device=meter.device),
            constants=_of_kind(graph.inputs, values, InputKind.CONSTANT),
        )
        for point in runner.measure(given, mesh.rank_of(pp, 0, 0), busy, budget_s):
            found.setdefault(point.key, point)
    return list(found.values())


def _of_kind(
    inputs: Sequence[Input], values: Mapping[str, torch.Tensor], kind: InputKind
) -> dict[str, torch.Tensor]:
    return {i.target: values[i.name] for i in inputs if i.kind is kind}


class _Runner:
    """One pipeline rank's programs, instrumented."""

    def __init__(
        self,
        local: LocalPrograms,
        plan: Plan,
        stages: Sequence[int],
        meter: Meter,
        actions: Sequence[Action],
    ) -> None:
        self.meter = meter
        self.mesh = plan.mesh
        self.actions = actions
        self.graphs = [g for s in local.stages for g in (s.prologue, s.forward, s.backward)]
        with default_floats(self.graphs):
            self.plain = load(
                local, plan.mesh, stages=stages, device=meter.device,
                in_halves=runs_halves(actions),
            )  # fmt: skip
        self.operators: list[_Operator] = []
        self.sums: dict[tuple[int, int], list[float]] = {}
        stages_timed = {index: self._timed(stage) for index, stage in self.plain.stages.items()}
        self.loaded: LoadedPrograms = replace(self.plain, stages=stages_timed)

    def _timed(self, stage: LoadedStage) -> LoadedStage:
        return replace(
            stage,
            unshard=self._instrument(stage.unshard),
            prologue=self._instrument(stage.prologue),
            forward=self._instrument(stage.forward),
            backward=self._instrument(stage.backward),
            backward_input=self._instrument(stage.backward_input),
            backward_weight=self._instrument(stage.backward_weight),
            reduce=self._instrument(stage.reduce),
            finish=self._instrument(stage.finish),
        )

    def _instrument(self, program: Program) -> Program:
        metas, nodes = program.graph.metas(), program.graph.node_map()
        steps = []
        for step in program.steps:
            node = nodes.get(step.name)
            if step.is_request or node is None:
                steps.append(step)
                continue
            operands = [metas[name] for name in node.refs()]
            work = work_of(node.op, node.args, operands, node.meta)
            operator = _Operator(
                key=op_key(node.op, node.args, operands),
                dtype=work.dtype,
                flops=round(work.flops),
                moved_bytes=round(work.moved_bytes) if work.op_class is not OpClass.FREE else 0,
                seconds=[],
            )
            self.operators.append(operator)
            steps.append(replace(step, call=_Timed(step.call, self.meter, operator.seconds)))
        return replace(program, steps=tuple(steps))

    def measure(self, given: StepInputs, rank: int, busy: int, budget_s: float) -> list[Point]:
        """Run the step some times; points of its operators."""
        meter = self.meter
        has_part = meter.rank % meter.per_node < busy
        once_s = self._run(self.loaded, given, rank) if has_part else 0.0
        wanted = max(MIN_RUNS, min(MAX_RUNS, int(budget_s / max(once_s, 1e-6))))
        runs = meter.agree(wanted)
        for operator in self.operators:
            operator.seconds.clear()  # the first run warms up
        self.sums.clear()
        timed: list[float] = []
        plain: list[float] = []
        for _ in range(runs):
            meter.meet()
            if has_part:
                timed.append(self._run(self.loaded, given, rank))
                # another run without clocks: reading them is no part of a step
                plain.append(self._run(self.plain, given, rank))
        meter.meet()
        return self._points(busy, timed, plain) if has_part else []

    def _run(self, loaded: LoadedPrograms, given: StepInputs, rank: int) -> float:
        """Seconds of a step, those of its answers left out."""
        pp, dp, tp = self.mesh.coordinate(rank)
        alone = _Alone(
            sizes={"dp": self.mesh.dp, "tp": self.mesh.tp, "pp": self.mesh.pp},
            coordinates={"dp": dp, "tp": tp, "pp": pp},
            device=self.meter.device,
            meter=self.meter,
        )
        step = RankStep(loaded, rank, given, sums=lambda: self._sums(loaded is self.plain))

        def whole() -> Generator[Request, object, None]:
            yield from step.run(self.actions)
            yield from finish(step)

        started_s = self.meter.clock()
        with default_floats(self.graphs):
            alone.run(whole())
        return self.meter.clock() - started_s - alone.waited_s

    def _sums(self, is_plain: bool) -> Accumulator:
        return Accumulator() if is_plain else _TimedSums(self.meter, self.sums)

    def _points(self, busy: int, timed: Sequence[float], plain: Sequence[float]) -> list[Point]:
        """Points of operators (by operands, the mean over where they stand), of sums, of the rest.

        Args:
            busy: Ranks of a node that computed.
            timed: Seconds of each run with clocks.
            plain: Of each run without.
        """
        runs = len(timed)
        measured = [o for o in self.operators if o.seconds]
        parts = [*(o.seconds for o in measured), *self.sums.values()]
        inside_s, scale = _inside(parts, runs, middle_half(timed))
        table: dict[str, list[_Operator]] = {}
        for operator in measured:
            if not operator.key.startswith("getitem("):
                table.setdefault(operator.key, []).append(operator)
        points = []
        for key, places in table.items():
            times = [scale * mean(_medians(o.seconds, runs)) for o in places]
            first = places[0]
            points.append(
                Point(
                    PointKind.OP,
                    first.dtype,
                    (first.flops, first.moved_bytes),
                    max(1e-9, mean(times)),
                    name=key,
                    busy=busy,
                    spread_s=(max(times) - min(times)) / 2,
                    repeats=runs,
                )
            )
        for sizes, seconds in self.sums.items():
            if sizes[1] > 0:
                each_s = scale * mean(_medians(seconds, runs))
                points.append(
                    Point(PointKind.ACCUMULATE, "float32", sizes, each_s, busy=busy, repeats=runs)
                )
        number = sum(len(o.seconds) // runs for o in measured)
        if self.meter.device.type == "cpu" and number:
            whole_s = mean(plain[run] for run in middle_half(plain))
            each_s = max(1e-9, (whole_s - inside_s) / number)
            points.append(
                Point(PointKind.STEP, "float32", (number,), each_s, name="executor", busy=busy,
                      repeats=runs)
            )  # fmt: skip
        return points


def _inside(
    parts: Sequence[Sequence[float]], runs: int, kept: Sequence[int]
) -> tuple[float, float]:
    """Seconds of all parts of a run, and what their medians must be multiplied by to add up to it.

    Each part has its slow moments in other runs, so that medians alone would add up to less.

    Args:
        parts: Seconds of each part's calls, run by run.
        runs: Runs.
        kept: Runs that count for the whole.
    """
    calls = [_by_call(seconds, runs) for seconds in parts]
    whole_s = mean(sum(call[run] for part in calls for call in part) for run in kept)
    medians_s = sum(sum(_medians(seconds, runs)) for seconds in parts)
    return whole_s, whole_s / medians_s if medians_s > 0 else 1.0


def _medians(seconds: Sequence[float], runs: int) -> list[float]:
    """Of each call of a run its median over the runs."""
    return [median(call) for call in _by_call(seconds, runs)]


def _by_call(seconds: Sequence[float], runs: int) -> list[Sequence[float]]:
    """For each call of a run its seconds in every run."""
    count = len(seconds) // runs
    return [seconds[call::count] for call in range(count)]
