"""Optimizer state in host memory: what it costs, and where it is chosen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cluster import parse_devices
from autopar.cluster.file import cluster_from_data, dump_cluster
from autopar.errors import ConfigError, ConstraintError, InfeasibleError, PlanError
from autopar.plan.check import check_plan
from autopar.plan.explain import plan_name
from autopar.plan.io import plan_from_json, plan_to_json
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints
from autopar.solver.given import constraints_of
from autopar.solver.question import Asker
from autopar.solver.why_not import why_not
from autopar.units import MIB
from cost_models.lanes import Lane
from cost_models.offload import CHUNK_BYTES, offload_s_per_byte, resident_bytes
from cost_models.plan_simulation import simulate_plan
from tests import questions
from tests.joint_graphs import residual_network
from tests.questions import question

GRAPH = residual_network(6, rows=2048, width=512, hidden=2048)
GPU = "1:a100-80gb"
STATE_BYTES = 100 * MIB  # two moments of 50 MiB of parameters


def plan_for(devices, limit: int | None = None, graph=GRAPH, **given: object) -> Plan:
    return questions.plan_for(graph, devices, limit, **given)


@pytest.fixture(scope="module")
def usual() -> Plan:
    return plan_for(GPU)


@pytest.fixture(scope="module")
def offloaded() -> Plan:
    return plan_for(GPU, offload="optimizer")


def test_the_state_leaves_the_device_and_its_copies_take_time(usual: Plan, offloaded: Plan):
    check_plan(offloaded)
    (before,), (after,) = usual.stages, offloaded.stages
    assert before.memory.optimizer_bytes == STATE_BYTES
    assert after.memory.optimizer_bytes == CHUNK_BYTES < STATE_BYTES
    copies_s = 2 * STATE_BYTES / parse_devices(GPU).machines[0].device.host_link_bytes_per_s
    assert after.time.copy_s == pytest.approx(copies_s)
    assert after.time.optimizer_s == pytest.approx(before.time.optimizer_s + copies_s)
    assert offloaded.time_s == pytest.approx(usual.time_s + copies_s)
    assert 0 < offloaded.bound_s <= offloaded.time_s
    assert offloaded.peak_bytes == usual.peak_bytes - STATE_BYTES + CHUNK_BYTES


def test_the_plan_says_where_the_state_is(usual: Plan, offloaded: Plan):
    assert (usual.offload, offloaded.offload) == ("", "optimizer")
    assert plan_name(offloaded).endswith(", optimizer state in host memory")
    assert "optimizer state in host memory" in str(offloaded)
    rows = {c.what: (c.before, c.after) for c in usual.diff(offloaded).shape}
    assert rows["optimizer state"] == ("the devices", "host memory")
    assert constraints_of(offloaded.constraints).offload == "optimizer"
    assert plan_from_json(plan_to_json(offloaded)) == offloaded
    with pytest.raises(PlanError, match="it offloads 'gradients'; what can be in host memory is"):
        check_plan(replace(offloaded, offload="gradients"))


def test_copies_have_their_lane_in_the_simulated_step(offloaded: Plan):
    spans = [s for s in simulate_plan(offloaded).spans if s.lane is Lane.COPY]
    assert len(spans) == 2
    assert sum(s.end_s - s.start_s for s in spans) == pytest.approx(offloaded.stages[0].time.copy_s)


def test_it_is_used_where_nothing_fits_otherwise_and_only_there(usual: Plan):
    tight = 230 * MIB
    for word in (None, "never"):
        with pytest.raises(InfeasibleError):
            plan_for(GPU, tight, num_microbatches=512, offload=word)
    plan = plan_for(GPU, tight, num_microbatches=512, offload="allowed")
    assert plan.offload == "optimizer"
    assert plan.peak_bytes <= tight
    assert any("with all of it on the devices nothing fits" in text for text in plan.assumptions)
    (given,) = (c for c in plan.constraints if c.name == "offload")
    assert given.value == "allowed"
    roomy = plan_for(GPU, offload="allowed")
    assert (roomy.offload, roomy.time_s) == ("", usual.time_s)


def test_it_is_used_where_that_is_faster(usual: Plan):
    cluster = parse_devices(GPU)
    machine = cluster.machines[0]
    quick = replace(machine.device, host_link_bytes_per_s=1e14)
    quick_cluster = replace(cluster, machines=(replace(machine, device=quick),))
    tight = usual.peak_bytes - 20 * MIB
    given = {"num_microbatches": 1}
    here = plan_for(quick_cluster, tight, **given)
    assert here.stages[0].recompute
    plan = plan_for(quick_cluster, tight, offload="allowed", **given)
    assert plan.time_s < here.time_s
    assert plan.offload == "optimizer" or plan.offloads_activations
    assert plan.bound_s <= here.bound_s
    assert any("with all of it on the devices a step takes" in text for text in plan.assumptions)
    slow = plan_for(GPU, tight, offload="allowed", **given)
    assert slow.offload == ""
    assert slow.time_s <= here.time_s


def test_why_not_offload():
    asker = Asker(question(GRAPH, GPU))
    plan, _ = asker.first()
    told = str(why_not(asker, plan, Constraints(offload="optimizer")))
    assert told.startswith("offload='optimizer': slower by ")
    assert "optimizer state: the devices -> host memory" in told


def test_more_data_ranks_have_less_to_copy():
    plan = plan_for("2:a100-80gb", dp=2, zero=1, offload="optimizer")
    alone = plan_for("2:a100-80gb", dp=2, zero=0, offload="optimizer")
    assert alone.stages[0].time.copy_s == pytest.approx(2 * plan.stages[0].time.copy_s, rel=1e-3)


def test_devices_without_a_link_to_their_host_are_refused():
    cluster = parse_devices(GPU)
    machine = cluster.machines[0]
    bare = replace(machine, device=replace(machine.device, host_link_bytes_per_s=0.0))
    with pytest.raises(ConstraintError, match=r"device 'a100-80gb' has no bandwidth"):
        plan_for(replace(cluster, machines=(bare,)), offload="optimizer")
    with pytest.raises(InfeasibleError):
        plan_for(
            replace(cluster, machines=(bare,)), 230 * MIB, num_microbatches=512, offload="allowed"
        )


def test_other_words_are_refused():
    with pytest.raises(ConstraintError, match="offload='all': must be one of never, allowed, opt"):
        Constraints(offload="all")
    with pytest.raises(ConfigError, match=r"offload=True is a bool; give a word"):
        autopar.compile(torch.nn.Linear(2, 2), 1, torch.zeros(2, 2), offload=True)


def test_a_cpu_has_nothing_to_gain_and_never_chooses_it():
    small = residual_network(2, rows=16, width=64, hidden=256)
    usual, forced = (plan_for("1:cpu", graph=small, offload=word) for word in (None, "optimizer"))
    assert [p.offload for p in (usual, forced)] == ["", "optimizer"]
    assert forced.time_s > usual.time_s
    state = usual.stages[0].memory.optimizer_bytes
    assert forced.stages[0].memory.optimizer_bytes == 2 * state  # in its chunk and in its buffer
    with pytest.raises(InfeasibleError):
        plan_for("1:cpu", usual.peak_bytes // 2, graph=small, num_microbatches=1, offload="allowed")


def test_the_link_to_the_host_is_a_figure_of_the_device():
    cluster = parse_devices("2x8:h100-sxm")
    device = cluster.machines[0].device
    assert device.host_link_bytes_per_s == pytest.approx(0.8 * 63e9)
    again = cluster_from_data(json.loads(dump_cluster(cluster)), where="here")
    assert again.machines == cluster.machines
    assert offload_s_per_byte(cluster) == pytest.approx(2 / (0.8 * 63e9))
    slower = parse_devices("8:h100-sxm + 8:v100-32gb")
    assert offload_s_per_byte(slower) == pytest.approx(2 / (0.8 * 15.75e9))
    memory = parse_devices("4:cpu").machines[0].device.memory_bandwidth_bytes_per_s
    assert offload_s_per_byte(parse_devices("4:cpu")) == pytest.approx(4 / memory)
    with pytest.raises(ConfigError, match="host_link_bytes_per_s is -1"):
        replace(device, host_link_bytes_per_s=-1)


def test_what_stays_on_the_device():
    assert resident_bytes(10, 4) == 10
    assert resident_bytes(4 * CHUNK_BYTES, 5) == CHUNK_BYTES
    assert resident_bytes(4 * CHUNK_BYTES, 2 * CHUNK_BYTES) == 2 * CHUNK_BYTES
    assert resident_bytes(10, 4, is_cpu=True) == 20
