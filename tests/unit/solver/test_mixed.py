"""Unequal pipelines: against all that can be chosen in small problems, and on hand-made ones."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from autopar.solver.mixed_bound import cost_bound, time_bound_s
from autopar.solver.mixed_choice import Simulated, choose, price_of, shares
from autopar.solver.mixed_pipelines import PipelineSearch, unit_of
from autopar.solver.mixed_problem import (
    MixedProblem,
    PipelineChoice,
    StageChoice,
    device_counts_of,
    evaluate,
    place,
    segments,
    stage_memory_bytes,
)
from autopar.solver.mixed_runs import RunPrices
from autopar.solver.objective import Objective
from tests.mixed_problems import MIB, all_choices, random_problem, small_problem, with_limits

# problems with at most 500 choices, so that all of them can be simulated
SEEDS = (1, 3, 6, 7, 9, 10, 14, 15, 18, 22, 25, 27, 29, 30, 35, 38)
MORE_SEEDS = (
    11, 16, 26, 28, 31, 32, 36, 41, 45, 46, 47, 51, 52, 53, 55, 59, 61, 64, 66, 67, 71, 72, 73, 77,
    78, 79, 83, 85, 89,
)  # fmt: skip
NEARLY = 1.025  # of the optimum: the shares of small batches leave little to choose from


def everything(problem: MixedProblem) -> list[Simulated]:
    alike = len({b.key for b in problem.kinds[0].blocks}) == 1
    found = []
    for choice in all_choices(problem, alike=alike):
        figures = evaluate(problem, choice)
        if figures is not None:
            cost = price_of(problem, device_counts_of(problem, choice), figures.step_s)
            found.append(Simulated(pipelines=choice, figures=figures, cost=cost))
    return found


def against_everything(seed: int) -> float:
    """How much slower the choice is than the best there is."""
    problem = random_problem(seed)
    found = everything(problem)
    answer = choose(problem)
    assert (answer is None) == (not found)
    if answer is None:
        return 1.0
    least_s = min(s.step_s for s in found)
    assert answer.bound_s <= least_s * (1 + 1e-9)
    gap = 1 - answer.bound_s / answer.best.step_s
    assert 1 - least_s / answer.best.step_s <= gap + 1e-9
    assert answer.best.step_s >= least_s * (1 - 1e-9), "a choice that is not among all"
    cheapest = choose(problem, Objective.COST)
    least = min(s.cost or 0.0 for s in found)
    assert cheapest is not None
    assert cheapest.cost_bound is not None
    assert cheapest.cost_bound <= least * (1 + 1e-9)
    assert cheapest.best.cost is not None
    assert cheapest.best.cost <= least * 1.1
    return answer.best.step_s / least_s


@pytest.mark.parametrize("seed", SEEDS)
def test_the_choice_is_nearly_the_best_of_all(seed: int):
    assert against_everything(seed) <= NEARLY


@pytest.mark.slow
def test_more_problems():
    ratios = [against_everything(seed) for seed in MORE_SEEDS]
    assert max(ratios) <= 1.1
    assert sum(ratios) / len(ratios) <= 1.01


def test_faster_devices_take_more_layers():
    problem = small_problem(
        counts=(1, 1), speeds=(3.0, 1.0), num_blocks=8, batch=64, gradient_bytes=4096 * MIB
    )
    answer = choose(problem)
    assert answer is not None
    (pipeline,) = answer.best.pipelines
    layers = {problem.kinds[s.kind].device_class: s.high - s.low for s in pipeline.stages}
    assert layers == {0: 6, 1: 2}
    assert answer.best.step_s <= time_bound_s(problem) * 1.05


def test_faster_pipelines_take_more_micro_batches():
    problem = small_problem(
        counts=(1, 1), speeds=(3.0, 1.0), num_blocks=1, batch=64, gradient_bytes=MIB
    )
    answer = choose(problem)
    assert answer is not None
    found = {
        problem.kinds[p.stages[0].kind].device_class: p.num_microbatches
        for p in answer.best.pipelines
    }
    assert found == {0: 48, 1: 16}


def test_a_class_without_room_for_a_block_stays_idle():
    problem = small_problem(counts=(2, 2), limits=(1 << 40, 11 * MIB), num_blocks=4, batch=8)
    answer = choose(problem)
    assert answer is not None
    assert device_counts_of(problem, answer.best.pipelines)[1] == 0


def test_a_class_with_little_room_gets_fewer_layers():
    problem = small_problem(
        counts=(1, 1), limits=(1 << 40, 26 * MIB), num_blocks=8, batch=32,
        gradient_bytes=4096 * MIB, saved_bytes=MIB, leaner=False,
    )  # fmt: skip
    answer = choose(problem)
    assert answer is not None
    (pipeline,) = answer.best.pipelines
    layers = {problem.kinds[s.kind].device_class: s.high - s.low for s in pipeline.stages}
    assert layers == {0: 6, 1: 2}


def test_nothing_fits():
    assert choose(small_problem(limits=(MIB, MIB))) is None


def test_a_slow_link_keeps_pipelines_apart_and_a_large_gradient_joins_them():
    """Between pipelines go gradients once per step, inside one activations per micro-batch."""
    light = choose(small_problem(counts=(2, 2), num_blocks=4, batch=64, gradient_bytes=1024))
    heavy = choose(small_problem(counts=(2, 2), num_blocks=4, batch=64, gradient_bytes=1 << 40))
    assert light is not None
    assert heavy is not None
    assert len(light.best.pipelines) > 1
    assert len(heavy.best.pipelines) == 1


def test_cost_leaves_dear_devices_idle():
    problem = small_problem(counts=(2, 2), speeds=(1.0, 1.0), batch=16, costs=(10.0, 1.0))
    fast, cheap = choose(problem), choose(problem, Objective.COST)
    assert fast is not None
    assert cheap is not None
    assert device_counts_of(problem, cheap.best.pipelines)[0] == 0
    assert cheap.best.step_s > fast.best.step_s
    assert (cheap.best.cost or 0) < (fast.best.cost or 0)
    assert (cheap.best.cost or 0) >= cost_bound(problem)


def test_time_within_cost_lies_between():
    problem = small_problem(counts=(2, 2), speeds=(1.0, 1.0), batch=16, costs=(10.0, 1.0))
    fast, cheap = choose(problem), choose(problem, Objective.COST)
    assert fast is not None
    assert cheap is not None
    limit = ((fast.best.cost or 0) + (cheap.best.cost or 0)) / 2
    between = choose(problem, Objective.TIME_WITHIN_COST, cost_limit=limit)
    assert between is not None
    assert (between.best.cost or 0) <= limit
    assert fast.best.step_s <= between.best.step_s <= cheap.best.step_s


def test_the_choice_is_deterministic():
    assert choose(random_problem(9)) == choose(random_problem(9))


# -- parts ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "flight"), [*product((20, 26, 30, 40, 60), (1, 2, 3))])
def test_a_run_is_as_fast_as_its_memory_allows(limit: int, flight: int):
    problem = small_problem(num_blocks=4)
    kind = problem.kinds[0]
    prices = RunPrices(kind, limit * MIB)
    low, high = 1, 4
    fits = []
    for options in product(*(range(len(b.options)) for b in kind.blocks[low:high])):
        stage = StageChoice(kind=0, low=low, high=high, options=options)
        if stage_memory_bytes(kind, stage, flight) <= limit * MIB:
            pairs = zip(kind.blocks[low:high], options, strict=True)
            fits.append(sum(b.options[o].total_s for b, o in pairs))
    chosen = prices.options(low, high, flight)
    assert (chosen is None) == (not fits)
    if chosen is not None:
        stage = StageChoice(kind=0, low=low, high=high, options=chosen)
        assert stage_memory_bytes(kind, stage, flight) <= limit * MIB
        assert prices.time_s(low, high, flight) == pytest.approx(min(fits))


def test_stages_are_placed_on_their_own_class_and_tp_groups_inside_machines():
    problem = small_problem(counts=(4, 4), num_blocks=3, widths=((1, 1), (1, 2)))
    by_shape = {(k.device_class, k.tp): i for i, k in enumerate(problem.kinds)}
    stages = tuple(
        StageChoice(kind=by_shape[key], low=i, high=i + 1, options=(0,))
        for i, key in enumerate([(0, 1), (1, 2), (0, 2)])
    )
    ranks = place(problem, (PipelineChoice(stages=stages, num_microbatches=1),))
    assert ranks == (((2,), (4, 5), (0, 1)),)


def test_more_devices_than_there_are_can_t_be_placed():
    problem = small_problem(counts=(1, 1), num_blocks=1)
    one = PipelineChoice(
        stages=(StageChoice(kind=0, low=0, high=1, options=(0,)),), num_microbatches=1
    )
    assert place(problem, (one, one)) is None
    assert evaluate(problem, (one, one)) is None


def test_runs_that_are_cut_differently_are_reduced_one_by_one():
    def pipeline(*cuts: int) -> PipelineChoice:
        ends = [*cuts, 4]
        stages = tuple(
            StageChoice(kind=0, low=low, high=high, options=(0,) * (high - low))
            for low, high in pairwise([0, *ends])
        )
        return PipelineChoice(stages=stages, num_microbatches=1)

    found = segments((pipeline(1), pipeline(3), pipeline()))
    assert found == [(0, 1, (0, 0, 0)), (1, 3, (1, 0, 0)), (3, 4, (1, 1, 0))]


def test_shares_add_up_to_the_batch_with_micro_batches_of_two_sizes():
    problem = small_problem(counts=(2, 1), num_blocks=1, batch=13, sizes=(1, 2), speeds=(2.0, 1.0))
    templates = PipelineSearch(problem).templates()
    two = next(t for t in templates if t.samples == 2)
    one = next(t for t in templates if t.samples == 1)
    counts = shares((two, one), 13)
    assert counts is not None
    assert 2 * counts[0] + counts[1] == 13
    assert shares((two,), 13) is None


def test_units_keep_the_number_of_vectors_small():
    assert unit_of(8, 8) == 1
    assert unit_of(1024, 8) == 48


def test_tighter_memory_never_makes_it_faster():
    problem = small_problem(counts=(2, 1), num_blocks=4, batch=8)
    times = []
    for room in (1 << 40, 40 * MIB, 32 * MIB, 27 * MIB):
        answer = choose(with_limits(problem, (room, room)))
        times.append(float("inf") if answer is None else answer.best.step_s)
    assert all(a <= b * 1.001 for a, b in pairwise(times))
