"""Prices of runs and ends of pipelines: against the same found step by step, and simulated."""

from __future__ import annotations

import math
import random
from itertools import combinations, product

import pytest

from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.mixed_problem import StageFigures, StageKind, ends_of_stages
from autopar.solver.mixed_runs import RunPrices
from autopar.solver.stages_problem import BlockMenu, Option
from cost_models.lanes import Lane
from cost_models.simulate import StageSeconds, simulate


def some_kind(rng: random.Random) -> StageKind:
    """Up to 12 blocks of three keys whose options may be alike in seconds or in bytes."""
    menus = []
    for key in range(3):
        fewest = rng.choice((0, 1, 5))
        options = [
            Option(
                name=f"{o}",
                forward_s=1.0,
                backward_s=rng.choice((2.0, 2.5, 3.0, rng.uniform(2, 4))),
                saved_bytes=rng.randint(fewest, 40),
                transient_bytes=rng.randint(0, 60),
            )
            for o in range(rng.randint(1, 6))
        ]
        menus.append(BlockMenu(key=f"{key}", options=tuple(options), state_bytes=rng.randint(0, 9)))
    blocks = tuple(rng.choice(menus) for _ in range(rng.randint(1, 12)))
    return StageKind(
        device_class=0, dp=1, tp=1, samples=1, zero_level=0,
        blocks=blocks, boundary_bytes=(0,) * (len(blocks) - 1),
    )  # fmt: skip


def some_runs(rng: random.Random) -> tuple[RunPrices, list[tuple[int, int]]]:
    """Prices under some limit, and all runs of blocks."""
    kind = some_kind(rng)
    runs = list(combinations(range(len(kind.blocks) + 1), 2))
    return RunPrices(kind, rng.randint(20, 600)), runs


def leaner_step_by_step(
    prices: RunPrices, low: int, high: int, flight: int
) -> tuple[float, tuple[int, ...]]:
    """Blocks of a run are made leaner one by one, least seconds per byte first, until it fits.

    While they are, the largest transient counts of those before and of the leaner option.
    """
    kind, keys = prices.kind, prices.keys[low:high]
    at = [prices._first[key] for key in keys]

    def options() -> list[Option]:
        return [prices.menus[k][o] for k, o in zip(keys, at, strict=True)]

    def transient_bytes() -> int:
        return max(o.transient_bytes for o in options())

    def room_bytes() -> int:
        state = sum(b.state_bytes for b in kind.blocks[low:high])
        return prices.limit_bytes - state - flight * sum(o.saved_bytes for o in options())

    for step in prices._steps:
        if room_bytes() >= transient_bytes():
            break
        meanwhile = max(transient_bytes(), prices.menus[step.key][step.option].transient_bytes)
        for i, key in enumerate(keys):
            if room_bytes() < meanwhile and (key, at[i]) == (step.key, step.source):
                at[i] = step.option
    time_s = sum(prices.menus[k][o].total_s for k, o in zip(keys, at, strict=True))
    return (time_s if room_bytes() >= transient_bytes() else math.inf), tuple(at)


@pytest.mark.parametrize("seed", range(60))
def test_a_run_is_made_leaner_as_it_is_block_by_block(seed: int):
    prices, runs = some_runs(random.Random(seed))
    for (low, high), flight in product(runs, (1, 2, 5)):
        time_s, options = leaner_step_by_step(prices, low, high, flight)
        assert prices.time_s(low, high, flight) == pytest.approx(time_s, rel=1e-12)
        found = prices.options(low, high, flight)
        assert (found is None) == math.isinf(time_s)
        if found is not None:
            assert sorted(zip(prices.keys[low:high], found, strict=True)) == sorted(
                zip(prices.keys[low:high], options, strict=True)
            )


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_into_a_period_is_what_takes_no_longer(seed: int):
    rng = random.Random(seed)
    prices, runs = some_runs(rng)
    for low, high in runs:
        time_s = prices.time_s(low, high, 2)
        for period_s in (time_s, math.nextafter(time_s, 0.0), rng.uniform(0, 40)):
            assert prices.fits(low, high, 2, period_s) == (time_s <= period_s)


@pytest.mark.parametrize("seed", range(20))
def test_stages_end_when_the_simulator_says(seed: int):
    rng = random.Random(seed)
    depth, count = rng.randint(2, 7), rng.randint(1, 12)
    stages = [
        StageFigures(
            ranks=(s,), forward_s=rng.uniform(0, 2), backward_s=rng.uniform(0, 4),
            p2p_s=rng.choice((0.0, rng.uniform(0, 3))), step_s=1.0, memory_bytes=0,
            num_in_flight=1,
        )
        for s in range(depth)
    ]  # fmt: skip
    ahead = [(s - 1, s) for s in range(1, depth)]
    lists = action_lists(
        compute_order(ScheduleKind.ONE_F_ONE_B, depth, 1, count),
        MeshShape(pp=depth),
        forward_edges=ahead,
        backward_edges=[(t, s) for s, t in ahead],
    )
    ran = simulate(
        lists,
        [StageSeconds(forward_s=f.forward_s, backward_s=f.backward_s) for f in stages],
        p2p_s={(s, t): stages[min(s, t)].p2p_s for e in ahead for s, t in (e, e[::-1])},
    )
    ends = [
        max(x.end_s for x in ran.spans if x.rank == rank and x.lane == Lane.COMPUTE)
        for rank in range(depth)
    ]
    assert ends_of_stages(stages, count) == ends
