"""Objectives, mixed clusters and planning again, from a graph to a plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from autopar.cluster import Cluster, parse_devices
from autopar.errors import ConfigError, ConstraintError, InfeasibleError, PlanError
from autopar.ir.graph import Arg, Meta
from autopar.plan.check import check_plan
from autopar.plan.decisions import decisions_of
from autopar.plan.io import plan_from_json, plan_hash, plan_to_json
from autopar.plan.types import Plan
from autopar.report.text import render_plan
from autopar.solver.constraints import Constraints
from autopar.solver.force import ProportionalCostModel
from autopar.solver.objective import goal
from autopar.solver.planning import Planner, first_devices
from autopar.solver.replan import Change, change_of, replan
from autopar.solver.search import solve
from autopar.solver.search_stats import SearchStats
from cost_models.base import CostModel
from cost_models.plan_simulation import device_words, plan_memory, simulate_plan
from cost_models.whole_step import whole_step
from tests.joint_graphs import residual_network

pytestmark = pytest.mark.slow  # each asks for several searches

NET = residual_network(4, rows=64, width=64, hidden=256)


@dataclass(frozen=True)
class ScaledCostModel:
    """Proportional prices, at the pace of a cluster's slowest machine."""

    factor: float

    @property
    def source(self) -> str:
        return f"proportional, at {self.factor} of the speed"

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        return ProportionalCostModel().op_time_s(op, args, operands, results) / self.factor

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        return ProportionalCostModel().collective_time_s(kind, payload_bytes, ranks)


def scaled(cluster: Cluster) -> CostModel:
    speeds = [float(m.device.name.partition("@")[2] or 1) for m in cluster.machines]
    return ScaledCostModel(min(speeds))


def planner_for(objective: str = "time", limit: float | None = None, **fixed: object) -> Planner:
    def search(
        cluster: Cluster, wish: Constraints, limit_bytes: int | None
    ) -> tuple[Plan, SearchStats]:
        return solve(
            NET, "hash", cluster, constraints=wish, optimizer="adamw",
            memory_limit_bytes=limit_bytes, cost_model=scaled(cluster),
        )  # fmt: skip

    return Planner(
        graph=NET, model_hash="hash", optimizer="adamw", prices=scaled, search=search,
        constraints=Constraints(**fixed),  # type: ignore[arg-type]
        goal=goal(objective, limit),
    )  # fmt: skip


@functools.cache
def mixed_plan(devices: str = "2:h100-sxm + 2:h100-sxm@0.5", **fixed: object) -> Plan:
    return planner_for(**fixed).plan(parse_devices(devices))[0]


# -- mixed clusters ------------------------------------------------------------------------------
def test_a_mixed_plan_is_complete_and_its_numbers_agree():
    cluster = parse_devices("2:h100-sxm + 2:h100-sxm@0.5")
    plan = mixed_plan()
    check_plan(plan, cluster)
    assert plan.pipelines
    assert sum(p.samples for p in plan.pipelines) == 64
    assert plan.num_ranks + len(plan.idle_ranks) == 4
    assert 0 < plan.bound_s <= plan.time_s
    assert plan_from_json(plan_to_json(plan)) == plan
    again, _ = planner_for().plan(cluster)
    assert plan_hash(plan) == plan_hash(again)


def test_fast_devices_do_more_than_a_mesh_gives_them():
    plan = mixed_plan()
    whole, _ = planner_for(dp=4, tp=1, pp=1).plan(parse_devices("2:h100-sxm + 2:h100-sxm@0.5"))
    assert not whole.pipelines, "a mesh that the user fixes is planned as one"
    assert plan.time_s < whole.time_s
    best_class, _ = planner_for().plan(parse_devices("2:h100-sxm"))
    assert plan.time_s < best_class.time_s * 1.02


def test_a_plan_of_pipelines_is_shown_and_drawn():
    plan = mixed_plan()
    text = render_plan(plan, width=80)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("Pipelines", "h100-sxm@0.5", "micro-batches", "not yet: programs"):
        assert word in text
    simulation = simulate_plan(plan)
    assert simulation.num_ranks == sum(len(p.stages) for p in plan.pipelines)
    assert simulation.makespan_s <= plan.time_s * 1.001
    step = whole_step(plan)
    assert max(s.end_s for s in step.simulation.spans) == pytest.approx(plan.time_s)
    assert device_words(plan, 0).startswith("pipeline 0 stage 0")
    assert plan_memory(plan, simulation) == ()
    assert plan.diff(plan).is_empty
    assert str(plan.diff(replace(plan, pipelines=plan.pipelines[:1], time_s=9.0)))


