"""Which shapes are in the space that is searched."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.cluster import parse_devices
from autopar.errors import ConstraintError
from autopar.plan.types import ScheduleKind
from autopar.solver.analysis import Analysis
from autopar.solver.candidates import MAX_MICROBATCH_COUNTS, Shape, grid, neighbours, shapes
from autopar.solver.constraints import Constraints
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network

BATCH = 360  # of 24 divisors: more than are tried


@cache
def analysis(**given: object) -> Analysis:
    graph = residual_network(4, rows=BATCH, width=16, hidden=32)
    cluster = parse_devices("4:cpu")
    wish = Constraints(**given)  # type: ignore[arg-type]
    return Analysis(graph, cluster, AnalyticCostModel(cluster), wish, "adamw")


def counts(dp: int, **given: object) -> set[int]:
    return {s.num_microbatches for s in shapes(analysis(**given)) if s.mesh.dp == dp}


@pytest.mark.parametrize(("dp", "by_hand"), [(1, {360, 180, 90, 45}), (2, {180, 90, 45})])
def test_micro_batches_of_few_samples_are_always_tried(dp: int, by_hand: set[int]):
    found = counts(dp)
    assert by_hand <= found  # 1, 2, 4, 8 samples; 8 do not divide a rank's 180
    assert {1, BATCH // dp} <= found
    assert all(BATCH // dp % count == 0 for count in found)
    assert len(found) <= MAX_MICROBATCH_COUNTS + len(by_hand)


def test_a_number_that_the_user_fixes_is_the_only_one():
    assert counts(2, num_microbatches=12) == {12}
    shape = next(iter(shapes(analysis(num_microbatches=12))))
    assert not list(neighbours(analysis(num_microbatches=12), shape))


def test_beside_a_shape_are_the_next_divisors():
    shape = next(s for s in shapes(analysis()) if s.mesh.dp == 2 and s.num_microbatches == 45)
    beside = [s.num_microbatches for s in neighbours(analysis(), shape)]
    assert beside == [36, 60]  # of 180: 1 2 3 4 5 6 9 10 12 15 18 20 30 36 45 60 90 180


def test_what_people_set_up_by_hand_is_part_of_the_space():
    space = shapes(analysis())
    by_hand = list(grid(space, BATCH))
    assert by_hand
    assert set(by_hand) <= set(space)
    assert {BATCH // s.mesh.dp // s.num_microbatches for s in by_hand} == {1, 2, 4, 8}


def test_no_shape_comes_twice_and_each_uses_devices_that_are_there():
    space = shapes(analysis())
    assert len(set(space)) == len(space)
    assert all(s.mesh.num_ranks <= 4 for s in space)
    kinds = {s.schedule for s in space if s.mesh.pp > 1}
    assert kinds == {ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED, ScheduleKind.ZBV}


def test_a_shape_reads_as_people_say_it():
    shape = next(s for s in shapes(analysis(pp=2, tp=2, num_microbatches=8)) if s.mesh.virtual == 1)
    assert str(shape) == "pp2 x tp2, 8 micro-batches, 1f1b"
    deep = Shape(shape.mesh, 8, shape.schedule, warmup=(3, 1))
    assert str(deep).endswith("warm-up (3, 1)")


@pytest.mark.parametrize("devices", ["8:cpu + 6:cpu", "6:cpu + 8:cpu", "13:h100-sxm", "2x8:cpu"])
def test_groups_of_tensor_parallelism_stay_inside_machines(devices: str):
    cluster = parse_devices(devices)
    graph = residual_network(4, rows=BATCH, width=16, hidden=32)
    found = Analysis(graph, cluster, AnalyticCostModel(cluster), Constraints(), "adamw")
    first = cluster.machines[0].num_devices
    sizes = set()
    for shape in shapes(found):
        starts = range(0, shape.mesh.num_ranks, shape.mesh.tp)
        assert all(not s < first < s + shape.mesh.tp for s in starts), shape
        sizes.add(shape.mesh.tp)
    assert first in sizes  # a machine that is used alone may be one group


def test_machines_before_a_smaller_one_are_counted_alone():
    def used(devices: str) -> set[int]:
        cluster = parse_devices(devices)
        graph = residual_network(4, rows=8, width=16, hidden=32)
        found = Analysis(graph, cluster, AnalyticCostModel(cluster), Constraints(), "adamw")
        return {s.mesh.num_ranks for s in shapes(found)}

    assert {8, 4, 2, 1} <= used("13:h100-sxm")
    assert used("2x8:h100-sxm") == {16, 8, 4, 2, 1}


def degrees(devices: str, batch: int, **given: object) -> set[tuple[int, int, int]]:
    cluster = parse_devices(devices)
    graph = residual_network(20, rows=batch, width=16, hidden=32)
    wish = Constraints(**given)  # type: ignore[arg-type]
    found = Analysis(graph, cluster, AnalyticCostModel(cluster), wish, "adamw")
    return {(s.mesh.dp, s.mesh.tp, s.mesh.pp) for s in shapes(found)}


@pytest.mark.parametrize(
    ("devices", "batch"), [("31x2:cpu", 48), ("13:cpu", 16), ("23:cpu", 30), ("8x2:cpu", 64)]
)
def test_as_many_devices_work_as_the_batch_allows(devices: str, batch: int):
    total, machine = parse_devices(devices).num_devices, parse_devices(devices).machines[0]
    found = degrees(devices, batch)
    deepest = max(pp for *_, pp in found)
    for tp in [n for n in range(1, machine.num_devices + 1) if machine.num_devices % n == 0]:
        for doubling in range(deepest.bit_length()):
            depths = range(1 << doubling, min(2 << doubling, deepest + 1))
            every = [
                dp * tp * pp
                for pp in depths
                for dp in range(1, batch + 1)
                if batch % dp == 0 and dp * tp * pp <= total
            ]
            most = max(every, default=0)
            if 2 * most > total:
                assert most == max(d * t * p for d, t, p in found if t == tp and p in depths)


def test_meshes_with_idle_devices_are_no_more_than_one_for_a_doubling_of_stages():
    found = [(d, t, p) for d, t, p in degrees("31x2:cpu", 48) if d * t * p not in (62, 31, 15)]
    large = [(t, p.bit_length()) for d, t, p in found if 2 * d * t * p > 62]
    assert large
    assert len(set(large)) == len(large)
    assert all(48 % d == 0 for d, *_ in found)


def test_what_is_fixed_is_fixed_where_devices_idle():
    assert {(t, p) for _, t, p in degrees("13:cpu", 16, pp=3, tp=1)} == {(1, 3)}
    assert (4, 1, 3) in degrees("13:cpu", 16, pp=3, tp=1)
    assert {d for d, *_ in degrees("13:cpu", 16, dp=2)} == {2}
    assert all(d > 1 for d, *_ in degrees("13:cpu", 16, zero=3))


def test_a_schedule_of_several_ranks_says_so_where_there_is_one():
    with pytest.raises(ConstraintError, match="schedule=zbv on 2 pipeline ranks or more"):
        shapes(analysis(schedule=ScheduleKind.ZBV, tp=4))


def test_a_warm_up_has_no_more_forwards_than_micro_batches():
    found = shapes(analysis(pp=2, warmup=(9, 9), schedule=ScheduleKind.ONE_F_ONE_B))
    assert found
    assert min(s.num_microbatches for s in found) >= 9
    with pytest.raises(ConstraintError, match="361 forwards before the first backward"):
        shapes(analysis(pp=2, warmup=(361, 1), schedule=ScheduleKind.ONE_F_ONE_B))
    with pytest.raises(ConstraintError, match="constraints leave no plan: dp=any, tp=4, pp=2"):
        shapes(analysis(tp=4, pp=2, warmup=(9, 9), schedule=ScheduleKind.ONE_F_ONE_B))
