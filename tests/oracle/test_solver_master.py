"""The whole search against every plan, on small random chains, in the event simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest

from autopar.plan.schedule import compute_order, in_flight
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.greedy_stages import first_choice
from autopar.solver.master import Master
from autopar.solver.pipeline_bound import PipelineBound
from autopar.solver.schedule_choice import simulated_s
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import (
    BlockMenu,
    Option,
    StageProblem,
    StageSolution,
    memory_bytes,
    surrogate_s,
)
from autopar.units import MIB

DEVICES = 8
NO_LIMIT = 1 << 50
KINDS = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)


@dataclass(frozen=True)
class Found:
    """A plan of a shape, and the simulated seconds of its step."""

    problem: StageProblem
    solution: StageSolution
    estimate_s: float
    is_judged: bool = False

    @property
    def step_s(self) -> float:
        return self.estimate_s

    @property
    def fits(self) -> bool:
        return max(self.solution.memory_bytes) <= self.problem.limit_bytes


def solution_of(problem: StageProblem, starts: tuple[int, ...], options: tuple[int, ...]):
    return StageSolution(
        starts=starts,
        options=options,
        objective_s=surrogate_s(problem, starts, options),
        bound_s=0.0,
        memory_bytes=memory_bytes(problem, starts, options),
        is_optimal=False,
    )


def mesh_of(problem: StageProblem) -> MeshShape:
    return MeshShape(pp=problem.pp, virtual=problem.virtual)


class ChainSpace:
    """Shapes of a chain on eight devices: cut problems whose menus depend on the mesh."""

    efforts = 2

    def bound_s(self, shape: StageProblem, effort: int) -> float:
        if effort == 0:
            return 0.0
        cycles = shape.schedule is ScheduleKind.ONE_F_ONE_B
        return PipelineBound(shape, has_cycles=cycles).least_s()

    def open(self, shape: StageProblem, best_s: float) -> Found | None:
        choice = first_choice(shape) if len(shape.blocks) >= shape.num_stages else None
        if choice is not None:
            return self._found(shape, solution_of(shape, *choice))
        solved = solve_stages(shape)
        return None if solved is None else self._found(shape, solved)

    def _found(self, shape: StageProblem, solution: StageSolution) -> Found:
        return Found(shape, solution, simulated_s(mesh_of(shape), shape, solution))

    def improve(self, candidate: Found) -> Found:
        solved = solve_stages(candidate.problem)
        rows = (
            [candidate] if solved is None else [candidate, self._found(candidate.problem, solved)]
        )
        return min(rows, key=lambda row: row.estimate_s)

    def model_bound_s(self, candidate: Found) -> float:
        return self.bound_s(candidate.problem, 1)

    def judge(self, candidate: Found) -> Found:
        return replace(candidate, is_judged=True)

    def preference(self, candidate: Found) -> tuple[float, int, int, int, str]:
        return candidate.estimate_s, candidate.problem.pp, 0, 0, ""

    def is_late(self) -> bool:
        return False


def instance(seed: int, most_blocks: int) -> list[StageProblem]:
    """Cut problems of all meshes, micro-batches and schedules of a random chain; no limit."""
    rng = random.Random(seed)
    count = rng.randint(3, most_blocks)
    kinds = [
        (rng.uniform(0.5, 2.0), rng.randint(5, 20) * MIB, rng.randint(1, 10) * MIB, rng.random())
        for _ in range(2)
    ]
    picks = [rng.randrange(2) for _ in range(count)]
    boundaries = [rng.uniform(0.0, 0.3) for _ in range(count - 1)]
    once = [rng.uniform(0.0, 2.0) for _ in range(3)]
    shapes = []
    for pp, microbatches, kind in product((1, 2, 4), (2, 4), KINDS):
        dp = DEVICES // pp
        share = 8 / (dp * microbatches) ** 0.9  # small micro-batches are less efficient
        if pp > count:
            continue
        menus = tuple(
            BlockMenu(
                key=str(pick),
                options=(
                    Option(
                        name="none", forward_s=t * share, backward_s=2 * t * share,
                        saved_bytes=int(saved * share), transient_bytes=int(saved * share) // 2,
                    ),
                    Option(
                        name="full", forward_s=t * share, backward_s=(2 + again) * t * share,
                        saved_bytes=int(saved * share) // 5, transient_bytes=int(saved * share),
                    ),
                ),
                state_bytes=state,
                step_s=sum(once),
                gather_s=once[0],
                reduce_s=once[1],
            )
            for pick in picks
            for t, saved, state, again in (kinds[pick],)
        )  # fmt: skip
        order = compute_order(kind, pp, 1, microbatches)
        shapes.append(
            StageProblem(
                blocks=menus,
                boundary_s=tuple(b * share for b in boundaries),
                pp=pp,
                virtual=1,
                num_microbatches=microbatches,
                schedule=kind,
                in_flight=tuple(in_flight(order, s) for s in range(pp)),
                limit_bytes=NO_LIMIT,
            )
        )
    return shapes


def every_plan(shapes: list[StageProblem]) -> Iterator[tuple[float, int]]:
    """Simulated seconds and peak of every plan; plans that differ in names alone once."""
    for problem in shapes:
        seen: set[object] = set()
        menus = [range(len(b.options)) for b in problem.blocks]
        for starts in combinations(range(1, len(problem.blocks)), problem.pp - 1):
            for options in product(*menus):
                solution = solution_of(problem, starts, options)
                mark = (starts, f"{solution.objective_s:.9e}", solution.memory_bytes)
                if mark in seen:
                    continue
                seen.add(mark)
                yield (
                    simulated_s(mesh_of(problem), problem, solution),
                    max(solution.memory_bytes),
                )


def check(seed: int, most_blocks: int) -> None:
    shapes = instance(seed, most_blocks)
    plans = sorted(every_plan(shapes))
    limit = NO_LIMIT
    if seed % 2:  # the fastest plan must not fit
        limit = int(plans[0][1] * random.Random(seed).uniform(0.6, 0.99))
        shapes = [replace(shape, limit_bytes=limit) for shape in shapes]
    best_s = min((time_s for time_s, peak in plans if peak <= limit), default=None)
    master: Master[StageProblem, Found, Found] = Master(ChainSpace())
    winner = master.run(shapes[:3], shapes[3:])
    if best_s is None:
        assert winner is None
        return
    assert winner is not None
    assert winner.fits
    assert master.bound_s <= best_s * (1 + 1e-9), "the bound is above a plan"
    gap = 1 - master.bound_s / winner.step_s
    assert best_s * (1 - 1e-9) <= winner.step_s <= best_s / (1 - gap) * (1 + 1e-9)
    assert gap < 0.35, "a bound that says nothing"


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_choice_is_best_or_within_the_gap(first: int):
    for seed in range(first, first + 10):
        check(seed, most_blocks=4)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1320, 20))
def test_the_choice_is_best_or_within_the_gap_on_many(first: int):
    for seed in range(first, first + 20):
        check(seed, most_blocks=6)
