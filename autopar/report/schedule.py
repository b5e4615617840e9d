"""The schedule drawn and in words: what it is, how much of a step is idle under it, and why it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.plan.orders import plain_warmup, plan_order
from autopar.plan.schedule_text import draw_schedule
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
        return "Schedule (forwards and both halves of a backward drawn alike)"
    return "Schedule (a backward drawn twice as long as a forward)"


def schedule_lines(plan: Plan, width: int) -> Lines:
    """What the order is, the idle share, and the time grid of equal stages."""
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
    share = idle_share(plan)
    if share is None:
        return
    text = f"idle: {100 * share:.1f} % of the ranks' time, waiting for other stages and messages"
    other = plain_plan(plan)
    if other is not None:
        less = idle_share(other)
        name = SCHEDULE_WORDS[other.schedule]
        name = f"plain {name}" if other.schedule is ScheduleKind.ONE_F_ONE_B else name
        text += f"; {name} of the same stages would idle {100 * (less or 0.0):.1f} %"
    yield text


def idle_share(plan: Plan) -> float | None:
    """Share of all ranks' time that is no forward or backward; None where nothing is predicted.

    The time is that from the first forward to the last backward: what is done once per step, the
    optimizer included, is left out.
    """
    size = plan.mesh.num_stages * plan.num_microbatches
    if size > MOST_COMPUTES or any(stage.time.forward_s <= 0 for stage in plan.stages):
        return None
    alone = tuple(
        replace(s, time=replace(s.time, reduce_s=0.0, unshard_s=0.0, optimizer_s=0.0))
        for s in plan.stages
    )
    return simulate_plan(replace(plan, stages=alone)).bubble_fraction


def plain_plan(plan: Plan) -> Plan | None:
    """The same stages in the usual order; None if they are."""
    if plan.schedule is ScheduleKind.ZBV:
        mesh = replace(plan.mesh, placement=StagePlacement.LOOP)
        return replace(plan, mesh=mesh, schedule=ScheduleKind.INTERLEAVED)
    if plan.schedule is ScheduleKind.ZERO_BUBBLE or plan.warmup is not None:
        return replace(plan, schedule=ScheduleKind.ONE_F_ONE_B, warmup=None)
    return None
