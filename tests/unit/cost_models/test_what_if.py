"""Prices of a cluster that is a little better."""

from __future__ import annotations

import pytest

from autopar.cluster import parse_devices
from autopar.ir.graph import Ref, TensorMeta
from autopar.solver.force import ProportionalCostModel
from cost_models.analytic import AnalyticCostModel
from cost_models.base import HostCosts
from cost_models.what_if import Part, better_cluster, better_prices

CLUSTER = parse_devices("2x4:h100-sxm")
INSIDE, BETWEEN = (0, 1), (0, 4)
LARGE = 1 << 32


def test_only_the_part_that_gets_better_changes():
    faster = better_cluster(CLUSTER, Part.INSIDE, 1.1)
    assert faster.link_for(INSIDE).bandwidth_bytes_per_s == pytest.approx(
        1.1 * CLUSTER.link_for(INSIDE).bandwidth_bytes_per_s
    )
    assert faster.link_for(BETWEEN) == CLUSTER.link_for(BETWEEN)
    assert faster.link_for(INSIDE).latency_s == CLUSTER.link_for(INSIDE).latency_s


@pytest.mark.parametrize(("part", "ranks"), [(Part.INSIDE, INSIDE), (Part.BETWEEN, BETWEEN)])
def test_prices_of_figures_are_those_of_the_better_cluster(part, ranks):
    model = AnalyticCostModel(CLUSTER)
    better = better_prices(model, CLUSTER, part, 1.1)
    assert better is not None
    for group in (INSIDE, BETWEEN):
        old = model.collective_time_s("all_gather", LARGE, group)
        new = better.collective_time_s("all_gather", LARGE, group)
        assert new == (pytest.approx(old / 1.1, rel=1e-3) if group == ranks else old)


def test_faster_devices_compute_faster():
    model = AnalyticCostModel(CLUSTER)
    better = better_prices(model, CLUSTER, Part.DEVICES, 1.1)
    assert better is not None
    square = TensorMeta((8192, 8192), "bfloat16")
    times = [
        m.op_time_s("aten.mm.default", (Ref("a"), Ref("b")), [square, square], square)
        for m in (model, better)
    ]
    assert times[1] == pytest.approx(times[0] / 1.1, rel=0.02)


def test_prices_of_unknown_origin_keep_their_latency():
    class WithLatency(ProportionalCostModel):
        def collective_time_s(self, kind, payload_bytes, ranks):
            return 0.5 + payload_bytes

    model = WithLatency()
    better = better_prices(model, CLUSTER, Part.BETWEEN, 2.0)
    assert better is not None
    assert better.collective_time_s("all_gather", 1.0, BETWEEN) == 1.0
    assert better.collective_time_s("all_gather", 1.0, INSIDE) == 1.5
    assert not isinstance(better, HostCosts)
    assert better_prices(model, CLUSTER, Part.DEVICES, 2.0) is None


def test_what_surrounds_the_programs_is_kept():
    class WithHost(ProportionalCostModel):
        def in_bursts(self):
            return self

        def optimizer_time_s(self, name, num_tensors, num_bytes):
            return 7.0

        def accumulate_time_s(self, num_tensors, num_bytes):
            return 5.0

        def waiting_s(self, num_ranks, num_waits, compute_s):
            return 6.0

        def call_time_s(self, num_parameters):
            return 3.0

        def shared_step_s(self, makespan_s, busy_s, comm_s):
            return 2 * makespan_s

    model = WithHost()
    better = better_prices(model, CLUSTER, Part.BETWEEN, 2.0)
    assert isinstance(better, HostCosts)
    assert better.call_time_s(1) == 3.0
    assert better.accumulate_time_s(1, 1.0) == 5.0
    assert better.waiting_s(2, 1, 1.0) == 6.0
    assert better.shared_step_s(1.0, [], 0.0) == 2.0
    assert better.optimizer_time_s("adamw", 1, 1.0) == 7.0
    old = model.collective_time_s("all_gather", 8.0, BETWEEN)
    assert better.in_bursts().collective_time_s("all_gather", 8.0, BETWEEN) == old / 2
