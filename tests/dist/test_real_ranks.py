"""Real processes over gloo do what the simulated ranks do."""

from __future__ import annotations

import pytest

from tests.spawn import ROOT, run_ranks

pytestmark = pytest.mark.dist
HERE = ROOT / "tests" / "dist"


@pytest.mark.parametrize("shape", ["2 1 1", "1 2 1", "1 1 2"])
def test_a_step_of_two_processes_equals_one_device(shape):
    results = run_ranks(2, HERE / "two_stage_step.py", args=tuple(shape.split()), timeout_s=90)
    assert [(r.code, r.output) for r in results] == [(0, "equal\n")] * 2, results[0].errors


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_collective_agrees_with_the_simulator_s_arithmetic(world_size):
    results = run_ranks(world_size, HERE / "all_collectives.py", timeout_s=90)
    codes = [(r.code, r.output) for r in results]
    assert codes == [(0, "134 collectives agree\n")] * world_size, results[0].errors


def test_a_step_of_four_processes_on_two_axes_equals_one_device():
    results = run_ranks(4, HERE / "two_stage_step.py", args=("2", "2", "1"), timeout_s=120)
    assert [(r.code, r.output) for r in results] == [(0, "equal\n")] * 4, results[0].errors
