"""Cuts and recompute against every possibility, on small random chains."""

from __future__ import annotations

import random
from itertools import combinations, product

import pytest

from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.solver.greedy_stages import first_choice, slowest_stage_bound_s
from autopar.solver.schedule_choice import alive_of, flights
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import (
    BlockMenu,
    Option,
    StageProblem,
    bounds,
    memory_bytes,
    surrogate_s,
)
from autopar.units import MIB

RESOLUTION = 1e-4  # of CP-SAT's whole numbers


def brute_force(problem: StageProblem) -> float | None:
    """Least surrogate over all cuts and options that fit."""
    count = len(problem.blocks)
    best: float | None = None
    for starts in combinations(range(1, count), problem.num_stages - 1):
        for options in product(*(range(len(b.options)) for b in problem.blocks)):
            if max(memory_bytes(problem, starts, options)) > problem.limit_bytes:
                continue
            cost = surrogate_s(problem, starts, options)
            best = cost if best is None else min(best, cost)
    return best


def random_problem(seed: int, kind: ScheduleKind) -> StageProblem:
    rng = random.Random(seed)
    virtual = 2 if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV) else 1
    placement = StagePlacement.V if kind is ScheduleKind.ZBV else StagePlacement.LOOP
    pp = 2 if virtual == 2 else rng.choice([2, 3])
    kinds = [
        (
            rng.uniform(0.5, 2.0),
            rng.randint(5, 20) * MIB,
            rng.randint(0, 10) * MIB,
        )
        for _ in range(2)
    ]
    blocks = []
    for _ in range(5):
        pick = rng.randrange(2)
        forward_s, saved, state = kinds[pick]
        full = Option(
            name="full",
            forward_s=forward_s,
            backward_s=3 * forward_s,
            saved_bytes=saved // 5,
            transient_bytes=saved,
            weight_s=forward_s,
            held_bytes=saved // 2,
        )
        none = Option(
            name="none",
            forward_s=forward_s,
            backward_s=2 * forward_s,
            saved_bytes=saved,
            transient_bytes=saved // 2,
            weight_s=forward_s,
            held_bytes=saved // 2,
        )
        blocks.append(BlockMenu(key=str(pick), options=(none, full), state_bytes=state))
    count = rng.choice([2, 4])
    mesh = MeshShape(pp=pp, virtual=virtual, placement=placement)
    return StageProblem(
        blocks=tuple(blocks),
        boundary_s=tuple(rng.uniform(0.0, 0.3) for _ in range(4)),
        pp=pp,
        virtual=virtual,
        num_microbatches=count,
        schedule=kind,
        in_flight=flights(kind, mesh, count),
        together=alive_of(kind, mesh, count),
        limit_bytes=rng.randint(40, 140) * MIB,
        placement=placement,
    )


@pytest.mark.parametrize("kind", list(ScheduleKind))
@pytest.mark.parametrize("seed", range(8))
def test_cuts_equal_the_best_of_all(kind: ScheduleKind, seed: int):
    problem = random_problem(seed, kind)
    best = brute_force(problem)
    found = solve_stages(problem)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert found.objective_s == pytest.approx(best, rel=RESOLUTION)
    assert found.objective_s == surrogate_s(problem, found.starts, found.options)
    assert max(found.memory_bytes) <= problem.limit_bytes


@pytest.mark.parametrize("seed", range(8))
def test_the_greedy_choice_fits_and_its_bound_holds(seed: int):
    problem = random_problem(seed, ScheduleKind.ONE_F_ONE_B)
    least = slowest_stage_bound_s(problem)
    found = first_choice(problem)
    if found is not None:
        assert max(memory_bytes(problem, *found)) <= problem.limit_bytes
    for starts in combinations(range(1, 5), problem.num_stages - 1):
        for options in product(range(2), repeat=5):
            if max(memory_bytes(problem, starts, options)) > problem.limit_bytes:
                continue
            chosen = [b.options[o] for b, o in zip(problem.blocks, options, strict=True)]
            slowest = max(sum(o.total_s for o in chosen[a:b]) for a, b in bounds(starts, 5))
            assert slowest >= least * (1 - 1e-9)