def test_a_plan_of_pipelines_is_not_run():
    plan = mixed_plan()
    with pytest.raises(PlanError, match=r"of unequal stages .* not run: .* \(devices='\d:h100-sxm"):
        decisions_of(plan, NET)


def test_a_class_without_room_is_named_as_idle():
    small = parse_devices("2:h100-sxm + 2:h100-sxm@0.5")
    tiny = replace(small.machines[1].device, memory_bytes=1 << 16, reserved_bytes=0)
    cluster = replace(small, machines=(small.machines[0], replace(small.machines[1], device=tiny)))
    plan, _ = planner_for().plan(cluster)
    assert plan.idle_ranks == (2, 3)
    assert any("2 of 2 h100-sxm@0.5 (64.00 KiB each) stay idle" in t for t in plan.assumptions)


def test_no_class_has_room_for_a_block():
    cluster = parse_devices("2:h100-sxm + 2:l4").with_memory_limit(1 << 16)
    with pytest.raises(InfeasibleError, match="memory of a l4 for the largest block: needs"):
        planner_for().plan(cluster)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("2:h100-sxm + 0:l4", "0 devices, must be from 1"),
        ("2:h100-sxm + 2:l4@0", "speed is 0, must be a number above 0; leave a machine"),
        ("2:h100-sxm + 2:l5", "no device is called 'l5'"),
    ],
)
def test_bad_clusters_are_refused(devices: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_devices(devices)


def test_a_group_without_a_link_to_others_is_refused():
    machine = parse_devices("2:l4").machines[0]
    with pytest.raises(ConfigError, match="bandwidth_bytes_per_s is 0"):
        replace(machine.inter, bandwidth_bytes_per_s=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp": 3}, r"has \d devices?, dp 3 x tp \d needs"),
        ({"devices": (0, 7)}, "has device 7, the plan has 4 devices"),
        ({"devices": (0, 0)}, "device 0 is in stage . of pipeline . and in stage"),
        ({"layers": (17, 18)}, r"runs blocks \[17, 18\], must begin at \d"),
        ({"memory_bytes": 1 << 50}, "its limit is"),
        ({"device": "l4"}, "is for l4, device 0 of the cluster is h100-sxm"),
        ({"num_in_flight": 0}, "counts memory for 0 micro-batches"),
    ],
)
def test_what_is_wrong_with_a_stage_is_named(change: dict[str, object], message: str):
    plan = mixed_plan()
    stage = next(s for p in plan.pipelines for s in p.stages if 0 in s.devices)
    pipelines = tuple(
        replace(
            p,
            stages=tuple(
                replace(s, **change) if s is stage else s  # type: ignore[arg-type]
                for s in p.stages
            ),
        )
        for p in plan.pipelines
    )
    with pytest.raises(PlanError, match=message):
        check_plan(replace(plan, pipelines=pipelines), parse_devices("2:h100-sxm + 2:h100-sxm@0.5"))


# -- objectives ----------------------------------------------------------------------------------
def test_fewer_equal_devices_are_cheaper_where_they_do_not_speed_up():
    cluster = parse_devices("4:h100-sxm").with_costs(3.6)
    fast, _ = planner_for().plan(cluster)
    cheap, _ = planner_for("cost").plan(cluster)
    assert fast.cost_per_step == pytest.approx(fast.time_s * fast.num_ranks * 3.6 / 3600)
    assert cheap.cost_per_step is not None
    assert cheap.cost_bound is not None
    assert cheap.cost_bound <= cheap.cost_per_step <= (fast.cost_per_step or 0)
    assert cheap.num_ranks < fast.num_ranks
    assert cheap.num_devices == 4
    assert any("fewer devices are cheaper" in text for text in cheap.assumptions)
    check_plan(cheap, cluster)
    assert f"{cheap.cost_per_step:.4g} per step" in render_plan(cheap)


def test_time_within_cost_of_equal_devices():
    cluster = parse_devices("4:h100-sxm").with_costs(3.6)
    fast, _ = planner_for().plan(cluster)
    cheap, _ = planner_for("cost").plan(cluster)
    assert fast.cost_per_step is not None
    assert cheap.cost_per_step is not None
    limit = (fast.cost_per_step + cheap.cost_per_step) / 2
    between, _ = planner_for("time within cost", limit).plan(cluster)
    assert (between.cost_per_step or math.inf) <= limit
    assert fast.time_s <= between.time_s <= cheap.time_s
    with pytest.raises(InfeasibleError, match=r"(?s)no plan costs .* raise cost_limit"):
        planner_for("time within cost", cheap.cost_per_step / 2).plan(cluster)


