"""The whole search, on hand-made graphs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from autopar.cluster import Cluster, Link, LinkKind, parse_devices
from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.graph import Graph, InputKind
from autopar.plan.check import check_plan
from autopar.plan.decisions import decisions_of
from autopar.plan.io import plan_from_json, plan_hash, plan_to_json
from autopar.plan.time_terms import plan_terms
from autopar.plan.types import Plan, ScheduleKind
from autopar.report.text import render_plan
from autopar.sharding.build import localize, signatures_of
from autopar.solver.candidates import device_counts
from autopar.solver.constraints import Constraints
from autopar.solver.force import ProportionalCostModel, forced_plan
from autopar.solver.search import solve
from autopar.solver.search_stats import SearchStats
from autopar.units import parse_bytes
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel
from tests.joint_graphs import residual_network

WIDE = residual_network(4, rows=64, width=256, hidden=1024)
SHORT = residual_network(2, rows=8, width=64, hidden=256)


def plan_for(
    graph: Graph,
    devices: str | Cluster,
    *,
    limit: int | None = None,
    model: CostModel | None = None,
    **given: object,
) -> tuple[Plan, SearchStats]:
    cluster = parse_devices(devices)
    return solve(
        graph,
        "hash",
        cluster,
        constraints=Constraints(**given),  # type: ignore[arg-type]
        optimizer="adamw",
        memory_limit_bytes=limit,
        cost_model=model or AnalyticCostModel(cluster),
    )


@cache
def wide_plan() -> tuple[Plan, SearchStats]:
    """The answer that several tests look at."""
    return plan_for(WIDE, "4:cpu", model=ProportionalCostModel())


def test_the_plan_is_complete_and_its_numbers_agree():
    plan, stats = wide_plan()
    check_plan(plan)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan.mesh.num_ranks == 4
    assert 0 < plan.bound_s <= plan.time_s
    assert plan.peak_bytes <= plan.memory_limit_bytes
    elements = sum(i.meta.numel for i in WIDE.of_kind(InputKind.PARAM) if i.meta is not None)
    assert sum(s.parameters for s in plan.stages) == elements
    assert stats.num_shapes >= stats.num_ranked > 0
    localize(WIDE, decisions_of(plan, WIDE), signatures_of(WIDE))


def test_planning_is_deterministic():
    again, _ = plan_for(WIDE, "4:cpu", model=ProportionalCostModel())
    assert plan_hash(again) == plan_hash(wide_plan()[0])


def test_runners_up_say_why_they_lost():
    plan, _ = wide_plan()
    assert plan.runners_up
    assert all("against" in c.reason or "limit" in c.reason for c in plan.runners_up)
    simulated = [c.time_s for c in plan.runners_up if c.reason.startswith("simulated")]
    assert all(t >= plan.time_s for t in simulated)


def test_each_runner_up_pinned_is_no_faster_than_the_plan():
    plan, _ = wide_plan()
    for lost in plan.runners_up[:3]:
        pinned, _ = plan_for(
            WIDE,
            "4:cpu",
            model=ProportionalCostModel(),
            dp=lost.mesh.dp,
            tp=lost.mesh.tp,
            pp=lost.mesh.pp,
            virtual=lost.mesh.virtual,
            num_microbatches=lost.num_microbatches,
        )
        assert pinned.time_s >= plan.time_s * (1 - 1e-9)


def test_a_model_that_is_too_small_leaves_devices_idle_and_says_so():
    slow = parse_devices("4:cpu")
    machine = replace(
        slow.machines[0],
        intra=Link(kind=LinkKind.OTHER, latency_s=0.1, bandwidth_bytes_per_s=1e6),
    )
    plan, _ = plan_for(residual_network(2), replace(slow, machines=(machine,)))
    assert plan.mesh.num_ranks == 1
    assert any("3 of 4 devices stay idle" in text for text in plan.assumptions)


@pytest.mark.parametrize("given", [{"dp": 2}, {"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4, "zero": 3}])
def test_with_one_stage_no_rank_waits_and_all_that_ranks_exchange_is_named(given: dict[str, int]):
    plan, _ = plan_for(WIDE, "4:cpu", **{"dp": 1, "tp": 1, "pp": 1, **given})
    time, terms = plan.stages[0].time, plan_terms(plan)
    assert terms is not None
    assert terms.waiting_s == pytest.approx(0, abs=1e-9 * plan.time_s)
    assert terms.total_s == pytest.approx(plan.time_s)
    sums_losses = plan.mesh.dp > 1
    assert (time.sync_s > 0) == sums_losses
    told = [t.time_s for t in plan.stages[0].collectives if t.where == "once per step"]
    assert time.reduce_s + time.unshard_s + time.sync_s >= sum(told) * (1 - 1e-9)
    assert ("sync" in render_plan(plan)) == sums_losses


def test_a_batch_of_one_is_not_split():
    plan, _ = plan_for(residual_network(2, rows=1, width=64, hidden=256), "4:cpu")
    assert plan.mesh.dp == 1
    assert plan.num_microbatches == 1


def test_every_degree_that_the_user_fixes_is_kept():
    plan, _ = plan_for(
        WIDE, "8:cpu", dp=2, tp=2, pp=2, num_microbatches=4, schedule=ScheduleKind.GPIPE, zero=1
    )
    assert (plan.mesh.dp, plan.mesh.tp, plan.mesh.pp) == (2, 2, 2)
    assert (plan.num_microbatches, plan.schedule) == (4, ScheduleKind.GPIPE)
    assert {s.zero_level for s in plan.stages} == {1}
    names = {c.name for c in plan.constraints if c.origin == "user"}
    assert names == {"dp", "tp", "pp", "num_microbatches", "schedule", "zero"}


@cache
def free_of_zero() -> tuple[Plan, SearchStats]:
    return plan_for(SHORT, "4:cpu", tp=2)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_zero_level_brings_data_ranks(zero: int):
    free, _ = free_of_zero()
    assert free.mesh.dp == 1
    plan, _ = plan_for(SHORT, "4:cpu", tp=2, zero=zero)
    assert plan.mesh.dp == 2
    assert {s.zero_level for s in plan.stages} == {zero}


def test_a_zero_level_for_a_batch_that_is_not_split_is_refused():
    with pytest.raises(ConstraintError, match=r"zero=3: .* the batch can't be cut into 2 .* zero"):
        plan_for(residual_network(2, rows=3), "2:cpu", zero=3)


def test_fixed_degrees_may_leave_devices_idle():
    plan, _ = plan_for(WIDE, "8:cpu", dp=2, tp=1, pp=1)
    assert plan.mesh.num_ranks == 2
    assert any("6 of 8 devices stay idle" in text for text in plan.assumptions)


def test_a_pinned_parameter_is_where_the_user_wants_it():
    plan, _ = plan_for(WIDE, "2:cpu", tp=2, dp=1, pp=1, placements={"layers.*.up": "S(0)"})
    assert {plan.splits["tp"][f"layers__{i}__up"] for i in range(4)} == {"S(0)"}
    pinned = next(c for c in plan.constraints if c.name == "placements")
    assert (pinned.origin, pinned.value) == ("user", "layers.*.up: S(0)")
    assert pinned.effect.startswith("4 parameters: layers.0.up")


def test_boundaries_begin_stages():
    plan, _ = plan_for(WIDE, "2:cpu", boundaries=("layers.3",))
    assert [s.first for s in plan.stages] == ["h0", "a3"]


def test_recompute_by_module():
    plan, _ = plan_for(
        WIDE, "1:cpu", recompute={"layers.0": "full", "layers.2": "full", "*": "none"}
    )
    assert {"a0", "r0", "b0", "a2", "r2", "b2"} <= set(plan.stages[0].recompute)
    assert not {"a1", "a3"} & set(plan.stages[0].recompute)


def test_a_batch_that_the_constraint_does_not_divide():
    with pytest.raises(ConstraintError, match=r"num_microbatches=3: 3 does not divide the batch"):
        plan_for(WIDE, "2:cpu", num_microbatches=3)
    with pytest.raises(ConstraintError, match=r"dp=3: does not divide the batch of 64"):
        plan_for(WIDE, "4:cpu", dp=3)


def test_nothing_fits_names_limit_numbers_and_remedy():
    with pytest.raises(InfeasibleError, match=r"no plan fits 2:cpu") as caught:
        plan_for(WIDE, "2:cpu", limit=1 << 20)
    shortfall = caught.value.shortfalls[0]
    assert shortfall.needed > shortfall.available == 1 << 20
    assert str(shortfall).count("MiB") == 3, "one unit"


@pytest.mark.parametrize(("devices", "limit"), [("1:cpu", 1 << 20), ("2:cpu", 3 << 20)])
def test_the_memory_that_a_refusal_asks_for_is_enough(devices: str, limit: int):
    with pytest.raises(InfeasibleError) as caught:
        plan_for(WIDE, devices, limit=limit)
    found = re.search(r"a plan fits ([\d.]+ MiB) per device", caught.value.shortfalls[0].remedy)
    assert found is not None
    enough = parse_bytes(found[1])
    assert enough > limit
    plan, _ = plan_for(WIDE, devices, limit=enough)
    assert plan.peak_bytes <= enough


def test_a_forbidden_recompute_is_the_first_remedy():
    with pytest.raises(InfeasibleError, match=r"allow recompute \(now 'none'\)"):
        plan_for(WIDE, "2:cpu", limit=1 << 20, recompute="none")


def test_less_memory_never_makes_a_faster_plan():
    graph = residual_network(4, rows=2048, width=64, hidden=256)  # activations, hardly weights
    times, limit = [], None
    for _ in range(3):
        plan, _ = plan_for(graph, "4:cpu", limit=limit, model=ProportionalCostModel())
        assert limit is None or plan.peak_bytes <= limit
        times.append(plan.time_s)
        limit = int(plan.peak_bytes * 0.8)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_forced_plans_of_every_kind(zero: int, recompute: str):
    graph = residual_network(6, rows=16)
    plan = forced_plan(
        graph, "x", dp=2, tp=2, pp=2, virtual=2, num_microbatches=4, zero=zero, recompute=recompute
    )
    check_plan(plan)
    assert len(plan.stages) == 4
    assert plan.schedule is ScheduleKind.INTERLEAVED
    assert any(s.recompute for s in plan.stages) == (recompute != "none")


def test_device_counts_halve():
    assert device_counts(32) == [32, 16, 8, 4, 2, 1]
    assert device_counts(4) == [4, 3, 2, 1]


def test_what_is_kept_between_none_and_full_is_in_the_plans_file():
    tall = residual_network(4, rows=4096, width=64, hidden=256)
    fixed = {"num_microbatches": 1}
    whole, _ = plan_for(tall, "1:cpu", recompute="none", **fixed)
    full, _ = plan_for(tall, "1:cpu", recompute="full", **fixed)
    plan, _ = plan_for(tall, "1:cpu", limit=whole.peak_bytes - 1, **fixed)
    assert plan.peak_bytes < whole.peak_bytes
    assert whole.time_s < plan.time_s < full.time_s
    again = plan.stages[0].recompute
    assert again
    assert plan_from_json(plan_to_json(plan)).stages[0].recompute == again
