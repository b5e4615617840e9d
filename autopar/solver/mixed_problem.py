"""The problem of planning for devices of several kinds, as plain data, and what a choice costs.

Equal machines form a *class*; a plan says how many devices of each class a stage has, never which,
so symmetric machines are not enumerated. Several pipelines stand side by side. Each takes its own
number of micro-batches of its own size through its own stages; a stage is a run of blocks on
``dp * tp`` devices of one class. Gradients are added up over the pipelines once per step.

:func:`evaluate` is the judge: it places the stages on ranks, simulates every pipeline with the
seconds of its own stages, then the once-per-step work of each stage, then the all-reduces across
pipelines. Where pipelines are cut differently, a run of blocks that lies in one stage of each is
reduced in one go, over the slowest link among its devices, with as many shards as the narrowest of
the stages has devices; a device takes part in one reduction at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.cluster import Cluster
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.order_times import ends_of
from autopar.solver.stages_problem import BlockMenu
from cost_models.base import CostModel
from cost_models.simulate import StageSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClass:
    """Equal machines.

    Attributes:
        name: Their device.
        machines: Their indices in the cluster.
        machine_size: Devices in each.
        limit_bytes: What a plan may use on a device.
        cost_per_hour: Of a device; None if not known.
    """

    name: str
    machines: tuple[int, ...]
    machine_size: int
    limit_bytes: int
    cost_per_hour: float | None = None

    @property
    def num_devices(self) -> int:
        """Devices of all its machines."""
        return len(self.machines) * self.machine_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A way to run blocks on one class.

    Attributes:
        device_class: Index of the class.
        dp: Ranks that split a micro-batch.
        tp: Ranks that split operators.
        samples: Of a micro-batch of the pipeline, all ``dp`` ranks together.
        zero_level: Of the parameters over ``dp``.
        blocks: Menus; seconds are per micro-batch.
        boundary_bytes: Per boundary, bytes of the larger message on one rank.
    """

    device_class: int
    dp: int
    tp: int
    samples: int
    zero_level: int
    blocks: tuple[BlockMenu, ...]
    boundary_bytes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Devices of a stage."""
        return self.dp * self.tp


@dataclass(frozen=True, kw_only=True)
class MixedProblem:
    """A chain of blocks and the classes it is spread over.

    Attributes:
        cluster: All machines.
        model: Prices of messages and reductions between any ranks.
        classes: The classes.
        kinds: Ways to run blocks; those of one pipeline have the same ``samples``.
        batch: Samples of a step, or positions of the dim that stands for a batch of one.
        gradient_bytes: Per block, gradients of its whole parameters.
        max_pipelines: Most pipelines side by side.
        max_stages: Most stages of a pipeline.
        stand_in: The dim that stands for a batch of one sample, in words; "" if there are more.
    """

    cluster: Cluster
    model: CostModel
    classes: tuple[DeviceClass, ...]
    kinds: tuple[StageKind, ...]
    batch: int
    gradient_bytes: tuple[int, ...]
    max_pipelines: int = 8
    max_stages: int = 16
    stand_in: str = ""

    @property
    def num_blocks(self) -> int:
        """Blocks of the chain."""
        return len(self.gradient_bytes)

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """First rank of every machine."""
        firsts, at = [], 0
        for machine in self.cluster.machines:
            firsts.append(at)
            at += machine.num_devices
        return tuple(firsts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """A run of blocks on a kind.

    Attributes:
        kind: Index of the kind.
        low: First block.
        high: The one after the last.
        options: Chosen option of each of its blocks.
    """

    kind: int
    low: int
    high: int
    options: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """Stages in forward order, and the micro-batches that go through them."""

    stages: tuple[StageChoice, ...]
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What a stage costs.

    Attributes:
        ranks: Its devices.
        forward_s: Per micro-batch.
        backward_s: Per micro-batch, recomputing included.
        p2p_s: Message of a micro-batch to the next stage, one way.
        step_s: Once per step, inside the stage.
        exchange_s: Once per step, with other pipelines.
        memory_bytes: Estimated peak of a device.
        num_in_flight: Most micro-batches alive at once.
    """

    ranks: tuple[int, ...]
    forward_s: float
    backward_s: float
    p2p_s: float
    step_s: float
    memory_bytes: int
    num_in_flight: int
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFigures:
    """What a choice costs.

    Attributes:
        step_s: Seconds of a step.
        pipeline_s: Per pipeline, seconds up to its last backward.
        stages: Per pipeline and stage.
    """

    step_s: float
    pipeline_s: tuple[float, ...]
    stages: tuple[tuple[StageFigures, ...], ...]


