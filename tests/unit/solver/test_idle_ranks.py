"""Ranks that share cores: a plan that leaves some idle costs what fewer of them cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster, parse_devices
from autopar.ir.graph import Graph
from autopar.plan.types import Plan
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints
from autopar.solver.planning import first_devices
from autopar.solver.resimulate import Resimulator
from autopar.solver.search import solve
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel
from cost_models.local import local_cluster
from cost_models.profile import Point, PointKind, Profile
from cost_models.profiled import ProfiledCostModel
from tests.joint_graphs import residual_network

K = PointKind
NUM_CORES = 2
COUNTS = (1, 2, 3, 4)
MATMULS = ((1, 8, 8, 8), (1, 64, 64, 64), (1, 64, 256, 256), (1, 256, 256, 256), (1, 512, 512, 512))
# Overhead decides, or arithmetic.
GRAPHS = {
    "small": residual_network(2),
    "wide": residual_network(2, rows=32, width=512, hidden=2048),
}


def profile() -> Profile:
    """Of a machine whose second rank slows the first one by a quarter."""
    points = [
        *[Point(K.LAUNCH, "float32", (), b * 2e-6, name="add", busy=b) for b in (1, 2)],
        *[
            Point(K.MATMUL, "float32", d, slower * (2e-6 + 2 * d[1] * d[2] * d[3] / 5e10), busy=b)
            for d in MATMULS
            for b, slower in ((1, 1.0), (2, 1.25))
        ],
        *[Point(K.STREAM, "float32", (n,), 2e-6 + n / 1e10, name="add") for n in (2**15, 2**25)],
        *[
            Point(K.ALL_REDUCE, "float32", (n, ranks), ranks * 1e-4 + n / 1e9, busy=ranks)
            for n in (10, 1000, 10**6)
            for ranks in (2, 4)
        ],
    ]
    return Profile(machine="m", date="d", num_cores=NUM_CORES, points=tuple(points))


def cluster_of(count: int) -> Cluster:
    cores = local_cluster().machines[0]
    here = Cluster(machines=(replace(cores, num_devices=NUM_CORES),))
    return parse_devices(count, local=here)


def prices_of(kind: str, cluster: Cluster) -> CostModel:
    if kind == "analytic":
        return AnalyticCostModel(cluster)
    return ProfiledCostModel(cluster, profile())


def planned(graph: Graph, kind: str, count: int, **wish: int) -> Plan:
    cluster = cluster_of(count)
    plan, _ = solve(
        graph,
        "hash",
        cluster,
        constraints=Constraints(**wish),  # type: ignore[arg-type]
        optimizer="adamw",
        memory_limit_bytes=None,
        cost_model=prices_of(kind, cluster),
    )
    return plan


@pytest.mark.parametrize("kind", ["analytic", "profiled"])
@pytest.mark.parametrize("name", GRAPHS)
def test_more_devices_are_never_slower_than_fewer_and_their_bound_is_not_above(
    name: str, kind: str
):
    found = [planned(GRAPHS[name], kind, count) for count in COUNTS]
    for at, plan in enumerate(found):
        for fewer in found[:at]:
            assert plan.time_s <= fewer.time_s * (1 + 1e-9), f"{plan.mesh} beside {fewer.mesh}"
            assert plan.bound_s <= fewer.time_s * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["analytic", "profiled"])
@pytest.mark.parametrize("wish", [{"dp": 1, "tp": 1, "pp": 1}, {"dp": 2, "tp": 1, "pp": 1}])
def test_a_plan_costs_the_same_whatever_number_of_ranks_is_idle(wish: dict[str, int], kind: str):
    graph = GRAPHS["wide"]
    used = wish["dp"]
    own = planned(graph, kind, used, **wish)
    for count in COUNTS[used:]:
        assert planned(graph, kind, count, **wish).time_s == pytest.approx(own.time_s)


@pytest.mark.parametrize("kind", ["analytic", "profiled"])
def test_a_plan_with_idle_ranks_is_priced_again_as_it_was(kind: str):
    graph, cluster = GRAPHS["wide"], cluster_of(4)
    plan = planned(graph, kind, 4, dp=2, tp=1, pp=1)
    known = Analysis(graph, cluster, prices_of(kind, cluster), Constraints(), "adamw")
    again = Resimulator.of(plan, known)
    figures = again.figures(again.analysis.cluster, again.analysis.model)
    assert figures.step_s == pytest.approx(plan.time_s)


def test_ranks_at_work_have_the_cores_of_those_that_wait():
    four = cluster_of(4)
    for count in COUNTS:
        part, own = four.at_work(count).machines[0], cluster_of(count).machines[0]
        assert part.num_devices == 4
        assert part.device.memory_bytes == four.memory_bytes
        rates = (part.device.peak_flops, part.device.launch_overhead_s, part.intra)
        assert rates == (own.device.peak_flops, own.device.launch_overhead_s, own.intra)
        first = first_devices(four, count).machines[0]
        assert (first.num_devices, first.num_at_work) == (count, count)
        assert first.device.peak_flops == own.device.peak_flops
    assert four.at_work(4) == four
    gpus = parse_devices("2x4:h100-sxm")
    assert gpus.at_work(3) == gpus


def test_prices_are_the_same_object_where_idle_ranks_take_nothing():
    gpus = AnalyticCostModel(parse_devices("8:h100-sxm"))
    assert gpus.at_work(1) is gpus
    two = AnalyticCostModel(cluster_of(2))
    assert two.at_work(1) is two
    four = AnalyticCostModel(cluster_of(4))
    assert four.at_work(4) is four
    assert four.at_work(2).device.peak_flops == two.device.peak_flops
