"""Prices from a profile: measured, else fitted, else from data sheets, and they say which."""

from __future__ import annotations

import pytest

from autopar.cluster import parse_devices
from autopar.errors import ConfigError
from autopar.ir.graph import Ref, TensorMeta
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel, HostCosts
from cost_models.fit import MatmulCurve
from cost_models.local import local_cluster
from cost_models.measure_compute import FIRST_MATMULS
from cost_models.profile import Point, PointKind, Profile, op_key
from cost_models.profiled import ProfiledCostModel, Source

K = PointKind
CURVE = MatmulCurve(peak_flops=1e11, half_k=8.0, half_edge=2.0, launch_s=2e-6)
MM, EXP, ADD = "aten.mm.default", "aten.exp.default", "aten.add.Tensor"
REFS = (Ref("a"), Ref("b"))
EXP_WORK = (64 * 64 * 85, 2 * 64 * 64 * 4)  # FLOPs and bytes of 64 x 64 elements


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float32")


def link(kind: PointKind, ranks: int, busy: int, alpha_s: float = 1e-4) -> list[Point]:
    return [
        Point(kind, "float32", (n, ranks), alpha_s + n / 1e9, busy=busy) for n in (10, 1000, 10**6)
    ]


def profile(*more: Point) -> Profile:
    points = [
        Point(K.LAUNCH, "float32", (), 2e-6, name="add"),
        Point(K.LAUNCH, "float32", (), 1e-6, name="view"),
        *[Point(K.MATMUL, "float32", d, CURVE.time_s(d)) for d in FIRST_MATMULS],
        *[Point(K.STREAM, "float32", (n,), 2e-6 + n / 1e10, name="add") for n in (2**15, 2**25)],
        Point(K.OP, "float32", EXP_WORK, 7e-5, name=op_key(EXP, REFS[:1], [meta(64, 64)])),
        *link(K.ALL_REDUCE, 2, 2),
        *more,
    ]
    return Profile(machine="m", date="d", num_cores=2, points=tuple(points))


def model(ranks: int, *more: Point) -> ProfiledCostModel:
    found = profile(*more)
    return ProfiledCostModel(parse_devices(ranks, local=local_cluster(found)), found)


def test_an_operator_that_was_measured_costs_what_it_cost():
    price = model(1).op_price(EXP, REFS[:1], [meta(64, 64)], meta(64, 64))
    assert (price.time_s, price.source) == (7e-5, Source.MEASURED)


def test_the_same_operator_at_another_shape_is_fitted():
    price = model(1).op_price(EXP, REFS[:1], [meta(128, 64)], meta(128, 64))
    assert price.source is Source.FITTED
    assert price.time_s == pytest.approx(14e-5)


def test_matmuls_follow_their_curve_and_passes_the_bandwidth():
    priced = model(1).op_price(MM, REFS, [meta(300, 500), meta(500, 200)], meta(300, 200))
    assert priced.time_s == pytest.approx(CURVE.time_s((1, 300, 200, 500)))
    priced = model(1).op_price(ADD, REFS, [meta(2**10, 2**10)] * 2, meta(2**10, 2**10))
    assert priced.source is Source.FITTED
    assert priced.time_s == pytest.approx(2e-6 + 3 * 2**22 / 1e10)


