"""Schedules drawn as text."""

from __future__ import annotations

import pytest

from autopar.errors import DeadlockError
from autopar.plan.schedule import compute_order
from autopar.plan.schedule_text import draw_schedule
from autopar.plan.types import ScheduleKind


def test_1f1b_drawing_golden():
    assert draw_schedule(compute_order(ScheduleKind.ONE_F_ONE_B, 3, 1, 3)).splitlines() == [
        "rank 0  F0 F1 F2 .. .. .. .. B0 -- .. B1 -- .. B2 --",
        "rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- .. B2 -- .. ..",
        "rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. .. ..",
    ]


def test_several_stages_per_rank_are_told_apart():
    assert draw_schedule(compute_order(ScheduleKind.GPIPE, 1, 2, 1)) == (
        "rank 0  0F0 1F0 1B0 --- 0B0 ---"
    )


def test_what_does_not_fit_is_cut_and_counted():
    lines = draw_schedule(compute_order(ScheduleKind.GPIPE, 2, 1, 40), max_width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[-1].strip() == "111 of 123 columns are not shown"


def test_an_order_that_cannot_run_is_named():
    order = compute_order(ScheduleKind.GPIPE, 2, 1, 1)
    with pytest.raises(DeadlockError, match="rank 0 at 0B0"):
        draw_schedule((tuple(reversed(order[0])), order[1]))
