"""Orders as numbers against the orders written out, compute by compute."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from autopar.errors import ConfigError
from autopar.plan.actions import ActionKind
from autopar.plan.orders import codes_of, order_of
from autopar.plan.schedule import (
    Alive,
    Compute,
    alive_at_once,
    coded,
    decoded,
    in_flight,
    most_in_flight,
)
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
KINDS = tuple(ScheduleKind)


def shapes_of(
    kind: ScheduleKind, seed: int
) -> Iterator[tuple[MeshShape, int, tuple[int, ...] | None]]:
    rng = random.Random(f"{kind} {seed}")
    for _ in range(40):
        pp, count = rng.randint(1, 6), rng.randint(1, 25)
        chunked = (ScheduleKind.GPIPE, ScheduleKind.FORWARD, ScheduleKind.INTERLEAVED)
        virtual = rng.randint(1, 4) if kind in chunked else 1
        placement = StagePlacement.LOOP
        if kind is ScheduleKind.ZBV:
            virtual, placement = 2, StagePlacement.V
        elif kind is ScheduleKind.GPIPE and rng.random() < 0.5:
            placement = StagePlacement.V
        warmup = None
        if kind is ScheduleKind.ONE_F_ONE_B and rng.random() < 0.5:
            warmup = tuple(sorted((rng.randint(1, 9) for _ in range(pp)), reverse=True))
        yield MeshShape(pp=pp, virtual=virtual, placement=placement), count, warmup


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_say_what_the_order_says(kind: ScheduleKind):
    for mesh, count, warmup in shapes_of(kind, 0):
        order = order_of(kind, mesh, count, warmup)
        rows = codes_of(kind, mesh, count, warmup)
        assert [coded(row) for row in order] == list(rows)
        assert tuple(decoded(*row) for row in rows) == order
        for row in order:  # a compute's number among its likes is its micro-batch
            seen: Counter[tuple[int, ActionKind]] = Counter()
            for stage, what, microbatch in row:
                assert microbatch == seen[stage, what]
                seen[stage, what] += 1
            assert set(seen.values()) == {count}


def v_row(pp: int, rank: int, num_microbatches: int) -> list[Compute]:
    """ZB-V as Qi et al. and torch write it: one compute after another."""
    down, up = rank, 2 * pp - 1 - rank
    total = max(2 * pp - 1, num_microbatches)
    done: Counter[tuple[int, ActionKind]] = Counter()
    row: list[Compute] = []

    def run(stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            if done[stage, kind] < num_microbatches:
                row.append(Compute(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (pp - rank) - 1):
        run(down, F)
    for _ in range(rank):
        run(up, F)
        run(down, F)
    for _ in range(pp - rank):
        run(up, F, INPUT, WEIGHT)
    while done[up, F] < done[down, F] or done[down, F] < total:
        if done[down, F] < total:
            run(down, F)
        run(down, INPUT, WEIGHT)
        run(up, F, INPUT, WEIGHT)
    for _ in range(rank):
        run(down, INPUT)
        run(up, INPUT)
    for _ in range(pp - rank):
        run(down, INPUT, WEIGHT)
    for stage in (up, down):
        while done[stage, WEIGHT] < done[stage, INPUT]:
            run(stage, WEIGHT)
    return row


def half_row(pp: int, rank: int, num_microbatches: int) -> list[Compute]:
    """ZB-H1: a half of the weights follows each half of the inputs from the rank's own one on."""
    warmup = min(num_microbatches, pp - rank - 1)
    row = [Compute(rank, F, mb) for mb in range(warmup)]
    for mb in range(num_microbatches):
        if warmup + mb < num_microbatches:
            row.append(Compute(rank, F, warmup + mb))
        row.append(Compute(rank, INPUT, mb))
        if mb >= rank:
            row.append(Compute(rank, WEIGHT, mb - rank))
    last = max(0, num_microbatches - rank)
    return row + [Compute(rank, WEIGHT, mb) for mb in range(last, num_microbatches)]


def eager_row(stage: int, depth: int, num_microbatches: int) -> list[Compute]:
    """So many forwards, then one backward and one forward in turn."""
    first = min(depth, num_microbatches)
    row = [Compute(stage, F, mb) for mb in range(first)]
    for mb in range(num_microbatches):
        row.append(Compute(stage, B, mb))
        if first + mb < num_microbatches:
            row.append(Compute(stage, F, first + mb))
    return row