def test_what_no_point_tells_is_priced_by_data_sheets_and_says_so():
    both = [meta(4, 8, 10, 10), meta(8, 8, 3, 3)]
    args = (*REFS, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    price = model(1).op_price("aten.convolution.default", args, both, meta(4, 8, 10, 10))
    assert price.source is Source.DATA_SHEET
    assert price.time_s > 0


def test_views_cost_a_call_and_picking_a_result_nothing():
    found = model(1, Point(K.STEP, "float32", (1,), 5e-7, name="executor"))
    view = found.op_price("aten.transpose.int", (Ref("a"), 0, 1), [meta(4, 8)], meta(8, 4))
    assert view.time_s == pytest.approx(1.5e-6)
    pick = found.op_price("getitem", (Ref("a"), 0), [(meta(4),)], meta(4))
    assert (pick.time_s, pick.source) == (5e-7, Source.FREE)


def test_what_an_operator_costs_beside_itself_is_told_by_all_programs_together():
    programs = [
        Point(K.STEP, "float32", (n,), t, name="executor", busy=b)
        for n, t, b in ((10, 9e-6, 1), (90, 1e-6, 1), (100, 4e-6, 2))
    ]
    pick = ("getitem", (Ref("a"), 0), [(meta(4),)], meta(4))
    assert model(1, *programs).op_time_s(*pick) == pytest.approx(1.8e-6)
    assert model(2, *programs).op_time_s(*pick) == pytest.approx(4e-6)
    # not measured: four ranks on two cores
    assert model(4, *programs).op_time_s(*pick) == pytest.approx(8e-6)


def test_sums_and_waits_cost_what_was_measured_with_as_many_busy_ranks():
    assert model(2).accumulate_time_s(3, 100) == 0.0
    assert model(2).waiting_s(2, 3, 1.0) == 0.0
    sums = [
        Point(K.ACCUMULATE, "float32", (n, b), n * 2e-6 + b * 1e-10, busy=2)
        for n, b in ((16, 2**24), (100, 2**20))
    ]
    lockstep = [
        Point(K.LOCKSTEP, "float32", (n, ranks), t, name=name, busy=4)
        for n in (1, 12)
        for ranks, share in ((2, 0.0), (4, 0.1))
        for name, t in (
            ("compute", n * 1e-3), ("comm", 2e-4), ("round", n * 1e-3 * (1 + share) + 2.5e-4)
        )
    ]  # fmt: skip
    found = model(4, *sums, *lockstep)
    assert model(2, *sums).accumulate_time_s(10, 1e6) == pytest.approx(12e-5)
    assert found.accumulate_time_s(10, 1e6) == pytest.approx(24e-5)  # on half the cores
    assert found.waiting_s(2, 3, 1.0) == pytest.approx(3 * 5e-5)
    assert found.waiting_s(4, 3, 1.0) == pytest.approx(3 * 5e-5 + 0.1)
    assert found.waiting_s(8, 3, 1.0) == 0.0
    assert found.fits.parameters()["waiting of 4 ranks 4 busy share"] == pytest.approx(0.1)


def test_ranks_that_share_cores_are_slowed_down_as_measured():
    dims = FIRST_MATMULS[0]
    slow = Point(K.MATMUL, "float32", dims, 2.4 * CURVE.time_s(dims), busy=4)
    args = (MM, REFS, [meta(300, 500), meta(500, 200)], meta(300, 200))
    alone_s = model(1).op_time_s(*args)
    assert model(4, slow).op_time_s(*args) == pytest.approx(2.4 * alone_s)
    # not measured: four ranks on two cores, evenly
    assert model(4).op_time_s(*args) == pytest.approx(2 * alone_s)
    assert model(2).op_time_s(*args) == pytest.approx(alone_s)


def test_a_measurement_of_busy_ranks_is_preferred_and_scaled():
    name = op_key(EXP, REFS[:1], [meta(64, 64)])
    both = Point(K.OP, "float32", EXP_WORK, 9e-5, name=name, busy=2)
    args = (EXP, REFS[:1], [meta(64, 64)], meta(64, 64))
    assert model(1, both).op_time_s(*args) == 7e-5
    assert model(2, both).op_time_s(*args) == 9e-5
    assert model(4, both).op_time_s(*args) == pytest.approx(18e-5)


def test_collectives_are_measured_or_fitted_by_kind_and_group():
    found = model(4, *link(K.ALL_REDUCE, 2, 4, 3e-4), *link(K.P2P, 2, 4, 2e-4))
    exact = found.collective_price("all_reduce", 1000, (0, 1))
    assert exact.source is Source.MEASURED
    assert exact.time_s == pytest.approx(3e-4 + 1e-6)
    between = found.collective_price("all_reduce", 5000, (0, 1))
    assert between.source is Source.FITTED
    assert between.time_s == pytest.approx(3e-4 + 5e-6)
    # with two ranks busy it was faster
    assert model(2).collective_time_s("all_reduce", 5000, (0, 1)) == pytest.approx(1e-4 + 5e-6)
    assert found.collective_time_s("p2p", 5000, (1, 3)) == pytest.approx(2e-4 + 5e-6)


def test_a_group_that_was_not_measured_is_priced_by_the_link():
    found = model(4)
    price = found.collective_price("all_gather", 5000, (0, 1, 2, 3))
    assert price.source is Source.DATA_SHEET
    wanted = AnalyticCostModel(found.cluster).collective_time_s("all_gather", 5000, (0, 1, 2, 3))
    assert price.time_s == wanted
    assert found.collective_price("all_reduce", 5000, (0,)).source is Source.FREE
    with pytest.raises(ConfigError, match="payload is -1"):
        found.collective_time_s("all_reduce", -1, (0, 1))


def test_optimizer_and_calls_cost_what_was_measured():
    assert model(1).optimizer_time_s("adamw", 3, 100) is None
    assert model(1).call_time_s(3) == 0.0
    sizes = ((8, 2**17), (8, 2**23))
    adamw = [
        Point(K.OPTIMIZER, "float32", (n, b), n * 4e-5 + b * 1e-9, name="adamw") for n, b in sizes
    ]
    call = [
        Point(K.STEP, "float32", (1,), 1e-3, name="call"),
        Point(K.STEP, "float32", (1,), 1e-5, name="parameter"),
    ]
    found = model(1, *adamw, *call)
    assert found.optimizer_time_s("adamw", 10, 1e6) == pytest.approx(14e-4)
    assert found.optimizer_time_s("sgd", 10, 1e6) is None
    assert found.call_time_s(50) == pytest.approx(1.5e-3)


@pytest.mark.parametrize(
    ("busy_s", "comm_s", "wanted"),
    [
        # all ranks compute all the time: nothing to gain
        ((8.0,) * 4, 0.0, 8.0),
        # one at a time: each has a core of its own
        ((2.0,) * 4, 0.0, 4.0),
        # between: the work of all is what takes longest
        ((6.0,) * 4, 0.0, 6.0),
        # waiting for messages needs no core
        ((4.0,) * 4, 4.0, 8.0),
    ],
)
def test_a_step_on_shared_cores_takes_no_less_than_its_path_and_its_work(busy_s, comm_s, wanted):
    assert model(4).shared_step_s(8.0, busy_s, comm_s) == pytest.approx(wanted)
    assert model(2).shared_step_s(8.0, busy_s[:2], comm_s) == 8.0


def test_a_profile_of_another_kind_of_device_is_refused():
    with pytest.raises(ConfigError, match=r"is of device 'cpu', the cluster 2:h100-sxm has cuda"):
        ProfiledCostModel(parse_devices("2:h100-sxm"), profile())


def test_it_is_a_cost_model_and_says_where_prices_come_from():
    found: CostModel = model(2)
    assert isinstance(found, HostCosts)
    assert not isinstance(AnalyticCostModel(parse_devices("2:cpu")), HostCosts)
    assert found.source == (
        "profile of m on d, torch unknown: 12 points, 1 operators with their shapes; the rest "
        "fitted"
    )
