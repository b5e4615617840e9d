"""Which order the solver takes: zero bubble or a deeper warm-up where they win and fit."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from autopar.errors import ConfigError, ConstraintError
from autopar.plan.check import check_plan
from autopar.plan.orders import order_of, plain_warmup
from autopar.plan.schedule import in_flight
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.solver.constraints import Constraints
from autopar.solver.force import ProportionalCostModel, forced_plan
from autopar.solver.order_times import flights_of
from autopar.solver.pipeline_bound import PipelineBound
from autopar.solver.schedule_choice import (
    alive_of,
    best_order,
    deeper_warmup,
    flights,
    simulated_s,
)
from autopar.solver.stages_problem import (
    BlockMenu,
    Option,
    StageProblem,
)
from autopar.units import MIB
from tests.joint_graphs import residual_network
from tests.stage_solutions import solution_of
from tests.unit.solver.test_search import plan_for

PLAIN, H1, ZBV = ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE, ScheduleKind.ZBV
PP, COUNT = 4, 8
MESH = MeshShape(pp=PP)
WIDE = residual_network(8, rows=64, width=256, hidden=1024)


def chain(seconds, weight_s, message_s, *, limit=1 << 40, mesh=MESH, count=COUNT, kind=PLAIN):
    """A block per stage: forward, twice that backward of which ``weight_s`` is for weights."""
    blocks = tuple(
        BlockMenu(
            key=f"{s}",
            options=(
                Option(
                    name="none", forward_s=s, backward_s=2 * s, saved_bytes=MIB,
                    transient_bytes=0, weight_s=weight_s * s, held_bytes=MIB,
                ),
            ),
            state_bytes=0,
        )
        for s in seconds
    )  # fmt: skip
    return StageProblem(
        blocks=blocks,
        boundary_s=(message_s,) * (len(blocks) - 1),
        pp=mesh.pp,
        virtual=mesh.virtual,
        num_microbatches=count,
        schedule=kind,
        in_flight=flights(kind, mesh, count),
        limit_bytes=limit,
        placement=mesh.placement,
    )


def cut(problem, starts):
    return solution_of(problem, starts, (0,) * len(problem.blocks))


def chosen(problem, **wish):
    found = best_order(PLAIN, None, MESH, problem, cut(problem, (1, 2, 3)), Constraints(**wish))
    return found.schedule, found.warmup


def test_zero_bubble_is_taken_where_weights_fill_the_bubble():
    problem = chain([1.0] * PP, 1.0, 0.0)
    found = best_order(PLAIN, None, MESH, problem, cut(problem, (1, 2, 3)), Constraints())
    assert (found.schedule, found.warmup) == (H1, None)
    # M (F + I + W) + (p - 1) (F + I - W) and the first stage's backward in one: nothing waits
    assert found.time_s == pytest.approx(8 * 3 + 3 * 1)
    assert found.memory_bytes == (4 * MIB,) * 4


def test_zero_bubble_is_not_taken_where_its_micro_batches_do_not_fit():
    # zero bubble holds four on every rank; plain 1F1B four on the first one only
    problem = chain([1.0] * PP, 1.0, 0.0, limit=4 * MIB)
    heavy = Option(
        name="none", forward_s=1.0, backward_s=2.0, saved_bytes=2 * MIB, transient_bytes=0,
        weight_s=1.0, held_bytes=2 * MIB,
    )  # fmt: skip
    blocks = (*problem.blocks[:-1], BlockMenu(key="heavy", options=(heavy,), state_bytes=0))
    tight = StageProblem(
        **{n: getattr(problem, n) for n in StageProblem.__slots__ if n != "blocks"}, blocks=blocks
    )
    assert chosen(tight) == (PLAIN, None)


def test_weights_that_take_no_time_apart_leave_plain_1f1b():
    assert chosen(chain([1.0] * PP, 0.0, 0.0)) == (PLAIN, None)


def test_a_deeper_warm_up_is_taken_where_messages_tax_every_micro_batch():
    problem = chain([1.0] * PP, 1.0, 0.5)
    assert chosen(problem, schedule=PLAIN) == (PLAIN, (7, 5, 3, 1))
    assert chosen(chain([1.0] * PP, 1.0, 0.0), schedule=PLAIN) == (PLAIN, None)


@pytest.mark.parametrize(
    ("limit", "depths"),
    [(7, (7, 5, 3, 1)), (6, (6, 5, 3, 1)), (5, (5, 5, 3, 1)), (4, (4, 4, 3, 1)), (3, (3, 3, 3, 1))],
)
def test_the_warm_up_goes_as_deep_as_memory(limit, depths):
    problem = chain([1.0] * PP, 1.0, 0.5, limit=limit * MIB)
    found = deeper_warmup(MESH, problem, cut(problem, (1, 2, 3)))
    if limit < PP:  # plain 1F1B does not fit either
        return
    assert found == depths
    order = order_of(PLAIN, MESH, COUNT, found)
    assert [in_flight(order, s) for s in range(PP)] == list(found)


def test_no_warm_up_is_deeper_than_the_micro_batches():
    problem = chain([1.0] * PP, 1.0, 0.5, count=3)
    assert deeper_warmup(MESH, problem, cut(problem, (1, 2, 3))) == (3, 3, 3, 1)
    assert (
        deeper_warmup(MESH, chain([1.0] * PP, 1.0, 0.5, count=1), cut(problem, (1, 2, 3))) is None
    )


def test_what_the_user_fixed_stays():
    problem = chain([1.0] * PP, 1.0, 0.5)
    own = (5, 4, 2, 1)
    wish = Constraints(pp=PP, warmup=own)
    found = best_order(PLAIN, own, MESH, problem, cut(problem, (1, 2, 3)), wish)
    assert (found.schedule, found.warmup) == (PLAIN, own)
    found = best_order(H1, None, MESH, problem, cut(problem, (1, 2, 3)), Constraints(schedule=H1))
    assert found.schedule is H1


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_any_cut_is_faster_than_the_bound(seed):
    rng = random.Random(seed)
    count, pp = rng.choice([1, 2, 3, 7]), rng.choice([2, 3])
    seconds = [rng.uniform(0.2, 2.0) for _ in range(6)]
    weight, message_s = rng.uniform(0, 2), rng.choice([0.0, 0.3])
    mesh = MeshShape(pp=pp)
    plain = chain(seconds, weight, message_s, mesh=mesh, count=count)
    halves_s = PipelineBound(plain, splits_backward=True).least_s()
    whole_s = PipelineBound(plain).least_s()
    cycles_s = PipelineBound(plain, has_cycles=True).least_s()
    assert halves_s <= whole_s * 1.001 <= cycles_s * 1.002  # bisections end a little early
    deep = tuple(2 * w for w in plain_warmup(pp))
    for starts in combinations(range(1, 6), pp - 1):
        for kind, warmup, bound_s in (
            (PLAIN, None, cycles_s), (PLAIN, deep, whole_s), (H1, None, halves_s)
        ):  # fmt: skip
            problem = chain(seconds, weight, message_s, mesh=mesh, count=count, kind=kind)
            time_s = simulated_s(mesh, problem, cut(problem, starts), warmup)
            assert time_s >= bound_s * (1 - 1e-9)
    v = MeshShape(pp=pp, virtual=2, placement=StagePlacement.V)
    if v.num_stages > 5:
        return
    for starts in combinations(range(1, 6), v.num_stages - 1):
        problem = chain(seconds, weight, message_s, mesh=v, count=count, kind=ZBV)
        time_s = simulated_s(v, problem, cut(problem, starts))
        least_s = PipelineBound(problem, splits_backward=True).least_s()
        assert time_s >= least_s * (1 - 1e-9)


@pytest.fixture(scope="module")
def open_plan():
    degrees = {"dp": 1, "tp": 1, "pp": 4, "num_microbatches": 8, "recompute": "none"}
    plan, _ = plan_for(WIDE, "4:cpu", model=ProportionalCostModel(), **degrees)
    return plan, degrees


def test_the_search_takes_split_backwards_and_its_bound_holds_for_every_schedule(open_plan):
    plan, degrees = open_plan
    assert plan.schedule.splits_backward
    for kind in (ScheduleKind.GPIPE, PLAIN, ScheduleKind.INTERLEAVED, H1, ZBV):
        more = {"virtual": 2} if kind is ScheduleKind.INTERLEAVED else {}
        forced, _ = plan_for(
            WIDE, "4:cpu", model=ProportionalCostModel(), **degrees, **more, schedule=kind
        )
        assert forced.schedule is kind
        assert plan.bound_s <= forced.time_s
        assert forced.bound_s <= forced.time_s
        if kind is not ScheduleKind.GPIPE:  # that is never faster, and only taken if it must be
            assert plan.time_s <= forced.time_s * (1 + 1e-6)


def test_memory_forbids_split_backwards(open_plan):
    _, degrees = open_plan
    plain = forced_plan(WIDE, "hash", **degrees)
    assert plain.schedule is PLAIN
    free, tight = (
        plan_for(WIDE, "4:cpu", limit=limit, model=ProportionalCostModel(), virtual=1, **degrees)[0]
        for limit in (None, plain.peak_bytes)
    )
    assert free.schedule is H1
    assert tight.schedule is PLAIN
    assert tight.peak_bytes <= plain.peak_bytes < free.peak_bytes
    assert free.time_s < tight.time_s <= plain.time_s * (1 + 1e-6)


def test_several_stages_per_rank_are_planned_on_two_ranks_or_more():
    plan, _ = plan_for(residual_network(4, rows=8), "4:h100-sxm", virtual=2)
    assert plan.mesh.pp >= 2
    with pytest.raises(ConstraintError, match="virtual=2 on 2 pipeline ranks or more on 1 devices"):
        plan_for(residual_network(4), "1:h100-sxm", virtual=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": ZBV, "virtual": 4}, "schedule='zbv' and virtual=4: it has 2 stages per"),
        ({"schedule": ZBV, "pp": 1}, "schedule='zbv' and pp=1: its V goes down and up"),
        ({"virtual": 2, "pp": 1}, "virtual=2 and pp=1: stages .* are one stage; raise pp"),
        ({"schedule": H1, "virtual": 2}, "it has one stage per pipeline rank; use schedule='zbv'"),
        ({"warmup": (3, 1), "pp": 3}, r"warmup=\(3, 1\) and pp=3: 2 depths for 3 pipeline ranks"),
        ({"warmup": (3, 1), "virtual": 2}, "depths are for 1F1B with one stage per pipeline rank"),
        ({"warmup": (1, 2)}, "must not increase along the pipeline; .* is plain 1F1B"),
        ({"warmup": (3, 1), "schedule": H1}, "goes with schedule '1f1b', not 'zero_bubble'"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(given, message):
    with pytest.raises(ConstraintError, match=message):
        Constraints(**given)


def test_an_order_that_a_mesh_cannot_have_is_refused():
    with pytest.raises(ConfigError, match="in a V, the mesh has 1 placed as 'loop'"):
        order_of(ZBV, MESH, 2)


class SlowMessages(ProportionalCostModel):
    """Messages between stages that take about half a forward."""

    def collective_time_s(self, kind, payload_bytes, ranks):
        time_s = super().collective_time_s(kind, payload_bytes, ranks)
        return 400 * time_s if kind == "p2p" else time_s


def test_the_search_warms_up_deeper_where_messages_are_slow(open_plan):
    _, degrees = open_plan
    given = {**degrees, "virtual": 1, "schedule": PLAIN}
    plan, _ = plan_for(WIDE, "4:cpu", model=SlowMessages(), **given)
    plain, _ = plan_for(WIDE, "4:cpu", model=SlowMessages(), **given, warmup=plain_warmup(4))
    assert plain.warmup is None
    assert plan.warmup == (7, 5, 3, 1)
    assert plan.time_s < 0.95 * plain.time_s
    assert plan.peak_bytes > plain.peak_bytes
    assert plan.bound_s <= plan.time_s
    assert plain.bound_s <= plain.time_s
    check_plan(plan)
    assert [s.num_in_flight for s in plan.stages] == [7, 5, 3, 1]
    tight, _ = plan_for(
        WIDE, "4:cpu", model=SlowMessages(), limit=plain.peak_bytes + 100_000, **given
    )
    assert tight.peak_bytes <= plain.peak_bytes + 100_000
    assert tight.warmup is None or tight.warmup < plan.warmup


@pytest.mark.parametrize("kind", [PLAIN, H1, ZBV])
def test_what_is_in_flight_in_a_few_rounds_is_so_in_all(kind: ScheduleKind):
    rng = random.Random(f"{kind}")
    for pp in range(1, 8):
        v_shape = MeshShape(pp=pp, virtual=2, placement=StagePlacement.V)
        mesh = v_shape if kind is ZBV else MeshShape(pp=pp)
        for count in range(1, 60):
            depths = [None]
            if kind is PLAIN:
                deep = sorted((rng.randint(1, 3 * pp) for _ in range(pp)), reverse=True)
                depths.append(tuple(deep))
            for warmup in depths:
                found = flights(kind, mesh, count, warmup), alive_of(kind, mesh, count, warmup)
                assert found == flights_of(kind, mesh, count, warmup)
