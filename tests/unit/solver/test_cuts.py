"""First and better cuts of short steps against every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan.types import ScheduleKind
from autopar.solver.cuts import better_stages, first_stages
from autopar.solver.greedy_stages import first_choice
from autopar.solver.schedule_choice import simulated_s
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import BlockMenu, Option, StageProblem
from tests.oracle.search_cases import every_plan, shapes_of


def short_steps(seeds: range, *, several: bool):
    """Random chains with a limit between what their fastest and their leanest plan need."""
    for seed in seeds:
        for problem in shapes_of(seed, 6):
            if problem.forms or (problem.virtual > 1) is not several:
                continue
            plans = list(every_plan(problem))
            fastest = min(plans, key=lambda p: p.time_s)
            limit = (fastest.peak_bytes + min(p.peak_bytes for p in plans)) // 2
            best_s = min(p.time_s for p in plans if p.peak_bytes <= limit)
            yield replace(problem, limit_bytes=limit), best_s


def test_first_cuts_of_ranks_with_several_stages_are_near_the_best():
    losses, greedy = [], []
    for problem, best_s in short_steps(range(24), several=True):
        found = first_stages(problem)
        if found is None or first_choice(problem) is None:
            continue
        assert max(found.memory_bytes) <= problem.limit_bytes
        losses.append(simulated_s(problem.mesh, problem, found) / best_s - 1)
        assert losses[-1] > -1e-9
        plain = first_stages(replace(problem, num_microbatches=4096))  # too long to be run
        assert plain is not None
        greedy.append(simulated_s(problem.mesh, problem, plain) / best_s - 1)
    assert len(losses) >= 20
    assert sum(losses) < 0.5 * sum(greedy)
    assert sorted(losses)[len(losses) // 2] < 0.02


def test_better_cuts_of_one_stage_each_are_no_worse_than_the_surrogates_best():
    gained = 0
    for problem, best_s in short_steps(range(40), several=False):
        solved, found = solve_stages(problem), better_stages(problem)
        assert (solved is None) == (found is None)
        if solved is None or found is None:
            continue
        solved_s, found_s = (simulated_s(problem.mesh, problem, row) for row in (solved, found))
        assert best_s * (1 - 1e-9) <= found_s <= solved_s
        assert max(found.memory_bytes) <= problem.limit_bytes
        gained += found_s < solved_s * (1 - 1e-6)
    assert gained


@pytest.mark.parametrize("spare_bytes", [0, 7])
def test_a_small_limit_is_met_to_the_byte(spare_bytes: int):
    option = Option(
        name="none", forward_s=1.0, backward_s=2.0, saved_bytes=1001, transient_bytes=503
    )
    block = BlockMenu(key="a", options=(option,), state_bytes=2003, step_s=0.0)
    problem = StageProblem(
        blocks=(block,) * 4,
        boundary_s=(0.0,) * 3,
        pp=2,
        virtual=1,
        num_microbatches=2,
        schedule=ScheduleKind.ONE_F_ONE_B,
        in_flight=(2, 1),
        limit_bytes=2 * 2003 + 2 * 2 * 1001 + 503 + spare_bytes,
    )
    found = solve_stages(problem)
    assert found is not None
    assert found.starts == (2,)
    assert solve_stages(replace(problem, limit_bytes=problem.limit_bytes - spare_bytes - 1)) is None
