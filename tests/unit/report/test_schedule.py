"""The schedule in words, and the idle share that it tells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan.types import MeshShape, Plan, ScheduleKind, StagePlacement, StagePlan, TimeParts
from autopar.report.schedule import idle_share, schedule_title, schedule_words
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


def test_the_idle_share_is_that_of_the_closed_forms():
    plain = plan_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=PP))
    assert idle_share(plain) == pytest.approx(bubble_fraction(PP, COUNT))
    h1 = plan_of(ScheduleKind.ZERO_BUBBLE, MeshShape(pp=PP))
    step_s = zero_bubble_h1_step_time_s(
        num_ranks=PP, num_microbatches=COUNT, forward_s=1, input_s=1, weight_s=1
    )
    assert idle_share(h1) == pytest.approx(1 - 3 * COUNT / step_s)
    zbv = plan_of(ScheduleKind.ZBV, V)
    step_s = zero_bubble_v_step_time_s(num_ranks=PP, num_microbatches=COUNT, unit_s=1.0)
    assert idle_share(zbv) == pytest.approx(1 - 6 * COUNT / step_s)


def test_split_backwards_are_explained_and_compared_with_plain_1f1b():
    plan = plan_of(ScheduleKind.ZERO_BUBBLE, MeshShape(pp=PP))
    words = " ".join(schedule_words(plan))
    assert words.startswith("zero bubble (ZB-H1): backwards run in two halves")
    assert "idle: 11.1 % of the ranks' time" in words
    assert "plain 1F1B of the same stages would idle 27.3 %" in words
    assert "both halves" in schedule_title(plan)
    text = render_plan(plan, width=80)
    assert "0I0" not in text
    assert "I0 W0" in text
    assert max(map(len, text.splitlines())) <= 80


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


def test_without_times_no_idle_share_is_told():
    plan = plan_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=PP))
    bare = replace(plan, stages=tuple(replace(s, time=TimeParts()) for s in plan.stages))
    assert idle_share(bare) is None
    assert not any("idle" in words for words in schedule_words(bare))