def round_row(pp: int, rank: int, virtual: int, rounds: list[int]) -> list[Compute]:
    """Interleaved as Narayanan et al. have it: rounds go through all stages of a rank in turn.

    Args:
        pp: Ranks.
        rank: This one.
        virtual: Stages of a rank.
        rounds: Micro-batches by round.
    """
    ahead: list[tuple[int, int]] = []
    back: list[tuple[int, int]] = []
    begun = 0
    for size in rounds:
        for chunk in range(virtual):
            for mb in range(size):
                ahead.append((chunk * pp + rank, begun + mb))
                back.append(((virtual - 1 - chunk) * pp + rank, begun + mb))
        begun += size
    first = min(len(ahead), (virtual - 1) * max(rounds) + 2 * (pp - rank - 1))
    row = [Compute(stage, F, mb) for stage, mb in ahead[:first]]
    for at, (stage, mb) in enumerate(back):
        if first + at < len(ahead):
            row.append(Compute(ahead[first + at][0], F, ahead[first + at][1]))
        row.append(Compute(stage, B, mb))
    return row


@pytest.mark.parametrize("seed", range(60))
def test_patterns_with_several_stages_per_rank_and_free_warm_ups(seed: int):
    rng = random.Random(seed)
    pp, virtual, count = rng.randint(1, 6), rng.randint(2, 4), rng.randint(1, 25)
    mesh = MeshShape(pp=pp, virtual=virtual)
    number = max(1, count // pp)  # rounds: none is smaller than pp unless it is the only one
    rounds = [count // number + (at < count % number) for at in range(number)]
    order = order_of(ScheduleKind.INTERLEAVED, mesh, count)
    assert [list(row) for row in order] == [round_row(pp, r, virtual, rounds) for r in range(pp)]
    depths = tuple(sorted((rng.randint(1, 9) for _ in range(pp)), reverse=True))
    order = order_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=pp), count, depths)
    assert [list(row) for row in order] == [eager_row(r, depths[r], count) for r in range(pp)]
    order = order_of(ScheduleKind.GPIPE, mesh, count)
    forwards = order_of(ScheduleKind.FORWARD, mesh, count)
    for rank in range(pp):
        own = [chunk * pp + rank for chunk in range(virtual)]
        ahead = [Compute(stage, F, mb) for stage in own for mb in range(count)]
        back = [Compute(stage, B, mb) for stage in reversed(own) for mb in range(count)]
        assert list(order[rank]) == ahead + back
        assert list(forwards[rank]) == ahead


@pytest.mark.parametrize("pp", range(1, 7))
def test_patterns_are_the_published_procedures(pp: int):
    v_shape = MeshShape(pp=pp, virtual=2, placement=StagePlacement.V)
    for count in range(1, 4 * pp + 3):
        order = order_of(ScheduleKind.ZBV, v_shape, count)
        assert [list(row) for row in order] == [v_row(pp, r, count) for r in range(pp)]
        order = order_of(ScheduleKind.ZERO_BUBBLE, MeshShape(pp=pp), count)
        assert [list(row) for row in order] == [half_row(pp, r, count) for r in range(pp)]
        order = order_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=pp), count)
        assert [list(row) for row in order] == [eager_row(r, pp - r, count) for r in range(pp)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_alive_at_once_is_what_no_other_moment_exceeds(kind: ScheduleKind):
    for mesh, count, warmup in shapes_of(kind, 1):
        order = order_of(kind, mesh, count, warmup)
        for row, (codes, stages) in zip(order, codes_of(kind, mesh, count, warmup), strict=True):
            most = [in_flight((row,), stage) for stage in stages]
            assert most_in_flight(codes, len(stages)) == most
            found = [tuple(moment.items()) for moment in alive_at_once(codes, stages)]
            if all(c.kind is F for c in row):
                assert len(found) == len(stages)
                continue
            assert len(set(found)) == len(found)
            assert set(found) == maximal(row, stages)


def maximal(
    row: tuple[Compute, ...], stages: tuple[int, ...]
) -> set[tuple[tuple[int, Alive], ...]]:
    """All moments of a row that no other one has at least as much of everything as."""
    alive = {stage: [0, 0] for stage in stages}
    seen: set[tuple[int, ...]] = set()
    for stage, kind, _ in row:
        alive[stage][0] += {F: 1, B: -1, INPUT: -1}.get(kind, 0)
        alive[stage][1] += {INPUT: 1, WEIGHT: -1}.get(kind, 0)
        seen.add(tuple(n for stage in stages for n in alive[stage]))
    best = {
        one
        for one in seen
        if not any(
            other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in seen
        )
    }
    return {
        tuple((s, Alive(*one[2 * at : 2 * at + 2])) for at, s in enumerate(stages)) for one in best
    }


def test_what_does_not_go_together_is_refused_as_for_orders():
    with pytest.raises(ConfigError, match="has one stage per pipeline rank"):
        codes_of(ScheduleKind.ONE_F_ONE_B, MeshShape(pp=2, virtual=2), 3)
