"""What a call costs beyond its programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.api.profiling_model import call_points
from autopar.runtime.driving import LoneDriver
from cost_models.measure import local_meter

PROGRAMS_S, READING_S = 100.0, 1e-3


def test_the_programs_of_a_step_are_no_part_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    run = LoneDriver.run

    def slow(self, running):
        now_s[0] += PROGRAMS_S
        return run(self, running)

    def clock() -> float:
        now_s[0] += READING_S
        return now_s[0]

    monkeypatch.setattr(LoneDriver, "run", slow)
    call, parameter = call_points(replace(local_meter(), clock=clock))
    assert (call.name, parameter.name) == ("call", "parameter")
    assert now_s[0] > PROGRAMS_S
    assert 0 < call.time_s < 20 * READING_S
    assert parameter.time_s <= READING_S
