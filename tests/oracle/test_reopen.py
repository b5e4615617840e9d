"""What blocks make again for given cuts, against every choice of options."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.reopen import best_options, needed_bytes
from autopar.solver.schedule_choice import alive_of, flights
from autopar.solver.stages_problem import BlockMenu, Option, StageProblem, memory_bytes

KIB = 1 << 10
SHAPES = [
    (ScheduleKind.ONE_F_ONE_B, 1, 1),
    (ScheduleKind.ONE_F_ONE_B, 2, 1),
    (ScheduleKind.GPIPE, 2, 1),
    (ScheduleKind.INTERLEAVED, 2, 2),
    (ScheduleKind.ZERO_BUBBLE, 2, 1),
]


def drawn(seed: int, kind: ScheduleKind, pp: int, virtual: int) -> tuple[StageProblem, list[int]]:
    """Five or six blocks of two or three options, and cuts."""
    rng = random.Random(seed)
    blocks = []
    for _ in range(rng.randint(5, 6)):
        saved, extra_s, options = rng.randint(4, 12), 0.0, []
        for at in range(rng.randint(2, 3)):
            options.append(
                Option(
                    name=str(at), forward_s=1.0, backward_s=2.0 + extra_s,
                    saved_bytes=saved * KIB, transient_bytes=rng.randint(1, 6) * KIB,
                    weight_s=1.0, held_bytes=rng.randint(0, 3) * KIB,
                )
            )  # fmt: skip
            saved, extra_s = saved - rng.randint(1, saved), extra_s + rng.randint(1, 5)
            if saved <= 0:
                break
        state = rng.randint(0, 3) * KIB
        blocks.append(BlockMenu(key=str(len(blocks)), options=tuple(options), state_bytes=state))
    mesh = MeshShape(pp=pp, virtual=virtual)
    count = len(blocks)
    starts = sorted(rng.sample(range(1, count), pp * virtual - 1))
    problem = StageProblem(
        blocks=tuple(blocks), boundary_s=(0.0,) * (count - 1), pp=pp, virtual=virtual,
        num_microbatches=4, schedule=kind, in_flight=flights(kind, mesh, 4), limit_bytes=0,
        together=alive_of(kind, mesh, 4),
    )  # fmt: skip
    return problem, starts


def every_choice(problem: StageProblem):
    return product(*(range(len(block.options)) for block in problem.blocks))


def extra_s(problem: StageProblem, options) -> float:
    chosen = zip(problem.blocks, options, strict=True)
    return sum(block.options[at].backward_s for block, at in chosen)


@pytest.mark.parametrize(("kind", "pp", "virtual"), SHAPES)
def test_the_options_are_the_fastest_that_fit(kind: ScheduleKind, pp: int, virtual: int):
    num_bound = 0
    for seed in range(12):
        problem, starts = drawn(seed, kind, pp, virtual)
        rows = [(extra_s(problem, o), needed_bytes(problem, starts, o)) for o in
                every_choice(problem)]  # fmt: skip
        peaks = sorted({max(peak) for _, peak in rows})
        for limit in (peaks[0], peaks[len(peaks) // 3], peaks[len(peaks) // 2], peaks[-1]):
            limited = problem_under(problem, limit)
            found = best_options(limited, starts)
            fitting = [seconds for seconds, peak in rows if max(peak) <= limit]
            assert found is not None
            assert max(needed_bytes(limited, starts, found)) <= limit
            assert extra_s(problem, found) == pytest.approx(min(fitting), rel=2e-4)
            num_bound += min(fitting) > min(seconds for seconds, _ in rows)
        assert best_options(problem_under(problem, peaks[0] - KIB), starts) is None
    assert num_bound >= 12  # the limit mattered


@pytest.mark.parametrize(("kind", "pp", "virtual"), SHAPES)
def test_no_choice_needs_more_than_the_bound_by_which_cuts_are_made(
    kind: ScheduleKind, pp: int, virtual: int
):
    num_less = 0
    for seed in range(6):
        problem, starts = drawn(seed, kind, pp, virtual)
        for options in every_choice(problem):
            exact = needed_bytes(problem, starts, options)
            bound = memory_bytes(problem, starts, options)
            assert all(a <= b for a, b in zip(exact, bound, strict=True))
            num_less += exact != bound
    assert (num_less > 0) == (kind is not ScheduleKind.ZERO_BUBBLE)


def problem_under(problem: StageProblem, limit_bytes: int) -> StageProblem:
    return replace(problem, limit_bytes=limit_bytes)
