"""Cuts of least fill: against all cuts of small problems."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from autopar.solver.mixed_cuts import better_cuts, swaps
from autopar.solver.mixed_fill import least_fill, with_less_fill
from autopar.solver.mixed_pipelines import PipelineSearch, Template
from autopar.solver.mixed_problem import evaluate
from tests.mixed_problems import MIB, random_problem, small_problem


def all_cuts(search: PipelineSearch, kinds: Sequence[int], most: int) -> list[Template]:
    inside = range(1, search.problem.num_blocks)
    made = [
        search.template(kinds, [0, *cuts], most=most)
        for cuts in combinations(inside, len(kinds) - 1)
    ]
    return [template for template in made if template is not None]


def longest_s(search: PipelineSearch, template: Template) -> float:
    return max(search.stage_s(stage)[0] for stage in template.stages)


def some_search(rng: random.Random) -> tuple[PipelineSearch, list[int]]:
    """Up to 9 blocks on 2 to 4 stages; memory binds in about half of them."""
    num_blocks = rng.randint(4, 9)
    problem = small_problem(
        counts=(4, 4),
        speeds=(1.0, rng.choice((1.0, 0.5, 0.3))),
        limits=tuple(rng.choice((1 << 40, rng.randint(30, 60) * MIB)) for _ in range(2)),
        num_blocks=num_blocks,
        widths=((1, 1), (1, 2)),
        block_s=tuple(rng.choice((4e-3, 1e-2, 2e-2)) for _ in range(num_blocks)),
    )
    depth = rng.randint(2, 4)
    return PipelineSearch(problem), [rng.randrange(len(problem.kinds)) for _ in range(depth)]


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_with_stages_as_short_has_less_fill(seed: int):
    rng = random.Random(seed)
    search, kinds = some_search(rng)
    most = rng.randint(1, 8)
    every = all_cuts(search, kinds, most)
    for cap_s in sorted({longest_s(search, t) for t in every}):
        allowed = cap_s * (1 + 1e-9)
        found = least_fill(search, kinds, most=most, longest_s=allowed)
        assert found is not None
        assert longest_s(search, found) <= allowed * (1 + 1e-9)
        least_s = min(t.fill_s for t in every if longest_s(search, t) <= allowed)
        assert found.fill_s == pytest.approx(least_s, rel=1e-9)
    least_cap_s = min((longest_s(search, t) for t in every), default=1.0)
    assert least_fill(search, kinds, most=most, longest_s=least_cap_s * (1 - 1e-6)) is None


@pytest.mark.parametrize("seed", range(40))
def test_other_cuts_are_no_slower_and_not_far_from_the_best(seed: int):
    rng = random.Random(seed)
    search, kinds = some_search(rng)
    count = rng.randint(8, 64)
    begin = search.cut(kinds, most=count)
    if begin is None:
        return
    found = search.priced(with_less_fill(search, begin.choice(count)).stages)
    taken_s = found.time_s(count, shares=False)
    assert taken_s <= begin.time_s(count, shares=False)
    best_s = min(t.time_s(count, shares=False) for t in all_cuts(search, kinds, count))
    assert taken_s <= best_s * 1.02


@pytest.mark.parametrize("seed", [1, 7, 14, 22, 30, 38])
def test_what_is_cut_again_or_turned_fits(seed: int):
    problem = random_problem(seed)
    search = PipelineSearch(problem)
    for template in search.templates():
        count = problem.batch // template.samples
        if len(template.stages) == 1 or not 1 <= count <= template.most:
            continue
        chosen = (template.choice(count),)
        for made in (better_cuts(search, chosen), *swaps(search, chosen)):
            assert made[0].num_microbatches == count
            assert evaluate(problem, made) is not None
