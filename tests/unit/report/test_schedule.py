"""The schedule in words, and the share that is waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan.time_terms import HOST_NOTE, plan_terms
from autopar.plan.types import MeshShape, Plan, ScheduleKind, StagePlacement, StagePlan, TimeParts
from autopar.report.schedule import schedule_title, schedule_words, waiting_share
from autopar.report.text import render_plan
from cost_models.pipeline import (
    bubble_fraction,
    zero_bubble_h1_step_time_s,
    zero_bubble_v_step_time_s,
)

PP, COUNT = 4, 8
V = MeshShape(pp=PP, virtual=2, placement=StagePlacement.V)


def plan_of(kind: ScheduleKind, mesh: MeshShape, *, weight_s: float = 1.0, **more: object) -> Plan:
    time = TimeParts(forward_s=1.0, backward_s=2.0, weight_s=weight_s, optimizer_s=5.0)
    stages = tuple(
        StagePlan(index=s, devices=(mesh.pipeline_rank(s),), first=f"op{s}", time=time)
        for s in range(mesh.num_stages)
    )
    return Plan(
        model_hash="",
        cluster="",
        num_devices=PP,
        mesh=mesh,
        num_microbatches=COUNT,
        schedule=kind,
        stages=stages,
        splits={},
        **more,  # type: ignore[arg-type]
    )


def test_the_share_that_is_waited_is_that_of_the_closed_forms():
    """Waiting is what is left of the step, whose optimizer is no waiting."""

    def share(step_s: float, busy_s: float, update_s: float) -> float:
        return (step_s - busy_s) / (step_s + update_s)

    plain = plan_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=PP))
    step_s = 3 * COUNT / (1 - bubble_fraction(PP, COUNT))
    assert waiting_share(plain) == pytest.approx(share(step_s, 3 * COUNT, 5))
    h1 = plan_of(ScheduleKind.ZERO_BUBBLE, MeshShape(pp=PP))
    step_s = zero_bubble_h1_step_time_s(
        num_ranks=PP, num_microbatches=COUNT, forward_s=1, input_s=1, weight_s=1
    )
    assert waiting_share(h1) == pytest.approx(share(step_s, 3 * COUNT, 5))
    zbv = plan_of(ScheduleKind.ZBV, V)
    step_s = zero_bubble_v_step_time_s(num_ranks=PP, num_microbatches=COUNT, unit_s=1.0)
    assert waiting_share(zbv) == pytest.approx(share(step_s, 6 * COUNT, 10))


def test_the_share_that_is_waited_is_that_of_the_table_and_of_the_terms():
    plan = plan_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=PP), time_s=50.0)
    assert waiting_share(plan) == pytest.approx((50 - 3 * COUNT - 5) / 50)
    assert "waiting: 42.0 % of a step" in " ".join(schedule_words(plan))
    text = render_plan(plan)
    assert text.count("42.0 %") == 2 + PP  # what binds, each rank, the schedule
    terms = plan_terms(plan)
    assert terms is not None
    assert terms.waiting_s == pytest.approx(0.42 * 50)


def test_a_measured_host_is_named_among_what_is_waited_for():
    plan = plan_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=PP), time_s=50.0)
    assert "shared cores" not in render_plan(plan)
    told = replace(plan, assumptions=(f"1 s of a step lie outside; {HOST_NOTE}",))
    assert "Waiting: the rest, for other stages (bubbles), for messages" in " ".join(
        render_plan(told).split()
    )
    assert "for shared cores and slower ranks." in " ".join(render_plan(told).split())


def test_split_backwards_are_explained_and_compared_with_plain_1f1b():
    plan = plan_of(ScheduleKind.ZERO_BUBBLE, MeshShape(pp=PP))
    words = " ".join(schedule_words(plan))
    assert words.startswith("zero bubble (ZB-H1): backwards run in two halves")
    # of 27 + 5 seconds and of 33 + 5 that are not the 24 of passes and 5 of the optimizer
    assert "waiting: 9.4 % of a step, the mean of the pipeline ranks" in words
    assert "under plain 1F1B of the same stages 23.7 % of a longer one" in words
    assert "halves of backwards" in schedule_title(plan)
    text = render_plan(plan, width=80)
    assert "0I0" not in text
    assert "I0 W0" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("kind", [k for k in ScheduleKind if k is not ScheduleKind.FORWARD])
def test_no_line_of_any_schedule_is_longer_than_the_width(kind, width):
    mesh = V if kind is ScheduleKind.ZBV else MeshShape(pp=PP)
    if kind is ScheduleKind.INTERLEAVED:
        mesh = MeshShape(pp=PP, virtual=2)
    text = render_plan(plan_of(kind, mesh, time_s=60.0), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_a_v_is_compared_with_interleaved_stages_and_drawn_with_them():
    text = render_plan(plan_of(ScheduleKind.ZBV, V), width=100)
    assert "pp4 (v2 in a V): a pipeline of 8 stages on 4 pipeline ranks" in text
    assert "zero bubble in a V (ZB-V), 8 micro-batches" in text
    assert "interleaved 1F1B of the" in text
    assert "rank 3  ... ... ... 3F0 4F0" in text


def test_a_deeper_warm_up_is_told_with_the_plain_one():
    plan = plan_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=PP), warmup=(7, 5, 3, 1))
    words = " ".join(schedule_words(plan))
    assert "7, 5, 3, 1 forwards before their first backward (plain 1F1B: 4, 3, 2, 1)" in words
    assert "1F1B, 8 micro-batches, warm-up of 7, 5, 3, 1" in render_plan(plan)


def test_without_times_no_waiting_is_told():
    plan = plan_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=PP))
    bare = replace(plan, stages=tuple(replace(s, time=TimeParts()) for s in plan.stages))
    assert waiting_share(bare) is None
    assert not any("waiting" in words for words in schedule_words(bare))
