"""Optimizer state in host memory: priced, chosen where allowed, refused where it can't run."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.cluster import parse_devices
from autopar.cluster.file import cluster_from_data, dump_cluster
from autopar.errors import ConfigError, ConstraintError, InfeasibleError, PlanError
from autopar.plan.check import check_plan
from autopar.plan.decisions import refuse_offload
from autopar.plan.explain import plan_name
from autopar.plan.io import plan_from_json, plan_to_json
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints
from autopar.solver.given import constraints_of
from autopar.solver.question import Asker
from autopar.solver.search import solve
from autopar.solver.why_not import why_not
from autopar.units import MIB
from cost_models.analytic import AnalyticCostModel
from cost_models.lanes import Lane
from cost_models.offload import CHUNK_BYTES, offload_s_per_byte, resident_bytes
from cost_models.plan_simulation import simulate_plan
from tests.joint_graphs import residual_network
from tests.questions import question

GRAPH = residual_network(6, rows=2048, width=512, hidden=2048)
GPU = "1:a100-80gb"
STATE_BYTES = 100 * MIB  # two moments of 50 MiB of parameters


def plan_for(devices, limit: int | None = None, graph=GRAPH, **given: object) -> Plan:
    cluster = parse_devices(devices)
    plan, _ = solve(
        graph, "hash", cluster, constraints=Constraints(**given),  # type: ignore[arg-type]
        optimizer="adamw", memory_limit_bytes=limit, cost_model=AnalyticCostModel(cluster),
    )  # fmt: skip
    return plan


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
    assert any("with it on the devices nothing fits" in text for text in plan.assumptions)
    (given,) = (c for c in plan.constraints if c.name == "offload")
    assert given.value == "allowed"
    roomy = plan_for(GPU, offload="allowed")
    assert (roomy.offload, roomy.time_s) == ("", usual.time_s)


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


def test_a_gpu_refuses_to_run_it_and_a_cpu_has_nothing_to_move(offloaded: Plan):
    with pytest.raises(PlanError, match=r"state of adamw in host memory.* not run on cuda"):
        refuse_offload(offloaded, "cuda")
    refuse_offload(offloaded, "cpu")
    small = residual_network(2, rows=16, width=64, hidden=256)
    plans = [plan_for("1:cpu", graph=small, offload=word) for word in (None, "optimizer")]
    assert [p.offload for p in plans] == ["", "optimizer"]
    assert plans[0].time_s == plans[1].time_s
    assert plans[0].stages[0].memory == plans[1].stages[0].memory


def test_training_on_a_cpu_is_the_same_to_the_bit():
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    second = copy.deepcopy(first)
    batch = torch.randn(6, 4)
    losses = []
    for model, word in ((first, None), (second, "optimizer")):
        compiled = autopar.compile(
            model, 1, batch, loss=lambda out, _: out.square().mean(), offload=word
        )
        assert compiled.plan.offload == (word or "")
        optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
        for _ in range(3):
            loss = compiled(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        autopar.close(compiled)
    assert torch.equal(*losses)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_link_to_the_host_is_a_figure_of_the_device():
    cluster = parse_devices("2x8:h100-sxm")
    device = cluster.machines[0].device
    assert device.host_link_bytes_per_s == pytest.approx(0.8 * 63e9)
    again = cluster_from_data(json.loads(dump_cluster(cluster)), where="here")
    assert again.machines == cluster.machines
    assert offload_s_per_byte(cluster) == pytest.approx(2 / (0.8 * 63e9))
    slower = parse_devices("8:h100-sxm + 8:v100-32gb")
    assert offload_s_per_byte(slower) == pytest.approx(2 / (0.8 * 15.75e9))
    assert offload_s_per_byte(parse_devices("4:cpu")) == 0.0
    with pytest.raises(ConfigError, match="host_link_bytes_per_s is -1"):
        replace(device, host_link_bytes_per_s=-1)


def test_what_stays_on_the_device():
    assert resident_bytes(10, 4) == 10
    assert resident_bytes(4 * CHUNK_BYTES, 5) == CHUNK_BYTES
    assert resident_bytes(4 * CHUNK_BYTES, 2 * CHUNK_BYTES) == 2 * CHUNK_BYTES
