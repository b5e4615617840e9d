from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Link, LinkKind, Machine, parse_devices
from autopar.cluster.presets import PRESETS
from autopar.errors import ConfigError
from autopar.plan.types import MeshShape, StagePlacement
from autopar.units import GB
from cost_models.analytic import AnalyticCostModel
from cost_models.base import axis_groups, slowest_group
from cost_models.collectives import (
    Algorithm,
    CollectiveKind,
    all_gather_time_s,
    all_reduce_time_s,
    all_to_all_time_s,
    broadcast_time_s,
    collective_kind,
    collective_time_s,
    p2p_time_s,
    reduce_scatter_time_s,
)

LINK = Link(kind=LinkKind.OTHER, latency_s=2e-6, bandwidth_bytes_per_s=1 * GB)
INTER = Link(kind=LinkKind.OTHER, latency_s=10e-6, bandwidth_bytes_per_s=0.5 * GB)
MACHINE = Machine(device=PRESETS["cpu"].device, num_devices=4, intra=LINK, inter=INTER)
CLUSTER = Cluster(machines=(MACHINE, MACHINE))


def test_ring_all_reduce_by_hand():
    # 4 ranks: 6 steps of 1000 bytes; 6 * (2 us + 1 us) = 18 us
    assert all_reduce_time_s(4000, 4, link=LINK) == pytest.approx(18e-6)


def test_tree_all_reduce_by_hand():
    # 8 ranks: 2 * 3 levels * 2 us + 2 * 4 us = 20 us; the ring takes 14 * (2 + 0.5) us = 35 us
    assert all_reduce_time_s(4000, 8, link=LINK, algorithm=Algorithm.TREE) == pytest.approx(20e-6)
    assert all_reduce_time_s(4000, 8, link=LINK, algorithm=Algorithm.BEST) == pytest.approx(20e-6)


def test_gather_and_scatter_by_hand():
    # 3 steps of 1000 bytes: 3 * 3 us = 9 us
    assert all_gather_time_s(4000, 4, link=LINK) == pytest.approx(9e-6)
    assert reduce_scatter_time_s(4000, 4, link=LINK) == pytest.approx(9e-6)


def test_broadcast_and_p2p_by_hand():
    # ring: 3 * 2 us + 4 us; tree: 2 * 2 us + 4 us; p2p: 2 us + 4 us
    assert broadcast_time_s(4000, 4, link=LINK, algorithm=Algorithm.RING) == pytest.approx(10e-6)
    assert broadcast_time_s(4000, 4, link=LINK) == pytest.approx(8e-6)
    assert p2p_time_s(4000, link=LINK) == pytest.approx(6e-6)


def test_all_to_all_inside_a_machine_by_hand():
    # 3 exchanges of 1000 bytes: 3 * 3 us
    assert all_to_all_time_s(4000, CLUSTER.links_for(range(4))) == pytest.approx(9e-6)


def test_all_to_all_across_machines_goes_through_each_ranks_own_share_of_the_adapter():
    # 8 blocks of 1000 bytes: 4 leave the machine, 4 * (10 us + 2 us) = 48 us; inside 3 * 3 us
    assert all_to_all_time_s(8000, CLUSTER.links_for(range(8))) == pytest.approx(48e-6)


@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_a_group_of_one_and_no_bytes_are_free(kind):
    model = AnalyticCostModel(CLUSTER)
    assert model.collective_time_s(kind, 1e9, (3,)) == 0.0
    assert model.collective_time_s(kind, 0, (0, 1)) == 0.0


@pytest.mark.parametrize("kind", list(CollectiveKind))
@pytest.mark.parametrize("ranks", [(0, 1), (0, 4), tuple(range(8))], ids=str)
def test_time_grows_with_the_payload(kind, ranks):
    model = AnalyticCostModel(CLUSTER)
    times = [model.collective_time_s(kind, 10.0**power, ranks) for power in range(10)]
    assert all(a < b for a, b in pairwise(times))


