"""Odd clusters, batches and limits: a valid plan with idle devices named, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.cluster import Cluster, load_cluster, parse_devices
from autopar.errors import ConfigError, ConstraintError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.plan.check import check_plan
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints
from autopar.solver.planning import Planner
from autopar.solver.question import Asker
from autopar.solver.relax import solve_or_explain
from autopar.solver.search import solve
from autopar.units import parse_bytes
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network
from tests.questions import question

CLUSTERS = Path(__file__).resolve().parents[3] / "examples" / "clusters"
GPUS = "{}:h100-sxm"


def plan_for(graph: Graph, devices: str | Cluster, **given: object) -> Plan:
    plan, _ = solve_or_explain(Asker(question(graph, devices, **given)))
    check_plan(plan, parse_devices(devices))
    idle = plan.num_devices - plan.num_ranks
    told = [text for text in plan.assumptions if "stay idle" in text]
    assert len(told) == (idle > 0)
    if idle:
        assert told[0].startswith(f"{idle} of {plan.num_devices} devices stay idle")
    return plan


@pytest.mark.parametrize("devices", [0, "0:cpu", "0x8:h100-sxm", "4x0:h100-sxm", -1])
def test_a_cluster_without_devices_is_refused(devices: int | str):
    with pytest.raises(ConfigError, match="must be from 1 to"):
        parse_devices(devices)


def test_one_layer_on_64_devices():
    plan = plan_for(residual_network(1, rows=8, width=64, hidden=256), "8x8:h100-sxm")
    assert plan.num_devices == 64


@pytest.mark.parametrize("count", [7, 13])
def test_a_prime_number_of_devices(count: int):
    wide = residual_network(2, rows=64, width=1024, hidden=4096)
    assert plan_for(wide, GPUS.format(count)).num_devices == count


def test_a_number_that_nothing_divides_is_no_slower_than_the_whole_machines_in_it():
    wide = residual_network(1, rows=64, width=4096, hidden=16384)
    odd, even = plan_for(wide, GPUS.format(13)), plan_for(wide, GPUS.format(8))
    assert even.num_ranks == 8
    assert odd.time_s <= even.time_s
    assert odd.bound_s <= even.time_s


@pytest.mark.parametrize(("count", "tp", "used"), [(13, 7, 7), (16, 6, 12)])
def test_a_fixed_degree_that_divides_no_usual_count_leaves_devices_idle(count, tp, used):
    wide = residual_network(1, rows=8, width=7 * 48, hidden=7 * 96)
    plan = plan_for(wide, GPUS.format(count), tp=tp)
    assert plan.mesh.tp == tp
    assert plan.num_ranks <= used


def test_a_prime_number_of_devices_and_a_batch_that_it_divides():
    wide = residual_network(2, rows=14, width=4096, hidden=16384)
    assert plan_for(wide, GPUS.format(7)).num_ranks == 7


def test_a_batch_of_one():
    plan = plan_for(residual_network(2, rows=1, width=256, hidden=1024), GPUS.format(4))
    assert (plan.mesh.dp, plan.num_microbatches) == (1, 1)


@pytest.mark.parametrize("rows", [6, 7])
def test_a_batch_that_the_devices_do_not_divide(rows: int):
    plan = plan_for(residual_network(2, rows=rows, width=256, hidden=1024), GPUS.format(4))
    assert rows % (plan.mesh.dp * plan.num_microbatches) == 0


def test_a_batch_that_a_fixed_degree_does_not_divide_is_refused():
    with pytest.raises(ConstraintError, match=r"dp=4: does not divide the batch of 6; .*another"):
        plan_for(residual_network(2, rows=6), GPUS.format(4), dp=4)


def test_memory_below_one_layer():
    graph = residual_network(2, rows=8, width=64, hidden=256)  # a layer has 128 KiB of weights
    with pytest.raises(InfeasibleError) as caught:
        plan_for(graph, "1:cpu", limit=100 << 10)
    error = caught.value
    assert error.shortfalls[0].needed > error.shortfalls[0].available == 100 << 10
    (way,) = (w for w in error.relaxations if "no plan was found with" in w.what)
    enough = parse_bytes(" ".join(way.what.removeprefix("give each device ").split()[:2]))
    assert solve(
        graph, "hash", parse_devices("1:cpu"), constraints=Constraints(), optimizer="adamw",
        memory_limit_bytes=enough, cost_model=AnalyticCostModel(parse_devices("1:cpu")),
    )[0].peak_bytes <= enough  # fmt: skip


def test_a_clock_that_ran_out_leaves_a_plan_that_says_so():
    graph = residual_network(4, rows=64, width=256, hidden=1024)
    cluster = parse_devices("8:h100-sxm")
    plan, stats = solve(
        graph, "hash", cluster, constraints=Constraints(), optimizer="adamw",
        memory_limit_bytes=None, cost_model=AnalyticCostModel(cluster), time_limit_s=1e-9,
    )  # fmt: skip
    check_plan(plan, cluster)
    assert stats.stopped_by == "time"
    assert "the search was stopped by its limit of time" in plan.assumptions
    assert 0 < plan.bound_s <= plan.time_s


@pytest.mark.parametrize("devices", ["4:cpu", "8:h100-sxm", "6:t4"])
def test_a_plan_that_the_clock_cut_short_is_no_slower_than_those_that_need_no_search(devices: str):
    graph = residual_network(4, rows=12, width=32, hidden=64)  # little to gain from many devices
    cluster = parse_devices(devices)

    def step_s(time_limit_s: float | None = None, **given: int) -> float:
        wish = Constraints(**given)  # type: ignore[arg-type]
        return solve(
            graph, "hash", cluster, constraints=wish, optimizer="adamw", memory_limit_bytes=None,
            cost_model=AnalyticCostModel(cluster), time_limit_s=time_limit_s,
        )[0].time_s  # fmt: skip

    most = max(n for n in range(1, cluster.num_devices + 1) if 12 % n == 0)
    plain = [step_s(dp=n, tp=1, pp=1, num_microbatches=1) for n in (1, most)]
    assert step_s(time_limit_s=1e-9) <= min(plain) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dgx-h100-pod", "mixed-a100-h100", "two-sites"])
def test_example_clusters_are_planned_for(name: str):
    cluster = load_cluster(CLUSTERS / f"{name}.json")
    graph = residual_network(2, rows=16, width=1024, hidden=4096)
    asked = question(graph, cluster)
    planner = Planner(
        graph=graph,
        model_hash="hash",
        constraints=Constraints(),
        optimizer="adamw",
        prices=AnalyticCostModel,
        search=lambda *_: solve_or_explain(Asker(asked)),
    )
    plan, _ = planner.plan(cluster)
    check_plan(plan, cluster)
    assert plan.num_devices == cluster.num_devices
    assert any("cluster file" in text for text in (*plan.assumptions, *cluster.assumptions))
