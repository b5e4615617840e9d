"""Plans for clusters of several kinds of devices: from the model to a :class:`Plan` with pipelines.

:mod:`mixed_build` prices blocks per class, :mod:`mixed_pipelines` makes single pipelines,
:mod:`mixed_choice` puts them side by side and simulates, :mod:`mixed_bound` bounds what is
possible. Using one class alone, the others idle, is among the choices.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, Shortfall
from autopar.plan.decisions import choice_text
from autopar.plan.pipelines import POSITIONS, SAMPLES, SHARED_DIM, PipelinePlan, PipelineStage
from autopar.plan.types import Candidate, MeshShape, Plan, ScheduleKind
from autopar.solver.constraints import Constraints, applied_constraints
from autopar.solver.mixed_build import Built, MixedBuilder
from autopar.solver.mixed_choice import NUM_POLISHED, MixedAnswer, Simulated, choose
from autopar.solver.mixed_problem import (
    MixedProblem,
    PipelineChoice,
    StageChoice,
    StageFigures,
    device_counts_of,
)
from autopar.solver.objective import Objective
from autopar.solver.splits import tp_choices
from autopar.units import format_bytes, format_time

logger = logging.getLogger(__name__)

MAX_RUNNERS_UP = 8
FREE_MESH = (
    "dp", "tp", "pp", "virtual", "num_microbatches", "schedule", "zero", "expert_capacity",
    "offload",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedWish:
    """What is asked of a mixed plan.

    Attributes:
        objective: What is minimised.
        cost_limit: The most that a step may cost.
        limit_bytes: Memory of any device; what each has if None.
        hints: Choices that are simulated beside those found.
        num_polished: Choices whose cuts and orders are worked on further.
        time_limit_s: Wall-clock guard; a plan that it cut short says so.
    """

    objective: Objective = Objective.TIME
    cost_limit: float | None = None
    limit_bytes: int | None = None
    hints: tuple[tuple[PipelineChoice, ...], ...] = ()
    num_polished: int = NUM_POLISHED
    time_limit_s: float | None = None


def takes_pipelines(cluster: Cluster, constraints: Constraints, *, interleaves: bool) -> bool:
    """Whether a plan may have unequal pipelines.

    A constraint that speaks of one mesh for all (``dp``, ``tp``, ``pp``, ...), a program without a
    loss of its own and inference have one mesh over all devices, priced as the slowest of them.

    Args:
        cluster: All machines.
        constraints: The user's.
        interleaves: Whether forwards and backwards may alternate.
    """
    is_free = all(getattr(constraints, name) is None for name in FREE_MESH)
    has_experts = any(str(p).endswith("@dp") for p in constraints.placements.values())
    is_free = is_free and not constraints.boundaries and not has_experts
    return not cluster.is_uniform and interleaves and is_free


def solve_mixed(
    builder: MixedBuilder,
    model_hash: str,
    cluster: Cluster,
    wish: MixedWish,
    progress: Callable[[str], None] | None = None,
    *,
    built: Built | None = None,
) -> tuple[Plan, dict[str, float]]:
    """The best plan of unequal pipelines.

    Args:
        builder: Of the model; what it priced for one cluster is kept for the next.
        model_hash: Hash of the graph.
        cluster: All machines.
        wish: Objective and limits.
        progress: Called with a line of text now and then.
        built: The problem on that cluster, or a part of it; made by the builder if left out.

    Returns:
        The plan, and wall-clock seconds by phase.

    Raises:
        InfeasibleError: Nothing fits, or nothing is as cheap as the limit.
    """
    begin_s = monotonic()

    def is_late() -> bool:
        return wish.time_limit_s is not None and monotonic() - begin_s > wish.time_limit_s

    built = built or builder.build(cluster, wish.limit_bytes, is_late=is_late)
    problem = built.problem
    middle_s = monotonic()
    if progress is not None:
        progress(f"{len(problem.classes)} kinds of devices, {len(problem.kinds)} kinds of stages")
    answer = choose(
        problem,
        wish.objective,
        cost_limit=wish.cost_limit,
        hints=wish.hints,
        num_polished=wish.num_polished,
        is_late=is_late,
    )
    seconds = {"analysis": middle_s - begin_s, "pipelines": monotonic() - middle_s}
    if answer is None:
        raise _infeasible(problem, cluster)
    over = wish.cost_limit is not None and (answer.best.cost or 0.0) > wish.cost_limit * (1 + 1e-9)
    if over:
        raise too_dear(answer.best.cost or 0.0, answer.best.step_s, wish.cost_limit or 0.0)
    plan = mixed_plan(built, answer, model_hash, wish)
    logger.info("plan found: %s", plan)
    return plan, seconds


def too_dear(cost: float, step_s: float, limit: float) -> InfeasibleError:
    """The error for a limit of cost that nothing meets."""
    return InfeasibleError(
        f"no plan costs {limit:.4g} per step or less",
        (
            Shortfall(
                what=f"cost of a step, the cheapest takes {format_time(step_s)}",
                needed=cost,
                available=limit,
                unit="per step",
                remedy=f"raise cost_limit to {cost * 1.001:.4g}, or use cheaper devices",
            ),
        ),
    )


def _infeasible(problem: MixedProblem, cluster: Cluster) -> InfeasibleError:
    """What the whole model needs at least, against what all devices have."""
    least = min(
        sum(b.state_bytes + min(o.saved_bytes for o in b.options) for b in kind.blocks)
        * kind.num_devices
        for kind in problem.kinds
    )
    room = sum(c.limit_bytes * c.num_devices for c in problem.classes)
    widest: dict[int, int] = {}
    for kind in problem.kinds:
        need = max(
            b.state_bytes + min(o.saved_bytes + o.transient_bytes for o in b.options)
            for b in kind.blocks
        )
        widest[kind.device_class] = min(widest.get(kind.device_class, need), need)
    rows = [
        Shortfall(
            what=f"memory of a {cls.name} for the largest block",
            needed=widest.get(c, 0),
            available=cls.limit_bytes,
            unit="bytes",
            remedy="use devices with more memory",
        )
        for c, cls in enumerate(problem.classes)
        if widest.get(c, 0) > cls.limit_bytes
    ]
    if least > room:
        rows.append(
            Shortfall(
                what="memory of all devices for one copy of the model",
                needed=least,
                available=room,
                unit="bytes",
                remedy="use more devices, or devices with more memory",
            )
        )
    if rows:
        return InfeasibleError(f"no plan fits {cluster}", tuple(rows))
    return InfeasibleError(
        f"no plan fits {cluster}: a copy of the model takes {format_bytes(least)} at least, all "
        f"devices have {format_bytes(room)}, but no cuts were found whose stages fit theirs; use "
        "more devices, or devices with more memory"
    )


def mixed_plan(built: Built, answer: MixedAnswer, model_hash: str, wish: MixedWish) -> Plan:
    """The plan of an answer."""
    best, problem = answer.best, built.problem
    analysis = built.analyses[0]
    pipelines = tuple(
        PipelinePlan(
            num_microbatches=pipeline.num_microbatches,
            microbatch_samples=problem.kinds[pipeline.stages[0].kind].samples,
            stages=tuple(
                _stage(built, stage, f) for stage, f in zip(pipeline.stages, figures, strict=True)
            ),
            time_s=time_s,
        )
        for pipeline, figures, time_s in zip(
            best.pipelines, best.figures.stages, best.figures.pipeline_s, strict=True
        )
    )
    rows = [
        (stage.memory_bytes / stage.memory_limit_bytes, stage, f"stage {s} of pipeline {p}")
        for p, pipeline in enumerate(pipelines)
        for s, stage in enumerate(pipeline.stages)
    ]
    _, fullest, where = max(rows, key=lambda row: (row[0], row[2]))
    return Plan(
        model_hash=model_hash,
        cluster=str(problem.cluster),
        num_devices=problem.cluster.num_devices,
        mesh=MeshShape(),
        num_microbatches=sum(p.num_microbatches for p in pipelines),
        schedule=ScheduleKind.ONE_F_ONE_B,
        stages=(),
        splits={},
        microbatch_statistics=analysis.constraints.microbatch_statistics,
        time_s=best.step_s,
        objective_s=best.step_s,
        bound_s=answer.bound_s,
        peak_bytes=fullest.memory_bytes,
        peak_at=f"{where}, on a {fullest.device}",
        memory_limit_bytes=fullest.memory_limit_bytes,
        optimizer=analysis.optimizer,
        constraints=applied_constraints(analysis.constraints, {}),
        runners_up=tuple(_runners_up(built, answer)),
        assumptions=_assumptions(built, answer),
        provenance={"prices": problem.model.source},
        pipelines=pipelines,
        objective=wish.objective.value,
        cost_per_step=best.cost,
        cost_bound=answer.cost_bound if wish.objective is not Objective.TIME else None,
        cost_limit=wish.cost_limit,
    )


def _stage(built: Built, stage: StageChoice, figures: StageFigures) -> PipelineStage:
    problem = built.problem
    kind = problem.kinds[stage.kind]
    cls, analysis = problem.classes[kind.device_class], built.analyses[kind.device_class]
    priced, chain = built.of_kind(kind), analysis.chain
    names = [
        block.options[at].name
        for block, at in zip(kind.blocks[stage.low : stage.high], stage.options, strict=True)
    ]
    recompute = [
        operator
        for i, name in zip(range(stage.low, stage.high), names, strict=True)
        for operator in priced.table.recompute[i][name]
    ]
    inside = range(stage.low, stage.high)
    splits = {
        name: choice_text(choice)
        for name, choice in sorted(tp_choices(priced.problem, priced.options).items())
        if chain.block_of.get(name, built.homes.get(name, -1)) in inside
    }
    scopes = dict.fromkeys(chain.blocks[i].scope for i in inside if chain.blocks[i].scope)
    return PipelineStage(
        device=cls.name,
        devices=figures.ranks,
        dp=kind.dp,
        tp=kind.tp,
        layers=(stage.low, stage.high),
        first=chain.first(stage.low),
        zero_level=kind.zero_level,
        scopes=tuple(scopes),
        recompute=tuple(recompute),
        recompute_words=option_words(names),
        splits=splits,
        num_in_flight=figures.num_in_flight,
        forward_s=figures.forward_s,
        backward_s=figures.backward_s,
        p2p_s=figures.p2p_s,
        step_s=figures.step_s,
        exchange_s=figures.exchange_s,
        memory_bytes=figures.memory_bytes,
        memory_limit_bytes=cls.limit_bytes,
    )


def option_words(names: Sequence[str]) -> str:
    """Such as ``full in 3 blocks, selective in 1 block``; empty if nothing is recomputed.

    >>> option_words(["none", "full", "full"])
    'full in 2 blocks'
    """
    counts = Counter(name for name in names if name != "none")
    return ", ".join(
        f"{name} in {count} block{'s' * (count != 1)}" for name, count in sorted(counts.items())
    )


def pipelines_words(problem: MixedProblem, pipelines: Sequence[PipelineChoice]) -> str:
    """A choice in one line, such as ``12 x 4 samples: 8 h100-sxm | 8 x 2 samples: 4 l4 > 4 l4``."""
    texts = []
    unit = POSITIONS if problem.stand_in else SAMPLES
    for pipeline in pipelines:
        kinds = [problem.kinds[stage.kind] for stage in pipeline.stages]
        stages = " > ".join(
            f"{k.num_devices} {problem.classes[k.device_class].name}" for k in kinds
        )
        texts.append(f"{pipeline.num_microbatches} x {kinds[0].samples} {unit}: {stages}")
    return " | ".join(texts)


def _runners_up(built: Built, answer: MixedAnswer) -> list[Candidate]:
    """The best of those that read alike, a few."""
    found: dict[str, Candidate] = {}
    own = pipelines_words(built.problem, answer.best.pipelines)
    for other in answer.others:
        words = pipelines_words(built.problem, other.pipelines)
        if words != own and len(found) < MAX_RUNNERS_UP:
            found.setdefault(words, _candidate(built, other, answer.best))
    return list(found.values())


def _candidate(built: Built, other: Simulated, best: Simulated) -> Candidate:
    count = sum(p.num_microbatches for p in other.pipelines)
    reason = pipelines_words(built.problem, other.pipelines)
    reason += f"; simulated: {format_time(other.step_s)} against {format_time(best.step_s)}"
    if other.cost is not None and best.cost is not None:
        reason += f", {other.cost:.4g} against {best.cost:.4g} per step"
    return Candidate(
        mesh=MeshShape(),
        num_microbatches=count,
        schedule=ScheduleKind.ONE_F_ONE_B,
        zero_level=0,
        recompute="",
        time_s=other.step_s,
        peak_bytes=max(f.memory_bytes for row in other.figures.stages for f in row),
        reason=reason,
    )


def _assumptions(built: Built, answer: MixedAnswer) -> tuple[str, ...]:
    problem, best = built.problem, answer.best
    texts = [
        *problem.cluster.assumptions,
        f"optimizer {built.analyses[0].optimizer}",
        "collectives are not overlapped with computing",
        "seconds and bytes of a stage are sums over its blocks, not of its programs",
        "a weight that several stages use is priced with the first of them",
    ]
    if problem.stand_in:
        texts.append(f"{SHARED_DIM}{problem.stand_in}")
    used = device_counts_of(problem, best.pipelines)
    for cls, count in zip(problem.classes, used, strict=True):
        idle = cls.num_devices - count
        if idle:
            smallest = format_bytes(cls.limit_bytes)
            texts.append(
                f"{idle} of {cls.num_devices} {cls.name} ({smallest} each) stay idle: no plan that "
                "was found is better with them"
            )
    if answer.is_cut_short:
        texts.append("the search was stopped by its limit of time")
    return tuple(texts)