def device_counts_of(problem: MixedProblem, pipelines: Sequence[PipelineChoice]) -> tuple[int, ...]:
    """Devices in use, by class."""
    counts = [0] * len(problem.classes)
    for pipeline in pipelines:
        for stage in pipeline.stages:
            kind = problem.kinds[stage.kind]
            counts[kind.device_class] += kind.num_devices
    return tuple(counts)


def place(
    problem: MixedProblem, pipelines: Sequence[PipelineChoice]
) -> tuple[tuple[tuple[int, ...], ...], ...] | None:
    """Ranks of every stage, or None if the classes do not have them.

    Tensor-parallel groups lie inside machines, the widest first, so that groups whose sizes divide
    each other leave no holes; stages of equal width keep the order of the pipeline.
    """
    free = {
        c: [list(range(self_first, self_first + cls.machine_size)) for self_first in
            (problem.first_ranks[m] for m in cls.machines)]
        for c, cls in enumerate(problem.classes)
    }  # fmt: skip
    wanted = [
        (-problem.kinds[stage.kind].tp, p, s)
        for p, pipeline in enumerate(pipelines)
        for s, stage in enumerate(pipeline.stages)
    ]
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for _, p, s in sorted(wanted):
        kind = problem.kinds[pipelines[p].stages[s].kind]
        ranks: list[int] = []
        for slots in free[kind.device_class]:
            while len(slots) >= kind.tp and len(ranks) < kind.num_devices:
                ranks += slots[: kind.tp]
                del slots[: kind.tp]
        if len(ranks) < kind.num_devices:
            return None
        found[p, s] = tuple(ranks)
    return tuple(
        tuple(found[p, s] for s in range(len(pipeline.stages)))
        for p, pipeline in enumerate(pipelines)
    )


def stage_memory_bytes(kind: StageKind, stage: StageChoice, flight: int) -> int:
    """Estimated peak of a device of a stage with ``flight`` micro-batches alive."""
    amount = transient = 0
    for block, at in zip(kind.blocks[stage.low : stage.high], stage.options, strict=True):
        option = block.options[at]
        amount += block.state_bytes + flight * option.saved_bytes
        transient = max(transient, option.transient_bytes)
    return amount + transient


