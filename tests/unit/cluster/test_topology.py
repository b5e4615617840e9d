from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster, Link, LinkKind, Machine, parse_devices
from autopar.cluster.presets import PRESETS
from autopar.cluster.topology import LEAF_MACHINES, RAIL_MACHINES
from autopar.errors import ConfigError
from autopar.units import GB

FAST = Link(kind=LinkKind.NVLINK, latency_s=1e-6, bandwidth_bytes_per_s=100 * GB)
SLOW = Link(kind=LinkKind.INFINIBAND, latency_s=9e-6, bandwidth_bytes_per_s=10 * GB)
DEVICE = PRESETS["a100-80gb"].device
MACHINE = Machine(device=DEVICE, num_devices=4, intra=FAST, inter=SLOW)
CLUSTER = Cluster(machines=(MACHINE, MACHINE))


def test_a_link_takes_alpha_plus_bytes_over_bandwidth():
    # 9 us + 20 KB / 10 GB/s = 2 us
    assert SLOW.time_s(20_000) == pytest.approx(11e-6)


def test_ranks_are_numbered_machine_by_machine():
    assert [CLUSTER.machine_of(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"has no rank 8, its ranks are 0 to 7"):
        CLUSTER.machine_of(8)
    with pytest.raises(ConfigError, match=r"has no rank -1"):
        CLUSTER.device_of(-1)


def test_a_group_inside_a_machine_has_the_inner_link():
    assert CLUSTER.link_for((0, 3)) == FAST
    assert CLUSTER.link_for((5,)) == FAST


def test_a_group_across_machines_with_one_rank_each_has_one_share_of_the_adapters():
    assert CLUSTER.link_for((0, 4)) == SLOW


def test_a_group_across_machines_drives_an_adapter_for_each_of_its_ranks():
    # two ranks on each machine: 2 x 10 GB/s; a ring of 4 has 2 hops of 1 us and 2 of 9 us
    link = CLUSTER.link_for((0, 1, 4, 5))
    assert link.bandwidth_bytes_per_s == pytest.approx(20 * GB)
    assert link.latency_s == pytest.approx(5e-6)


def test_a_group_across_machines_is_never_faster_than_inside():
    wide = replace(SLOW, bandwidth_bytes_per_s=60 * GB)
    machine = replace(MACHINE, inter=wide)
    cluster = Cluster(machines=(machine, machine))
    assert cluster.link_for(range(8)).bandwidth_bytes_per_s == 100 * GB


def test_without_a_switch_a_small_group_has_few_wires():
    # six wires of 25 GB/s: two devices share one, three of a group three, four all six
    wired = replace(FAST, bandwidth_bytes_per_s=150 * GB, wires=6)
    machine = replace(MACHINE, num_devices=8, intra=wired)
    cluster = Cluster(machines=(machine,))
    rates = [cluster.link_for(range(n)).bandwidth_bytes_per_s for n in (2, 3, 4, 8)]
    assert rates == pytest.approx([25 * GB, 75 * GB, 150 * GB, 150 * GB])
    assert FAST.in_group(2) == FAST


def test_a_ring_over_very_many_machines_drives_fewer_adapters():
    machine = replace(MACHINE, inter=replace(SLOW, bandwidth_bytes_per_s=GB))
    rates = []
    for count in (2, LEAF_MACHINES, LEAF_MACHINES + int(RAIL_MACHINES), 200):
        cluster = Cluster(machines=(machine,) * count)
        rates.append(cluster.link_for(range(4 * count)).bandwidth_bytes_per_s)
    # four adapters, then half as many, at last one
    assert rates == pytest.approx([4 * GB, 4 * GB, 2 * GB, 1 * GB])


def test_the_fewest_ranks_on_a_machine_count():
    links = CLUSTER.links_for((0, 1, 2, 4))
    assert (links.size, links.num_machines, links.per_machine) == (4, 2, 1)
    assert CLUSTER.link_for((0, 1, 2, 4)).bandwidth_bytes_per_s == 10 * GB


def test_between_unlike_machines_the_slower_link_counts():
    cluster = parse_devices("2x8:a100-80gb + 4x4:l4")
    assert cluster.link_for((0, 16)).kind is LinkKind.ETHERNET
    assert cluster.link_for((0, 8)).kind is LinkKind.INFINIBAND
    assert cluster.link_for((16, 17)).kind is LinkKind.PCIE
    assert not cluster.is_uniform
    assert cluster.slowest_device(range(32)).name == "l4"
    assert cluster.memory_bytes == PRESETS["l4"].device.usable_bytes


def test_a_group_needs_a_rank():
    with pytest.raises(ConfigError, match="a group needs at least 1 rank, got 0"):
        CLUSTER.links_for(())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(machines=()), r"Cluster: has 0 machines, needs at least 1"),
        (lambda: replace(MACHINE, num_devices=0), r"machine of 'a100-80gb': has 0 devices"),
        (lambda: replace(FAST, latency_s=-1.0), r"nvlink link: latency_s is -1.0"),
        (lambda: replace(FAST, bandwidth_bytes_per_s=0), r"bandwidth_bytes_per_s is 0"),
        (lambda: replace(DEVICE, memory_bytes=0), r"device 'a100-80gb': memory_bytes is 0"),
        (lambda: replace(FAST, wires=-1), r"wires is -1, must be at least 0"),
        (lambda: replace(DEVICE, host_step_s=-1), r"host_step_s is -1"),
        (lambda: replace(DEVICE, launch_overhead_s=-1), r"launch_overhead_s is -1"),
        (lambda: replace(DEVICE, peak_flops=()), r"float32 must be among them"),
        (lambda: replace(DEVICE, reserved_bytes=DEVICE.memory_bytes), r"reserved_bytes is"),
        (lambda: replace(DEVICE.curve, conv_fraction=1.5), r"conv_fraction is 1.5, not in"),
        (lambda: replace(DEVICE.curve, tile=0), r"tile 0 and split_k 4096 must be at least 1"),
    ],
)
def test_impossible_figures_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_dtype_that_the_device_lacks_runs_as_float32():
    t4 = PRESETS["t4"].device
    assert t4.peak_flops_for("bfloat16") == t4.peak_flops_for("float32") == 8.1e12
    assert t4.peak_flops_for("float16") == 65e12
