"""The whole search against every plan, on small random chains, in the event simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from autopar.plan.actions import ActionKind as K
from autopar.plan.types import ScheduleKind
from autopar.solver.order_bound import OrderBound
from autopar.solver.order_times import step_s
from autopar.solver.path_bound import PathBound
from autopar.solver.pipeline_bound import Floor
from autopar.solver.stages_problem import BlockMenu, memory_bytes
from autopar.solver.step_paths import Path, Term, joint_paths_of, paths_of
from cost_models.simulate import StageSeconds
from tests.oracle.search_cases import (
    ROUNDING,
    Verdict,
    event_s,
    every_plan,
    judged,
    shapes_of,
)


def check(seed: int, most_blocks: int) -> Verdict:
    verdict = judged(seed, most_blocks)
    winner, best = verdict.winner, verdict.best
    assert winner is not None, f"seed {seed}: a plan fits, none was found"
    assert winner.fits
    assert verdict.bound_s <= best.time_s * (1 + ROUNDING), f"seed {seed}: bound above a plan"
    assert best.time_s * (1 - ROUNDING) <= winner.step_s
    assert winner.step_s <= best.time_s / (1 - verdict.gap) * (1 + ROUNDING)
    assert verdict.gap < 0.45, f"seed {seed}: a bound that says nothing"
    # what enumerating says of the best plan is what the event simulator and the memory model say
    run = (winner.chosen, winner.solution.starts, winner.solution.options)
    assert event_s(*run) == pytest.approx(winner.step_s)
    assert event_s(best.chosen, best.starts, best.options) == pytest.approx(best.time_s)
    assert max(memory_bytes(best.chosen, best.starts, best.options)) == best.peak_bytes
    return verdict


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_the_choice_is_best_or_within_the_gap(first: int):
    for seed in range(first, first + 10):
        check(seed, most_blocks=4)


def test_stages_get_forms_of_their_own_where_that_is_best():
    verdicts = [judged(seed, 4) for seed in range(60)]
    with_forms = [v for v in verdicts if v.has_forms]
    mixed = [v for v in with_forms if len(set(v.best.forms)) > 1]
    assert len(with_forms) >= 20
    assert len(mixed) >= 4
    assert sum(v.loss <= ROUNDING for v in mixed) >= len(mixed) - 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1320, 20))
def test_the_choice_is_best_or_within_the_gap_on_many(first: int):
    for seed in range(first, first + 20):
        check(seed, most_blocks=8)


def test_the_longest_path_is_the_simulated_step():
    """On random plans of all schedules, uneven ones with recomputing among them."""
    seen = set()
    for seed in range(12):
        rng = random.Random(seed)
        for problem in shapes_of(seed, most_blocks=5):
            for plan in rng.sample(list(every_plan(problem)), 2):
                run = (plan.chosen, plan.starts, plan.options)
                assert plan.time_s == pytest.approx(event_s(*run)), (seed, problem.schedule)
                assert plan.peak_bytes == max(memory_bytes(*run))
            seen.add(problem.schedule)
    assert {ScheduleKind.INTERLEAVED, ScheduleKind.ZBV, ScheduleKind.ZERO_BUBBLE} <= seen


@pytest.mark.parametrize("seed", range(8))
def test_the_path_bound_is_below_every_plan_and_near_the_best(seed: int):
    for problem in shapes_of(seed, most_blocks=5):
        plans = list(every_plan(problem))
        best = min(p.time_s for p in plans)
        found = PathBound(problem).least_s()
        assert found <= best * (1 + ROUNDING), problem.schedule
        assert found >= 0.6 * best, problem.schedule
        assert PathBound(problem).least_s(best / 2) >= best / 2  # enough is enough


@pytest.mark.parametrize("seed", range(4))
def test_a_bound_goes_on_where_it_was_left(seed: int):
    """Step by step it rises, never above a plan, to what it is when found at once."""
    for problem in shapes_of(seed, most_blocks=5):
        best = min(p.time_s for p in every_plan(problem))
        splits = problem.schedule.splits_backward
        bound = OrderBound(problem=problem, is_open=False, may_split=splits)
        begun = bound.begun()
        rising = [begun.more_s(1, inf) for _ in range(60)]
        assert rising == sorted(rising)
        assert rising[-1] <= best * (1 + ROUNDING), problem.schedule
        assert rising[-1] >= bound.least_s() * (1 - 1e-9)
        assert begun.more_s(1 << 30, inf) == begun.best_s  # it has come to its end
        assert bound.begun().more_s(1 << 30, rising[-1] / 2) >= rising[-1] / 2


def test_a_path_names_what_it_has_of_each_term():
    problem = next(p for s in range(20) for p in shapes_of(s, 5) if p.schedule is ScheduleKind.ZBV)
    graph = paths_of(problem.schedule, problem.mesh, problem.num_microbatches)
    plan = next(every_plan(problem))
    rng = random.Random(0)
    seconds = [[rng.random() for _ in range(problem.num_stages)] for _ in range(7)]
    end_s, paths = graph.longest(seconds)
    assert end_s == graph.end_s(seconds)
    lengths = [sum(n * seconds[term][s] for (term, s), n in path.items()) for path in paths]
    assert lengths[0] == pytest.approx(end_s)
    assert len(paths) == problem.pp
    assert max(lengths) == pytest.approx(end_s)
    assert plan.time_s > 0


def test_steps_of_several_numbers_of_micro_batches_share_what_they_begin_with():
    rng = random.Random(1)
    for problem in (p for seed in range(6) for p in shapes_of(seed, most_blocks=5)):
        counts = (3 * problem.pp + 1, 4 * problem.pp + 1)
        both = joint_paths_of(problem.schedule, problem.mesh, counts)
        alone = [paths_of(problem.schedule, problem.mesh, count) for count in counts]
        assert len(both) <= sum(map(len, alone))
        seconds = [[rng.random() for _ in range(problem.num_stages)] for _ in range(8)]
        assert both.ends_s(seconds) == tuple(graph.end_s(seconds) for graph in alone)
        expected = tuple(graph.longest(seconds, most=1)[1][0] for graph in alone)
        assert both.dearest(seconds) == expected
        for graph, count in zip(alone, counts, strict=True):  # the order as numbers tells it too
            gather, reduce = int(Term.GATHER), int(Term.REDUCE)
            stages = [
                StageSeconds(
                    forward_s=seconds[0][s], backward_s=seconds[1][s], weight_s=0.0,
                    once_s={K.UNSHARD: seconds[gather][s], K.REDUCE_GRAD: seconds[reduce][s]},
                )
                for s in range(problem.num_stages)
            ]  # fmt: skip
            if problem.schedule.splits_backward:
                continue
            over = seconds[int(Term.MESSAGE)]
            links = {
                edge: over[s]
                for s in range(1, problem.num_stages)
                for edge in ((s - 1, s), (s, s - 1))
            }
            found = step_s(problem.schedule, problem.mesh, count, None, stages, links)
            assert found == graph.end_s(seconds)


@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_is_a_mean_of_paths(seed: int):
    """No longer than the longest path, for any seconds; near it where it was made, if cold."""
    rng = random.Random(seed)
    for problem in shapes_of(seed, most_blocks=5):
        graph = paths_of(problem.schedule, problem.mesh, problem.num_microbatches)

        def some(stages: int = problem.num_stages) -> list[list[float]]:
            return [[rng.random() for _ in range(stages)] for _ in range(8)]

        def length_s(path: Path, seconds: list[list[float]]) -> float:
            return sum(n * seconds[term][s] for (term, s), n in path.items())

        made = some()
        for heat_s in (1e-4, 0.1, 10.0):
            path = graph.mixture(made, heat_s)
            for seconds in (made, some(), some()):
                assert length_s(path, seconds) <= graph.end_s(seconds) * (1 + 1e-9)
        cold = graph.mixture(made, 1e-4)
        assert length_s(cold, made) == pytest.approx(graph.end_s(made), rel=1e-2)


def test_what_is_made_again_comes_on_top_of_the_floor():
    seen = 0
    for seed in range(8):
        for problem in shapes_of(seed, most_blocks=4):
            if problem.forms:
                continue
            # all of the chain's work half as much again: a floor that says so is exact
            more = replace(problem, blocks=tuple(with_more_work(b) for b in problem.blocks))
            plans = list(every_plan(replace(more, limit_bytes=1 << 50)))
            fastest = min(plans, key=lambda p: p.time_s)
            limit = (fastest.peak_bytes + min(p.peak_bytes for p in plans)) // 2
            best_s = min(p.time_s for p in plans if p.peak_bytes <= limit)
            least_s = sum(min(o.total_s for o in b.options) for b in problem.blocks)
            known = Floor(total_s=1.5 * least_s)
            found_s = PathBound(replace(problem, limit_bytes=limit), floor=known).least_s()
            roomy_s = PathBound(replace(problem, limit_bytes=1 << 50), floor=known).least_s()
            assert roomy_s * (1 - 1e-6) <= found_s <= best_s * (1 + 1e-9)
            seen += found_s > roomy_s * (1 + 1e-3)
    assert seen >= 5


def with_more_work(block: BlockMenu) -> BlockMenu:
    """A block with half as much work again, but for what is made again."""
    more_s = 0.5 * min(o.total_s for o in block.options)
    options = tuple(replace(o, backward_s=o.backward_s + more_s) for o in block.options)
    return replace(block, options=options)
