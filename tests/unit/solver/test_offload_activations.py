"""Saved values in host memory: where that is chosen, what it costs, what it frees."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from autopar.cluster import parse_devices
from autopar.cluster.file import cluster_from_data, dump_cluster
from autopar.errors import ConfigError, ConstraintError, InfeasibleError, PlanError
from autopar.ir.graph import Graph
from autopar.plan.check import check_plan
from autopar.plan.decisions import decisions_of
from autopar.plan.io import plan_from_json, plan_to_json
from autopar.plan.types import Plan, ScheduleKind
from autopar.report.text import render_plan
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.decisions import Decisions
from autopar.solver.analysis import optimizer_s_per_byte
from autopar.solver.constraints import Constraints
from autopar.solver.exact import ExactFigures, Setting, exact_figures
from autopar.solver.given import constraints_of
from autopar.solver.question import Asker
from autopar.solver.why_not import why_not
from autopar.units import MIB, format_bytes
from cost_models.analytic import AnalyticCostModel
from cost_models.lanes import Lane
from cost_models.plan_simulation import simulate_plan
from tests import questions
from tests.joint_graphs import residual_network
from tests.questions import question

GPU = "1:a100-80gb"
GRAPH = residual_network(8, rows=8192, width=512, hidden=2048)
TIGHT = 800 * MIB  # all of it takes 1069 MiB
BOTH = ("optimizer", "activations")


def plan_for(devices, limit: int | None = None, graph: Graph = GRAPH, **given: object) -> Plan:
    return questions.plan_for(graph, devices, limit, num_microbatches=1, **given)


def exact(graph: Graph, decisions: Decisions, plan: Plan) -> ExactFigures:
    cluster = parse_devices(plan.cluster)
    model = AnalyticCostModel(cluster)
    setting = Setting(
        cluster=cluster, model=model, mesh=plan.mesh, schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        zero_levels=tuple(s.zero_level for s in plan.stages), optimizer="adamw",
        optimizer_s_per_byte=optimizer_s_per_byte(model, "adamw"), warmup=plan.warmup,
    )  # fmt: skip
    return exact_figures(localize(graph, decisions, signatures_of(graph)), setting)


@pytest.fixture(scope="module")
def remade() -> Plan:
    return plan_for(GPU, TIGHT)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(GPU, TIGHT, offload="activations")


def test_a_plan_that_must_make_much_again_copies_instead(remade: Plan, plan: Plan):
    check_plan(plan)
    (before,), (after,) = remade.stages, plan.stages
    assert before.recompute
    assert not remade.offloads_activations
    assert plan.time_s < remade.time_s
    assert len(after.recompute) < len(before.recompute)
    assert after.offload_bytes > 0
    assert plan.peak_bytes <= TIGHT
    assert 0 < plan.bound_s <= plan.time_s
    assert any("saved values are kept in host memory" in text for text in plan.assumptions)
    assert plan_from_json(plan_to_json(plan)) == plan
    assert constraints_of(plan.constraints).offload == "activations"


def test_it_is_never_chosen_unasked_or_where_all_of_it_fits():
    for limit, word in ((TIGHT, None), (TIGHT, "never"), (None, "activations"), (None, "allowed")):
        plan = plan_for(GPU, limit, offload=word)
        assert not plan.offloads_activations
        assert plan.offload_window_bytes == 0


def test_memory_falls_by_what_is_copied_and_the_copies_take_their_lane(plan: Plan):
    decisions = decisions_of(plan, GRAPH)
    here = exact(GRAPH, replace(decisions, offload=frozenset()), plan)
    there = exact(GRAPH, decisions, plan)
    (before,), (after,) = here.stages, there.stages
    assert after.host_bytes == plan.stages[0].offload_bytes
    assert before.held.saved_bytes - after.held.saved_bytes == after.host_bytes
    assert there.peak_bytes == plan.peak_bytes < here.peak_bytes
    # what is under way is no more than the window on either side of a block
    assert here.peak_bytes - there.peak_bytes >= after.host_bytes - 3 * plan.offload_window_bytes
    copies = [s for s in there.simulation.spans if s.lane is Lane.COPY]
    link = parse_devices(GPU).machines[0].device
    total_s = 2 * (
        after.host_bytes / link.host_link_bytes_per_s
        + len(copies) / 2 * link.launch_overhead_s
    )  # fmt: skip
    assert sum(s.end_s - s.start_s for s in copies) == pytest.approx(total_s)
    assert after.time.offload_s + after.time.fetch_s == pytest.approx(total_s)
    # they run beside computing: most of their time is hidden
    assert there.step_s - here.step_s < 0.1 * total_s
    assert there.step_s == pytest.approx(plan.time_s)


def test_the_simulated_step_of_a_saved_plan_has_the_copies(plan: Plan):
    time = plan.stages[0].time
    step = simulate_plan(plan)
    copies = [s for s in step.spans if s.lane is Lane.COPY]
    assert sum(s.end_s - s.start_s for s in copies) == pytest.approx(time.offload_s + time.fetch_s)
    assert step.makespan_s == pytest.approx(plan.time_s, rel=1e-3)


def test_a_pipeline_keeps_less_of_each_micro_batch_in_flight():
    graph = residual_network(4, rows=512, width=64)
    given = {"pp": 2, "num_microbatches": 4, "schedule": ScheduleKind.ONE_F_ONE_B, "warmup": (2, 1)}
    base = questions.plan_for(graph, "2:a100-80gb", **given)
    first = base.stages[0]
    names = [n.name for n in graph.nodes if n.op == "aten.mm.default"]
    decisions = decisions_of(base, graph)
    away = replace(decisions, offload=frozenset(names), offload_window_bytes=1 << 20)
    here, there = (exact(graph, d, base).stages[0] for d in (decisions, away))
    assert here.num_in_flight == there.num_in_flight == first.num_in_flight == 2
    assert there.host_bytes > 0
    for stage in (here, there):
        assert stage.memory.activations_bytes == 2 * stage.held.saved_bytes
    saved = here.held.saved_bytes - there.held.saved_bytes
    assert saved == there.host_bytes


def test_the_choice_is_the_best_of_all_sets_of_operators():
    graph = residual_network(4, rows=4096, width=256, hidden=1024)
    usual = plan_for(GPU, graph=graph)
    decisions = decisions_of(usual, graph)
    forward = localize(graph, decisions, signatures_of(graph)).stages[0].forward
    kept = {o.value.name for o in forward.outputs if o.kind == "saved"}
    sizes = {n.origin: n.meta.bytes for n in forward.nodes if n.name in kept}
    names = [n for n in sizes if n.startswith("r") or n in ("h0", "h3")]
    assert len(names) == 6
    best: dict[int, float] = dict.fromkeys((int(usual.peak_bytes * s) for s in (0.95, 0.8)), 1.0)
    for picks in product((False, True), repeat=len(names)):
        chosen = frozenset(n for n, pick in zip(names, picks, strict=True) if pick)
        for window in {0, max((sizes[n] for n in chosen), default=0), 1 << 30}:
            tried = replace(decisions, offload=chosen, offload_window_bytes=window)
            found = exact(graph, tried, usual)
            for limit in best:
                if found.peak_bytes <= limit:
                    best[limit] = min(best[limit], found.step_s)
    for limit, best_s in best.items():
        plan = plan_for(GPU, limit, graph=graph, recompute="none", offload="activations")
        assert plan.offloads_activations
        assert plan.bound_s <= best_s * (1 + 1e-9)
        assert plan.time_s == pytest.approx(best_s)


def test_where_nothing_else_fits_it_is_the_way():
    limit = 700 * MIB
    with pytest.raises(InfeasibleError):
        plan_for(GPU, limit, recompute="none")
    plan = plan_for(GPU, limit, recompute="none", offload="activations")
    assert not plan.stages[0].recompute
    assert any("on the devices nothing fits" in text for text in plan.assumptions)


def test_words_and_several_at_once():
    graph = residual_network(3, rows=8192, width=512, hidden=2048)
    tight = int(0.8 * plan_for(GPU, graph=graph).peak_bytes)
    both, one, either = (
        plan_for(GPU, tight, graph=graph, offload=word) for word in (BOTH, "activations", "allowed")
    )
    assert both.offload == "optimizer"
    assert constraints_of(both.constraints).offload == BOTH
    assert either.time_s == min(both.time_s, one.time_s)
    assert constraints_of(either.constraints).offload == "allowed"
    for words in (("optimizer", "never"), ("gradients",), (), ("activations", "activations")):
        with pytest.raises(ConstraintError, match=r"or both of optimizer and activations"):
            Constraints(offload=words)


def test_a_cpu_has_nothing_to_gain():
    small = residual_network(4, rows=256, width=64)
    plan = plan_for("1:cpu", graph=small, offload="activations")
    assert plan == replace(plan_for("1:cpu", graph=small), constraints=plan.constraints)


def test_a_device_without_a_link_to_its_host_is_refused():
    cluster = parse_devices(GPU)
    machine = cluster.machines[0]
    blind = replace(machine, device=replace(machine.device, host_link_bytes_per_s=0.0))
    with pytest.raises(ConstraintError, match="has no bandwidth to its host"):
        plan_for(replace(cluster, machines=(blind,)), TIGHT, offload="activations")


def test_the_memory_of_a_host_is_a_limit(remade: Plan):
    cluster = parse_devices(GPU)
    machine = cluster.machines[0]
    small = replace(cluster, machines=(replace(machine, host_memory_bytes=10 * MIB),))
    again = cluster_from_data(json.loads(dump_cluster(small)), where="here")
    assert again.machines == small.machines
    with pytest.raises(ConfigError, match="host_memory_bytes is -1"):
        replace(machine, host_memory_bytes=-1)
    fallback = plan_for(small, TIGHT, offload="activations")
    assert fallback.time_s == remade.time_s
    with pytest.raises(InfeasibleError, match="host memory of machine 0") as caught:
        plan_for(small, 700 * MIB, recompute="none", offload="activations")
    (shortfall,) = [s for s in caught.value.shortfalls if s.what.startswith("host memory")]
    assert shortfall.available == 10 * MIB < shortfall.needed


def test_why_not_and_the_report(plan: Plan):
    asker = Asker(question(GRAPH, GPU, TIGHT, num_microbatches=1))
    first, _ = asker.first()
    told = str(why_not(asker, first, Constraints(num_microbatches=1, offload="activations")))
    assert "offload='activations': faster by " in told
    assert "stage 0 in host memory: 0 B of saved values per micro-batch -> " in told
    text = render_plan(plan, width=100)
    amount = format_bytes(plan.stages[0].offload_bytes)
    assert f"to the host  stage 0: {amount} of activations per micro-batch and device" in text
    assert "saved values in host memory" in str(plan)
    assert "saved values go to host memory" in str(plan.explain())
    twice = replace(plan.stages[0], recompute=plan.stages[0].offload[:1])
    with pytest.raises(PlanError, match="both recomputes"):
        check_plan(replace(plan, stages=(twice,)))
