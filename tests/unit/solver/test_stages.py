"""Cuts and recompute: by hand and by message."""

from __future__ import annotations

import pytest

from autopar.plan.types import ScheduleKind
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import (
    BlockMenu,
    Option,
    StageProblem,
    least_memory_bytes,
    memory_bytes,
    surrogate_s,
)
from autopar.units import MIB


def option(name: str, forward_s: float, saved: int = 0, extra_s: float = 0.0) -> Option:
    return Option(
        name=name,
        forward_s=forward_s,
        backward_s=2 * forward_s + extra_s,
        saved_bytes=saved,
        transient_bytes=0,
    )


def problem(
    seconds: list[float],
    *,
    pp: int = 2,
    virtual: int = 1,
    count: int = 4,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    message_s: float = 0.0,
    limit: int = 1 << 60,
    fixed: tuple[int, ...] | None = None,
) -> StageProblem:
    blocks = tuple(
        BlockMenu(key=f"{s}", options=(option("none", s),), state_bytes=MIB) for s in seconds
    )
    return StageProblem(
        blocks=blocks,
        boundary_s=(message_s,) * (len(blocks) - 1),
        pp=pp,
        virtual=virtual,
        num_microbatches=count,
        schedule=kind,
        in_flight=tuple(range(pp * virtual, 0, -1)),
        limit_bytes=limit,
        fixed_starts=fixed,
    )


def test_1f1b_surrogate_by_hand():
    # stages of 3 and 6 s, messages of 0.5 s each way, 4 micro-batches:
    # first 3 + 6 + 2 * 0.5 = 10 s; period max(3, 6, (9 + 1) / 2) = 6 s; 10 + 3 * 6 = 28 s
    assert surrogate_s(problem([1.0, 2.0], message_s=0.5), (1,), (0, 0)) == pytest.approx(28.0)


def test_gpipe_surrogate_by_hand():
    # forwards 1 and 2, backwards 2 and 4: 9 s for the first, 3 * (2 + 4) for the rest
    made = problem([1.0, 2.0], kind=ScheduleKind.GPIPE)
    assert surrogate_s(made, (1,), (0, 0)) == pytest.approx(27.0)


def test_interleaved_surrogate_by_hand():
    # four stages of 3 s on two ranks, 4 micro-batches: 4 * (3 + 3) + fill 3 = 27 s
    made = problem([1.0] * 4, virtual=2, kind=ScheduleKind.INTERLEAVED)
    assert surrogate_s(made, (1, 2, 3), (0,) * 4) == pytest.approx(27.0)


def test_a_heavy_head_gets_fewer_blocks():
    found = solve_stages(problem([1.0] * 8 + [4.0], pp=4, count=16))
    assert found is not None
    assert found.is_optimal
    assert found.starts == (3, 6, 8) or max(
        sum(([1.0] * 8 + [4.0])[low:high])
        for low, high in zip((0, *found.starts), (*found.starts, 9), strict=True)
    ) == pytest.approx(4.0)


def test_memory_makes_early_stages_shorter_or_recompute():
    # 6 blocks of 10 MiB a micro-batch; stage 0 holds two: 45 MiB are two blocks, not three
    blocks = tuple(
        BlockMenu(
            key="layer",
            options=(option("none", 1.0, 10 * MIB), option("full", 1.0, 1 * MIB, extra_s=1.0)),
            state_bytes=0,
        )
        for _ in range(6)
    )
    made = StageProblem(
        blocks=blocks,
        boundary_s=(0.0,) * 5,
        pp=2,
        virtual=1,
        num_microbatches=8,
        schedule=ScheduleKind.ONE_F_ONE_B,
        in_flight=(2, 1),
        limit_bytes=45 * MIB,
    )
    found = solve_stages(made)
    assert found is not None
    assert max(memory_bytes(made, found.starts, found.options)) <= 45 * MIB
    # 3 + 3 with one block recomputed (10 s) beats 2 + 4 (12 s)
    assert found.starts == (3,)
    assert found.options.count(1) == 1


def test_user_boundaries_are_kept():
    found = solve_stages(problem([1.0] * 6, fixed=(1,)))
    assert found is not None
    assert found.starts == (1,)


def test_nothing_fits_is_none_and_the_least_is_known():
    made = problem([1.0] * 4, limit=MIB)
    assert solve_stages(made) is None
    assert least_memory_bytes(made) == 2 * MIB


def test_fewer_blocks_than_stages_is_none():
    assert solve_stages(problem([1.0], pp=2)) is None


def test_the_same_problem_gives_the_same_cuts():
    made = problem([1.0, 1.5, 0.5, 2.0, 1.0, 1.0, 0.5, 1.5], pp=3, count=8, message_s=0.1)
    assert len({solve_stages(made) for _ in range(3)}) == 1
