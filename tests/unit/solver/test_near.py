"""Which shapes near a plan are worked out, what their estimates leave out, and what is found."""

from __future__ import annotations

import math
import random
from itertools import accumulate, combinations, pairwise

import pytest

from autopar.cluster import Cluster, parse_devices
from autopar.plan.types import MeshShape, Plan, ScheduleKind
from autopar.solver.candidates import Shape
from autopar.solver.constraints import Constraints
from autopar.solver.near import near_answer, near_shapes
from autopar.solver.near_order import Tried, guess_s, least_longest_s, promising, siblings
from autopar.solver.schedule_choice import alive_of, flights, simulated_s
from autopar.solver.search import MeshSearch
from autopar.solver.stages_problem import BlockMenu, Option, StageProblem, left_beside_bytes
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network
from tests.stage_solutions import solution_of


def option(rng: random.Random) -> Option:
    sizes = [rng.randint(0, 20) for _ in range(3)]
    return Option(
        name="", forward_s=1.0, backward_s=2.0, saved_bytes=sizes[0], transient_bytes=sizes[1],
        left_bytes=sizes[2],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_a_backward_takes_what_is_left_beside_it(seed: int):
    """Against the bytes of each stage's backward, block by block."""
    rng = random.Random(seed)
    count, pp = rng.randint(2, 7), rng.randint(1, 2)
    menus = [BlockMenu(key=str(i), options=(option(rng),), state_bytes=0) for i in range(count)]
    starts = tuple(sorted(rng.sample(range(1, count), pp - 1)))
    problem = StageProblem(
        blocks=tuple(menus), boundary_s=(0.0,) * (count - 1), pp=pp, virtual=1, num_microbatches=1,
        schedule=ScheduleKind.ONE_F_ONE_B, in_flight=(1,) * pp, limit_bytes=1 << 30,
    )  # fmt: skip
    estimates = solution_of(problem, starts, (0,) * count).memory_bytes
    more = []
    for estimate, (low, high) in zip(estimates, pairwise((0, *starts, count)), strict=True):
        alive = sum(menus[i].options[0].saved_bytes for i in range(low, high))
        most = 0
        for i in reversed(range(low, high)):  # what it saved is there until its backward is done
            chosen = menus[i].options[0]
            most = max(most, alive + chosen.transient_bytes)
            alive += chosen.left_bytes - chosen.saved_bytes
        more.append(most - estimate)
    least, most = left_beside_bytes(problem, starts, (0,) * count)
    assert max(0, *more) == least <= most


@pytest.mark.parametrize("seed", range(30))
def test_the_longest_of_the_most_even_runs_is_that_of_all_cuts(seed: int):
    rng = random.Random(seed)
    times = [rng.choice([1.0, 1.0, 2.5, rng.random()]) for _ in range(rng.randint(1, 9))]
    sums, count = list(accumulate(times, initial=0.0)), len(times)
    for stages in range(1, count + 1):
        expected = min(
            max(sums[b] - sums[a] for a, b in pairwise((0, *starts, count)))
            for starts in combinations(range(1, count), stages - 1)
        )
        assert least_longest_s(sums, stages) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("pp", "virtual", "count"), [(1, 1, 4), (4, 1, 9), (3, 2, 9), (4, 4, 8)])
def test_a_guess_is_the_step_of_equal_stages(pp: int, virtual: int, count: int):
    mesh, stages = MeshShape(pp=pp, virtual=virtual), pp * virtual
    kind = ScheduleKind.ONE_F_ONE_B if virtual == 1 else ScheduleKind.INTERLEAVED
    menu = BlockMenu(
        key="", state_bytes=0,
        options=(Option(name="", forward_s=1.0, backward_s=2.0, saved_bytes=1, transient_bytes=0),),
    )  # fmt: skip
    problem = StageProblem(
        blocks=(menu,) * stages, boundary_s=(0.0,) * (stages - 1), pp=pp, virtual=virtual,
        num_microbatches=count, schedule=kind, in_flight=flights(kind, mesh, count),
        together=alive_of(kind, mesh, count), limit_bytes=1 << 30,
    )  # fmt: skip
    run_s = simulated_s(mesh, problem, solution_of(problem, range(1, stages), (0,) * stages))
    assert guess_s(Shape(mesh, count, kind), 3.0 * stages, 3.0) == pytest.approx(run_s)


def shape(pp: int, dp: int, virtual: int = 1) -> Shape:
    kind = ScheduleKind.ONE_F_ONE_B if virtual == 1 else ScheduleKind.INTERLEAVED
    return Shape(MeshShape(pp=pp, dp=dp, virtual=virtual), 16 // dp, kind)


def test_shapes_like_the_old_one_come_first_with_as_many_pipeline_ranks_as_do_no_harm():
    guesses = {
        shape(4, 4): 10.0, shape(5, 4): 10.01, shape(6, 4): 11.0, shape(5, 4, 2): 10.0,
        shape(8, 2): 9.0, shape(2, 8): 9.5,
    }  # fmt: skip
    order = list(promising(guesses, 3, 1.005))
    assert order == [shape(5, 4, 2), shape(5, 4), shape(8, 2), shape(2, 8)]
    assert next(promising(guesses, 3, math.inf)) == shape(6, 4)
    assert siblings(shape(5, 4), guesses) == [shape(4, 4), shape(6, 4)]
    assert siblings(None, guesses) == []


def test_orders_that_never_fit_are_left_out_and_the_plain_one_is_not():
    tried = Tried(best_s=10.0)
    for _ in range(3):
        assert not tried.is_vain(shape(4, 4, 2), 1.0)
        for virtual in (1, 2):
            tried.learn(shape(4, 4, virtual), 1.0, None, None)
    assert tried.num == 6
    assert tried.is_vain(shape(2, 8, 2), 1.0)
    assert not tried.is_vain(shape(2, 8), 1.0)


# -- searches --------------------------------------------------------------------------------------
NET = residual_network(6, rows=64, width=512, hidden=2048)


def search_on(cluster: Cluster, limit_bytes: int, wish: Constraints) -> MeshSearch:
    return MeshSearch(
        graph=NET, model_hash="", cluster=cluster, constraints=wish, optimizer="adamw",
        limit_bytes=limit_bytes, model=AnalyticCostModel(cluster),
    )  # fmt: skip


@pytest.mark.parametrize("limit_bytes", [1 << 40, 66_000_000])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_best_of_all_shapes_near_a_plan_is_found(pp: int, limit_bytes: int):
    wish = Constraints(pp=pp, tp=1)
    old: Plan = search_on(parse_devices("4x2:h100-sxm"), limit_bytes, wish).run()[0]
    cluster, free = parse_devices("3x2:h100-sxm"), Constraints(tp=1)
    search = search_on(cluster, limit_bytes, free)
    answer = near_answer(search, old)
    assert answer.stay is None or answer.stay.mesh.pp == pp
    every = search_on(cluster, limit_bytes, free)
    steps = []
    for one in near_shapes(every.prepare(), old):
        found = every.open(one, float("inf"))
        verdict = None if found is None else every.evaluated(found)
        if verdict is not None and verdict.fits:
            steps.append(verdict.step_s)
    assert answer.near_bound_s <= min(steps) * (1 + 1e-9)
    assert answer.plan.time_s <= min(steps) * 1.02
    assert max(s.memory.total_bytes for s in answer.plan.stages) <= limit_bytes
