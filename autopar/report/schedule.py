"""The schedule drawn and in words: what it is, how much of a step ranks wait under it, why it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.plan.orders import plain_warmup, plan_order
from autopar.plan.schedule_text import draw_schedule
from autopar.plan.time_terms import busy_terms
from autopar.plan.types import Plan, ScheduleKind, StagePlacement
from autopar.report.layout import Lines, paragraph
from cost_models.plan_simulation import simulate_plan

SCHEDULE_WORDS = {
    ScheduleKind.GPIPE: "GPipe",
    ScheduleKind.ONE_F_ONE_B: "1F1B",
    ScheduleKind.INTERLEAVED: "interleaved 1F1B",
    ScheduleKind.ZERO_BUBBLE: "zero bubble (ZB-H1)",
    ScheduleKind.ZBV: "zero bubble in a V (ZB-V)",
    ScheduleKind.FORWARD: "forwards only (inference)",
}
_HALVES = (
    "backwards run in two halves: I makes the gradients that the stage before waits for, W those "
    "of weights, which nothing waits for and which fill idle time"
)
_RULES = {
    ScheduleKind.GPIPE: "all forwards, then all backwards: every micro-batch is in flight at once",
    ScheduleKind.ONE_F_ONE_B: "one forward and one backward in turn",
    ScheduleKind.INTERLEAVED: (
        "each rank has several stages in turn, so that less time passes until the last rank has "
        "work"
    ),
    ScheduleKind.ZERO_BUBBLE: _HALVES,
    ScheduleKind.ZBV: (
        f"each rank has a stage on the way down and one on the way up, and {_HALVES}"
    ),
    ScheduleKind.FORWARD: "forwards alone; nothing is kept",
}
MOST_COMPUTES = 50_000
"""Forwards of all ranks beyond which a plan is not simulated for its report."""


def schedule_title(plan: Plan) -> str:
    """Title of the section."""
    if plan.schedule.splits_backward:
        return "Schedule (forwards and halves of backwards drawn alike)"
    return "Schedule (a backward drawn twice as long as a forward)"


def schedule_lines(plan: Plan, width: int) -> Lines:
    """What the order is, the share that is waited for, and the time grid of equal stages."""
    lines: Lines = []
    for text in schedule_words(plan):
        lines += paragraph(text, width, indent="  ", first="")
    return [*lines, *draw_schedule(plan_order(plan), max_width=width).splitlines()]


def schedule_words(plan: Plan) -> Iterator[str]:
    """The schedule in sentences, without a final stop."""
    yield f"{SCHEDULE_WORDS[plan.schedule]}: {_RULES[plan.schedule]}"
    if plan.warmup is not None:
        plain = ", ".join(map(str, plain_warmup(plan.mesh.pp)))
        depths = ", ".join(map(str, plan.warmup))
        yield (
            f"warm-up: pipeline ranks run {depths} forwards before their first backward (plain "
            f"1F1B: {plain}); more in flight hide more of the messages"
        )
    share = waiting_share(plan)
    if share is None:
        return
    text = f"waiting: {100 * share:.1f} % of a step, the mean of the pipeline ranks"
    other = plain_plan(plan)
    less = None if other is None else _plain_share(plan, other)
    if other is not None and less is not None:
        name = SCHEDULE_WORDS[other.schedule]
        name = f"plain {name}" if other.schedule is ScheduleKind.ONE_F_ONE_B else name
        text += f"; under {name} of the same stages {100 * less:.1f} % of a longer one"
    yield text


def waiting_share(plan: Plan) -> float | None:
    """Share of a step that a pipeline rank waits, their mean; None where nothing is predicted.

    What a rank is busy with is what the table of shares has: forwards and backwards with their
    collectives, what is done once per step, the optimizer. The rest is waiting.
    """
    step_s = _step_s(plan)
    return None if step_s is None else _share_of(plan, step_s)


def _share_of(plan: Plan, step_s: float) -> float:
    mesh, count = plan.mesh, plan.num_microbatches
    total_s = 0.0
    for rank in range(mesh.pp):
        times = [plan.stages[s].time for s in mesh.stages_of(rank)]
        total_s += max(0.0, step_s - busy_terms(times, count).total_s)
    return total_s / (mesh.pp * step_s)


def _step_s(plan: Plan) -> float | None:
    """Seconds of the step: predicted, else simulated from the figures of stages."""
    if any(stage.time.forward_s <= 0 for stage in plan.stages):
        return None
    return plan.time_s if plan.time_s > 0 else _simulated_s(plan)


def _simulated_s(plan: Plan) -> float | None:
    """Seconds of the order, as far as stages tell; None if it is too long to simulate here."""
    if plan.mesh.num_stages * plan.num_microbatches > MOST_COMPUTES:
        return None
    return simulate_plan(plan).makespan_s


def _plain_share(plan: Plan, other: Plan) -> float | None:
    """What the same stages would wait in another order, whose step is longer by the difference."""
    step_s, own_s, other_s = _step_s(plan), _simulated_s(plan), _simulated_s(other)
    if step_s is None or own_s is None or other_s is None:
        return None
    return _share_of(other, step_s + other_s - own_s)


def plain_plan(plan: Plan) -> Plan | None:
    """The same stages in the usual order; None if they are."""
    if plan.schedule is ScheduleKind.ZBV:
        mesh = replace(plan.mesh, placement=StagePlacement.LOOP)
        return replace(plan, mesh=mesh, schedule=ScheduleKind.INTERLEAVED)
    if plan.schedule is ScheduleKind.ZERO_BUBBLE or plan.warmup is not None:
        return replace(plan, schedule=ScheduleKind.ONE_F_ONE_B, warmup=None)
    return None
