"""Saved values in host memory: the same numbers as one device under any schedule and split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan.decisions import decisions_of
from autopar.plan.types import ScheduleKind
from autopar.runtime.simulate import SimulatedStep
from autopar.sharding.build import localize
from autopar.sharding.host_copies import BEGINNINGS
from autopar.solver.force import forced_plan
from cost_models.memory import host_bytes, saved_bytes
from tests.equivalence.harness import problem_of, run, worst_difference
from tests.zoo import build

K = ScheduleKind
SLOW = {
    "mb2": {"num_microbatches": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_microbatches": 4},
    "zbv": {"pp": 2, "num_microbatches": 4, "schedule": K.ZBV},
}
CASES = {
    "pp2 x dp2, remade": {"pp": 2, "dp": 2, "num_microbatches": 2, "recompute": "selective"},
    "zero bubble": {"pp": 2, "num_microbatches": 4, "schedule": K.ZERO_BUBBLE},
    **SLOW,
}


@pytest.mark.parametrize(
    ("case", "window_bytes"),
    [
        pytest.param(case, window, marks=pytest.mark.slow if case in SLOW or window == 0 else ())
        for case in CASES
        for window in (0, 1 << 13)
    ],
)
def test_a_step_with_values_in_host_memory_equals_one_device(case: str, window_bytes: int):
    problem = problem_of(*build("llama", layers=2 if case == "zbv" else 1))
    plan = forced_plan(problem.graph, "", **CASES[case])
    here = decisions_of(plan, problem.graph)
    there = replace(
        here,
        offload=frozenset(n.name for n in problem.graph.nodes[::2]),
        offload_window_bytes=window_bytes,
    )
    levels = tuple(s.zero_level for s in plan.stages)
    steps: list[SimulatedStep] = []
    saved = []
    for decisions in (here, there):
        programs = localize(problem.graph, decisions, problem.signatures)
        saved.append([saved_bytes(s.forward) for s in programs.stages])
        steps.append(
            run(problem, programs, plan.mesh, plan.num_microbatches, plan.schedule, levels,
                plan.warmup)
        )  # fmt: skip
    copies = sum(n.op in BEGINNINGS for s in programs.stages for n in s.forward.nodes)
    assert copies >= 5
    worst, name = worst_difference(steps[1], problem.reference())
    assert worst < 1, name
    for name, value in steps[0].grads.items():
        assert value.equal(steps[1].grads[name]), name  # a copy keeps every bit
    for before, after, stage in zip(*saved, programs.stages, strict=True):
        assert after <= before <= after + host_bytes(stage.forward)
    assert sum(saved[1]) < sum(saved[0])
    measured = [max(step.peak_saved_bytes) for step in steps]
    assert measured[1] < measured[0]