def message_s(
    problem: MixedProblem, amount_bytes: float, senders: Sequence[int], receivers: Sequence[int]
) -> float:
    """Seconds of a message between two stages, by the slowest pair of its ranks."""
    machine_of = problem.cluster.machine_of
    count = max(len(senders), len(receivers))
    pairs: dict[tuple[int, int], tuple[int, int]] = {}
    for i in range(count):
        a = senders[i * len(senders) // count]
        b = receivers[i * len(receivers) // count]
        pairs.setdefault((machine_of(a), machine_of(b)), (a, b))
    return max(problem.model.collective_time_s("p2p", amount_bytes, p) for p in pairs.values())


def evaluate(problem: MixedProblem, pipelines: Sequence[PipelineChoice]) -> MixedFigures | None:
    """Simulated seconds and estimated bytes of a choice; None if it can't be placed or kept."""
    ranks = place(problem, pipelines)
    if ranks is None:
        return None
    rows: list[tuple[StageFigures, ...]] = []
    ready: list[list[float]] = []
    for pipeline, own in zip(pipelines, ranks, strict=True):
        figures = _stages(problem, pipeline, own)
        if figures is None:
            return None
        rows.append(figures)
        ready.append(ends_of_stages(figures, pipeline.num_microbatches))
    pipeline_s = tuple(max(row) for row in ready)
    for row, figures in zip(ready, rows, strict=True):
        for s, stage in enumerate(figures):
            row[s] += stage.step_s
    exchange = [[0.0] * len(row) for row in rows]
    if len(pipelines) > 1:
        _exchange(problem, pipelines, rows, ready, exchange)
    return MixedFigures(
        step_s=max(max(row) for row in ready),
        pipeline_s=pipeline_s,
        stages=tuple(
            tuple(replace(f, exchange_s=s) for f, s in zip(figures, row, strict=True))
            for figures, row in zip(rows, exchange, strict=True)
        ),
    )


def _stages(
    problem: MixedProblem, pipeline: PipelineChoice, ranks: Sequence[tuple[int, ...]]
) -> tuple[StageFigures, ...] | None:
    found = []
    depth = len(pipeline.stages)
    for s, stage in enumerate(pipeline.stages):
        kind = problem.kinds[stage.kind]
        flight = min(depth - s, pipeline.num_microbatches)
        memory = stage_memory_bytes(kind, stage, flight)
        if memory > problem.classes[kind.device_class].limit_bytes:
            return None
        blocks = kind.blocks[stage.low : stage.high]
        chosen = [b.options[o] for b, o in zip(blocks, stage.options, strict=True)]
        p2p_s = 0.0
        if s + 1 < depth:
            other = problem.kinds[pipeline.stages[s + 1].kind]
            at = stage.high - 1
            amount = max(kind.boundary_bytes[at], other.boundary_bytes[at])
            p2p_s = message_s(problem, amount, ranks[s], ranks[s + 1])
        found.append(
            StageFigures(
                ranks=ranks[s],
                forward_s=sum(o.forward_s for o in chosen),
                backward_s=sum(o.backward_s for o in chosen),
                p2p_s=p2p_s,
                step_s=sum(b.step_s for b in blocks),
                memory_bytes=memory,
                num_in_flight=flight,
            )
        )
    return tuple(found)


def ends_of_stages(figures: Sequence[StageFigures], count: int) -> list[float]:
    """When each stage has done its last backward of 1F1B, as the simulator finds it."""
    depth = len(figures)
    if depth == 1:
        return [count * (figures[0].forward_s + figures[0].backward_s)]
    seconds = [StageSeconds(forward_s=f.forward_s, backward_s=f.backward_s) for f in figures]
    ahead = [(s - 1, s) for s in range(1, depth)]
    links = {(s, t): figures[min(s, t)].p2p_s for e in ahead for s, t in (e, e[::-1])}
    ends, _ = ends_of(
        ScheduleKind.ONE_F_ONE_B, MeshShape(pp=depth), count, None, seconds, links,
        each_s=(), begin_s=(), reduces_once=(),
    )  # fmt: skip
    return ends


def segments(pipelines: Sequence[PipelineChoice]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Runs of blocks that lie in one stage of every pipeline: low, high, and those stages."""
    cuts = sorted({stage.high for pipeline in pipelines for stage in pipeline.stages})
    found, low = [], 0
    for high in cuts:
        inside = tuple(
            next(s for s, stage in enumerate(p.stages) if stage.low <= low < stage.high)
            for p in pipelines
        )
        found.append((low, high, inside))
        low = high
    return found


def _exchange(
    problem: MixedProblem,
    pipelines: Sequence[PipelineChoice],
    rows: Sequence[Sequence[StageFigures]],
    ready: list[list[float]],
    exchange: list[list[float]],
) -> None:
    """Add the reductions across pipelines to ``ready`` and ``exchange``, last blocks first."""
    for low, high, inside in reversed(segments(pipelines)):
        amount = sum(problem.gradient_bytes[low:high])
        groups = [rows[p][s].ranks for p, s in enumerate(inside)]
        shard = amount / min(len(ranks) for ranks in groups)
        ends = tuple(ranks[0] for ranks in groups)
        time_s = problem.model.collective_time_s("all_reduce", shard, ends)
        start_s = max(ready[p][s] for p, s in enumerate(inside))
        for p, s in enumerate(inside):
            ready[p][s] = start_s + time_s
            exchange[p][s] += time_s
