"""The busiest of ranks that run whole blocks, against every way to deal a chain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from autopar.plan.types import MeshShape, StagePlacement
from autopar.solver.whole_blocks import RESOLUTION, WholeBlocks, whole_blocks


def every_deal_s(
    mesh: MeshShape, kinds: Sequence[int], seconds: Sequence[float], unit_of: Sequence[int],
    gain_s: float,
) -> float:  # fmt: skip
    """Seconds of the busiest rank in the best of all cuts; a whole unit in a run takes more."""
    inside = [at for at, place in enumerate(unit_of) if place >= 0]
    unit = max(unit_of, default=-1) + 1

    def run_s(low: int, high: int) -> float:
        time_s = sum(seconds[kinds[at]] for at in range(low, high))
        places = [unit_of[at] for at in range(low, high)] if unit_of else []
        units = min((places.count(place) for place in range(unit)), default=0)
        units -= sum(low <= end < high for end in (inside[:1] + inside[-1:]))
        return time_s + max(0, units) * gain_s

    best = float("inf")
    for cuts in combinations(range(1, len(kinds)), mesh.num_stages - 1):
        runs = list(pairwise((0, *cuts, len(kinds))))
        ranks = (mesh.stages_of(rank) for rank in range(mesh.pp))
        best = min(best, max(sum(run_s(*runs[s]) for s in stages) for stages in ranks))
    return best


def random_chain(rng: random.Random) -> tuple[list[int], list[float], list[int]]:
    unit = rng.randint(1, 3)
    repeats = rng.randint(2, 9 // unit)
    before, after = rng.randint(0, 2), rng.randint(0, 2)
    kinds, unit_of = [], []
    for at in range(before):
        kinds.append(unit + at)
        unit_of.append(-1)
    for _ in range(repeats):
        kinds += range(unit)
        unit_of += range(unit)
    for at in range(after):
        kinds.append(unit + before + at)
        unit_of.append(-1)
    seconds = [
        rng.choice((0.02, 1.0)) * rng.uniform(0.3, 2.0) for _ in range(unit + before + after)
    ]
    return kinds, seconds, unit_of


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_no_deal_of_whole_blocks_is_more_even(first: int):
    lifted = 0
    for seed in range(first, first + 20):
        rng = random.Random(seed)
        kinds, seconds, unit_of = random_chain(rng)
        pp, virtual = rng.randint(2, 4), rng.randint(1, 2)
        if pp * virtual > len(kinds):
            continue
        placement = StagePlacement.V if virtual == 2 and rng.random() < 0.5 else StagePlacement.LOOP
        mesh = MeshShape(pp=pp, virtual=virtual, placement=placement)
        gain_s = rng.choice((0.0, 0.1, 0.5))
        best_s = every_deal_s(mesh, kinds, seconds, unit_of, gain_s)
        found_s = whole_blocks(kinds, seconds, unit_of, virtual, gain_s).least_busiest_s(pp)
        mean_s = sum(seconds[k] for k in kinds) / pp
        assert found_s <= best_s * (1 + 1e-9), seed
        assert found_s >= 0.85 * mean_s
        lifted += found_s > 1.02 * mean_s
    assert lifted >= 5


def test_where_parts_do_not_add_up_some_rank_has_more():
    """Five blocks of two seconds on two ranks: three of them on one."""
    blocks = WholeBlocks(counts=(5,), seconds=(2.0,))
    assert blocks.least_busiest_s(2) == pytest.approx(6.0, rel=2e-3)
    assert blocks.least_busiest_s(5) == pytest.approx(2.0, rel=2e-3)


def test_kinds_that_stand_in_turn_are_not_sorted_out():
    """Without that, a rank of two stages could run the light kind alone."""
    loose = WholeBlocks(counts=(6, 6), seconds=(1.0, 5.0))
    tied = WholeBlocks(counts=(6, 6), seconds=(1.0, 5.0), unit=2, runs=1)
    assert loose.least_busiest_s(5) <= tied.least_busiest_s(5)
    assert tied.least_busiest_s(5) == pytest.approx(11.0, rel=2e-3)


def test_a_chain_with_too_many_shares_has_the_mean():
    many = WholeBlocks(counts=(40,) * 4, seconds=(1.0, 1.1, 1.2, 1.3))
    mean_s = 20 * 4.6
    assert mean_s * (1 - 2 * RESOLUTION) < many.least_busiest_s(2) <= mean_s


def test_a_chain_at_another_scale_has_the_same_answer_at_that_scale():
    one = WholeBlocks(counts=(9, 9, 1), seconds=(1.0, 1.7, 3.1), unit=2, runs=2, gain_s=0.4)
    other = WholeBlocks(counts=(9, 9, 1), seconds=(0.25, 0.425, 0.775), unit=2, runs=2, gain_s=0.1)
    assert one.least_busiest_s(4) == pytest.approx(4 * other.least_busiest_s(4), rel=1e-9)