def test_cost_of_a_mixed_cluster():
    cluster = parse_devices("2:h100-sxm + 2:l4").with_costs({"h100-sxm": 9.0, "l4": 1.0})
    cheap, _ = planner_for("cost").plan(cluster)
    assert {s.device for p in cheap.pipelines for s in p.stages} == {"l4"}
    assert cheap.objective == "cost"
    assert (cheap.cost_bound or 0) <= (cheap.cost_per_step or 0)
    with pytest.raises(InfeasibleError, match=r"(?s)no plan costs .* raise cost_limit"):
        planner_for("time within cost", (cheap.cost_bound or 0) / 2).plan(cluster)


@pytest.mark.parametrize(
    ("words", "limit", "message"),
    [
        ("money", None, "must be one of 'time', 'cost', 'time within cost'"),
        ("time within cost", None, "without cost_limit="),
        ("cost", 1.0, "only 'time within cost' has a limit"),
        ("time within cost", 0.0, "cost_limit is 0, must be above 0"),
    ],
)
def test_goals_that_make_no_sense(words: str, limit: float | None, message: str):
    with pytest.raises(ConfigError, match=message):
        goal(words, limit)


def test_prices_that_are_missing_are_asked_for():
    cluster = parse_devices("2:h100-sxm + 2:l4").with_costs({"h100-sxm": 2.0})
    with pytest.raises(ConfigError, match=r"needs prices, and l4 .* cost_per_hour=\{'l4'"):
        planner_for("cost").plan(cluster)


def test_the_first_devices_of_a_cluster():
    assert str(first_devices(parse_devices("2x4:l4 + 8:h100-sxm"), 10)) == "2x4:l4 + 2:h100-sxm"


# -- planning again ------------------------------------------------------------------------------
def lose(cluster: Cluster, *machines: int) -> Change:
    return change_of(cluster, lost=machines)


def test_a_lost_machine_of_equal_ones():
    cluster = parse_devices("4x2:h100-sxm")
    planner = planner_for(pp=1)  # data ranks, so that the old shape can go on with fewer of them
    before, _ = planner.plan(cluster)
    answer = replan(planner, before, lose(cluster, 1))
    check_plan(answer.plan, parse_devices("3x2:h100-sxm"))
    assert answer.plan.num_devices == 6
    assert answer.stay is not None
    assert answer.plan.time_s <= answer.stay.time_s
    assert answer.migration.moved_bytes + answer.migration.kept_bytes > 0
    assert answer.saved_s == pytest.approx(answer.stay.time_s - answer.plan.time_s)
    assert "to stay" in str(answer)
    thorough = replan(planner, before, lose(cluster, 1), thorough=True)
    assert thorough.plan.time_s <= answer.plan.time_s * (1 + 1e-9)
    assert {c.name for c in thorough.plan.constraints if c.origin == "user"} <= {"pp"}


@pytest.mark.parametrize("thorough", [False, True])
def test_constraints_of_the_old_plan_are_told_as_the_users_in_the_new_one(thorough: bool):
    cluster = parse_devices("4x2:h100-sxm")
    planner = planner_for(pp=1, recompute="none")
    before, _ = planner.plan(cluster)
    answer = replan(planner, before, lose(cluster, 1), thorough=thorough)
    assert answer.stay is not None
    for plan in (answer.plan, answer.stay):
        assert plan.constraints == before.constraints
    assert {(c.name, c.effect) for c in answer.plan.constraints if c.origin == "user"} == {
        ("pp", "pipeline ranks"), ("recompute", "every block")
    }  # fmt: skip
    assert "under: pp=1, recompute='none' (the user's, as for the old plan)" in str(answer)


def test_a_lost_machine_of_a_mixed_cluster_keeps_the_other_pipelines():
    cluster = parse_devices("2x1:h100-sxm + 2x1:h100-sxm@0.5")
    planner = planner_for()
    before, _ = planner.plan(cluster)
    answer = replan(planner, before, lose(cluster, 3))
    check_plan(answer.plan, answer_cluster := parse_devices("2x1:h100-sxm + 1:h100-sxm@0.5"))
    assert str(answer_cluster) == answer.plan.cluster
    if answer.stay is not None:
        assert answer.plan.time_s <= answer.stay.time_s
        assert answer.stay.num_ranks < before.num_ranks
    assert answer.diff.shape


def test_a_slower_machine_makes_pipelines_of_a_mesh():
    cluster = parse_devices("2x2:h100-sxm")
    planner = planner_for()
    before, _ = planner.plan(cluster)
    assert not before.pipelines
    answer = replan(planner, before, change_of(cluster, slower={1: 0.5}))
    assert answer.plan.cluster == "2:h100-sxm + 2:h100-sxm@0.5"
    assert answer.plan.pipelines
    assert answer.migration.lost_bytes == 0
    # staying is the mesh at the pace of its slowest device, and moves nothing
    assert answer.stay is not None
    assert answer.stay.mesh == before.mesh
    assert answer.stay.time_s > before.time_s
    assert answer.stay_migration.moved_bytes == 0
    assert "to stay: not possible" not in str(answer)


