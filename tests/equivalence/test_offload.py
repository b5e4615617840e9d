"""Saved values in host memory: the same numbers as one device under any schedule and split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan.decisions import decisions_of
from autopar.plan.types import ScheduleKind
from autopar.sharding.build import localize
from autopar.sharding.host_copies import BEGINNINGS
from autopar.solver.force import forced_plan
from tests.equivalence.harness import problem_of, run, worst_difference
from tests.zoo import build

K = ScheduleKind
CASES = {
    "mb2": {"num_microbatches": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_microbatches": 4},
    "pp2 x dp2, remade": {"pp": 2, "dp": 2, "num_microbatches": 2, "recompute": "selective"},
    "zero bubble": {"pp": 2, "num_microbatches": 4, "schedule": K.ZERO_BUBBLE},
}


def _offloaded(name, degrees, window_bytes, share=1):
    problem = problem_of(*build(name, layers=1))
    plan = forced_plan(problem.graph, "", **degrees)
    decisions = decisions_of(plan, problem.graph)
    names = [n.name for n in problem.graph.nodes]
    decisions = replace(
        decisions, offload=frozenset(names[::share]), offload_window_bytes=window_bytes
    )
    return problem, plan, localize(problem.graph, decisions, problem.signatures)


@pytest.mark.parametrize("window_bytes", [0, 1 << 13, 1 << 30])
@pytest.mark.parametrize("case", CASES)
def test_a_step_with_values_in_host_memory_equals_one_device(case, window_bytes):
    problem, plan, programs = _offloaded("llama", CASES[case], window_bytes)
    forward = programs.stages[0].forward
    assert sum(n.op in BEGINNINGS for n in forward.nodes) >= 5
    step = run(
        problem, programs, plan.mesh, plan.num_microbatches, plan.schedule,
        tuple(s.zero_level for s in plan.stages), plan.warmup,
    )  # fmt: skip
    worst, name = worst_difference(step, problem.reference())
    assert worst < 1, name