@given(payload=st.integers(1, 10**10), size=st.integers(1, 64))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(payload, size):
    whole = all_reduce_time_s(payload, size, link=LINK)
    parts = reduce_scatter_time_s(payload, size, link=LINK) + all_gather_time_s(
        payload, size, link=LINK
    )
    assert whole == pytest.approx(parts)


@given(payload=st.integers(1, 10**10), size=st.integers(2, 64))
def test_the_best_algorithm_is_the_faster_one(payload, size):
    times = [all_reduce_time_s(payload, size, link=LINK, algorithm=a) for a in Algorithm]
    ring, tree, best = times
    assert best == min(ring, tree)


def test_large_all_reduce_on_h100_reaches_the_bus_bandwidth():
    # bus bandwidth = 2 (n - 1) / n * payload / time, 0.85 * 450 GB/s on NVLink4
    model = AnalyticCostModel(parse_devices("8:h100-sxm"))
    payload = 4 * GB
    time_s = model.collective_time_s("all_reduce", payload, range(8))
    assert 2 * 7 / 8 * payload / time_s == pytest.approx(0.85 * 450 * GB, rel=0.01)


def test_gloo_all_reduce_of_two_ranks_takes_about_half_a_millisecond():
    model = AnalyticCostModel(parse_devices("2:cpu"))
    assert 0.3e-3 < model.collective_time_s("all_reduce", 1024, (0, 1)) < 0.7e-3


def test_kinds_are_named_as_the_operators():
    assert collective_kind("comm.all_gather") is CollectiveKind.ALL_GATHER
    with pytest.raises(ConfigError, match=r"'comm.scan' is no collective; known are all_reduce"):
        collective_kind("comm.scan")


def test_a_negative_payload_is_refused():
    with pytest.raises(ConfigError, match="payload is -1 bytes, must be at least 0"):
        collective_time_s(CollectiveKind.ALL_REDUCE, -1, links=CLUSTER.links_for((0, 1)), link=LINK)


def test_groups_of_the_axes():
    mesh = MeshShape(pp=2, dp=2, tp=2)
    assert axis_groups(mesh, "tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert axis_groups(mesh, "dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert axis_groups(mesh, "pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    with pytest.raises(ConfigError, match=r"has no axis 'mb' with ranks"):
        axis_groups(mesh, "mb")


def test_the_slowest_group_is_the_one_that_crosses_machines():
    # stage 0 has ranks 0-2, stage 1 ranks 3-5 on both sides of the border at rank 4
    assert slowest_group(CLUSTER, MeshShape(pp=2, tp=3), "tp") == (3, 4, 5)
    assert slowest_group(CLUSTER, MeshShape(pp=8), "pp") == (3, 4)
    assert slowest_group(CLUSTER, MeshShape(pp=1), "pp") == (0,)


def test_the_slowest_hop_is_the_first_of_all_groups_with_the_slowest_link():
    """Against a walk over every pair of neighbours of every pipeline."""
    rng = random.Random(3)
    for _ in range(60):
        devices = rng.choice(["2x4:h100-sxm", "4x2:a100-80gb", "1x4:h100-sxm + 2x2:a100-80gb"])
        cluster = parse_devices(devices)
        pp, dp, tp = rng.choice([(2, 2, 2), (4, 1, 2), (2, 4, 1), (8, 1, 1), (2, 1, 4), (3, 2, 1)])
        virtual = rng.randint(1, 2)
        placement = rng.choice(list(StagePlacement)) if virtual > 1 else StagePlacement.LOOP
        mesh = MeshShape(dp=dp, tp=tp, pp=pp, virtual=virtual, placement=placement)
        wraps = virtual > 1 and placement is StagePlacement.LOOP
        hops = [
            (group[at], group[(at + 1) % pp])
            for group in axis_groups(mesh, "pp")
            for at in range(pp if wraps else pp - 1)
        ]
        links = [cluster.link_for(hop) for hop in hops]
        speeds = [(link.bandwidth_bytes_per_s, -link.latency_s) for link in links]
        assert slowest_group(cluster, mesh, "pp") == hops[speeds.index(min(speeds))]