def test_a_slower_machine_of_a_mixed_cluster_is_priced_where_it_stays():
    cluster = parse_devices("2x2:h100-sxm + 2:h100-sxm@0.5")
    planner = planner_for()
    before, _ = planner.plan(cluster)
    assert before.pipelines
    answer = replan(planner, before, change_of(cluster, slower={1: 0.25}))
    stay = answer.stay
    assert stay is not None
    assert stay.cluster == answer.plan.cluster == "2:h100-sxm + 2:h100-sxm@0.25 + 2:h100-sxm@0.5"
    assert stay.time_s >= before.time_s
    assert answer.plan.time_s <= stay.time_s
    old, new = ([s.devices for p in plan.pipelines for s in p.stages] for plan in (before, stay))
    assert old == new
    assert answer.stay_migration.moved_bytes == 0
    check_plan(stay, parse_devices(stay.cluster))


def test_a_clock_ends_the_search_for_pipelines():
    planner = planner_for()
    planner.time_limit_s = 1e-9
    plan, _ = planner.plan(parse_devices("2:h100-sxm + 2:h100-sxm@0.5"))
    assert "the search was stopped by its limit of time" in plan.assumptions
    assert plan.time_s >= mixed_plan().time_s
    assert "the search was stopped by its limit of time" not in mixed_plan().assumptions


def test_one_machine_more():
    small, large = parse_devices("1x2:h100-sxm"), parse_devices("2x2:h100-sxm")
    planner = planner_for()
    before, _ = planner.plan(small)
    answer = replan(planner, before, change_of(small, large))
    assert answer.stay is not None
    assert answer.plan.time_s < answer.stay.time_s
    assert answer.stay.time_s == pytest.approx(before.time_s)
    assert 0 < answer.break_even_steps < math.inf
    assert answer.break_even_s > answer.migration.seconds
    assert answer.migration.lost_bytes == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "name the new devices="),
        ({"lost": (9,)}, "has no machine 9, its machines are 0 to 1"),
        ({"lost": (0, 1)}, "all 2 machines"),
        ({"slower": {0: 0.0}}, "speed is 0, must be a number above 0"),
        ({"slower": {5: 0.5}}, "has no machine 5"),
        ({"lost": (0,), "slower": {0: 0.5}}, "both in lost= and in slower="),
    ],
)
def test_changes_that_can_t_be(given: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        change_of(parse_devices("2x2:h100-sxm"), **given)  # type: ignore[arg-type]


def test_machines_are_recognised_whatever_their_speed():
    change = change_of(parse_devices("2x2:l4 + 2:h100-sxm"), parse_devices("2:h100-sxm@0.5 + 2:l4"))
    assert change.ranks == {0: 2, 1: 3, 4: 0, 5: 1}


@pytest.mark.parametrize(
    ("before", "after", "ranks", "words"),
    [
        ("2x4:l4", "4x2:l4", {0: 0, 1: 1, 4: 2, 5: 3}, "4 of 8 go on; machines are taken"),
        ("4x2:l4", "2x4:l4", {0: 0, 1: 1, 2: 4, 3: 5}, "4 of 8 go on; machines are taken"),
        ("2:l4", "2:h100-sxm", {}, "0 of 2 go on; 2:h100-sxm has no l4"),
        ("2x2:l4", "3x2:l4", {0: 0, 1: 1, 2: 2, 3: 3}, ""),
        ("4:l4 + 2:l4", "2:l4 + 4:l4", {0: 2, 1: 3, 2: 4, 3: 5, 4: 0, 5: 1}, ""),
    ],
)
def test_machines_of_another_size(before: str, after: str, ranks: dict[int, int], words: str):
    change = change_of(parse_devices(before), parse_devices(after))
    assert change.ranks == ranks
    assert change.matched.startswith(words)
    assert bool(change.matched) == bool(words)


def test_replanning_to_machines_of_another_size_keeps_what_is_there():
    small, large = parse_devices("2x2:h100-sxm"), parse_devices("1x4:h100-sxm")
    planner = planner_for()
    before, _ = planner.plan(small)
    answer = replan(planner, before, change_of(small, large))
    assert answer.migration.kept_bytes > 0
    assert "devices: 2 of 4 go on" in str(answer)


def test_constraints_that_the_rest_can_t_meet():
    cluster = parse_devices("2x2:h100-sxm")
    planner = planner_for(dp=4)
    before, _ = planner.plan(cluster)
    with pytest.raises((ConstraintError, InfeasibleError)):
        replan(planner, before, lose(cluster, 0))
