"""Machines at several sites, and the cluster files that come as examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cluster import load_cluster, parse_devices
from autopar.cluster.file import cluster_from_data, dump_cluster
from autopar.errors import ConfigError
from autopar.plan.types import MeshShape
from cost_models.base import link_words

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples" / "clusters").glob("*.json"))


def data(**changed: object) -> dict[str, object]:
    machines = [
        {"count": 2, "devices": 4, "device": "a100-80gb", "site": site} for site in ("east", "west")
    ]
    between = {"kind": "ethernet", "latency_s": 0.01, "bandwidth_bytes_per_s": 1e9}
    found = {
        "format": "autopar-cluster", "version": 1, "machines": machines, "between_sites": between,
    }  # fmt: skip
    return {**found, **changed}


def test_a_group_is_bound_by_the_line_between_its_sites():
    cluster = cluster_from_data(data(), where="x")
    within, across = cluster.links_for((0, 4)), cluster.links_for((0, 8))
    assert (within.num_sites, across.num_sites) == (1, 2)
    assert within.inter == cluster.machines[0].inter
    assert across.inter is not None
    assert (across.inter.bandwidth_bytes_per_s, across.inter.latency_s) == (1e9, 0.01)
    assert cluster.link_for((0, 8)).bandwidth_bytes_per_s == 1e9
    assert cluster.link_for(range(8)).bandwidth_bytes_per_s > 1e10
    words = link_words(cluster, MeshShape(pp=2, dp=8))
    assert words["pp"] == "ethernet between sites, 1 GB/s per device"
    assert "between machines" in words["dp"]


def test_sites_without_a_line_between_them_are_refused():
    broken = data()
    del broken["between_sites"]
    with pytest.raises(ConfigError, match=r"x: Cluster: machines at 'east' and at 'west' are not "):
        cluster_from_data(broken, where="x")


def test_a_line_of_an_unknown_kind_is_refused():
    line = {"kind": "carrier-pigeon", "latency_s": 1.0, "bandwidth_bytes_per_s": 1.0}
    with pytest.raises(ConfigError, match=r"x\.between_sites: kind is 'carrier-pigeon', must be"):
        cluster_from_data(data(between_sites=line), where="x")


def test_a_line_that_carries_nothing_is_refused():
    line = {"kind": "ethernet", "latency_s": 1.0, "bandwidth_bytes_per_s": 0}
    with pytest.raises(ConfigError, match=r"bandwidth_bytes_per_s is 0\.0; .* above 0"):
        cluster_from_data(data(between_sites=line), where="x")


def test_a_device_of_the_file_hides_a_preset_of_the_same_name():
    own = {"h100": {"based_on": "h100-sxm", "memory": "40GiB"}}
    machines = [{"count": 1, "devices": 1, "device": "h100"}]
    first = cluster_from_data(
        {"format": "autopar-cluster", "version": 1, "devices": own, "machines": machines}, where="x"
    )
    again = cluster_from_data(json.loads(dump_cluster(first)), where="y")
    assert first.machines == again.machines
    assert again.devices[0].memory_bytes == 40 << 30


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_read_and_written_whole(path: Path):
    cluster = load_cluster(path)
    assert parse_devices(str(path)) == cluster
    again = cluster_from_data(json.loads(dump_cluster(cluster)), where="again")
    assert (again.machines, again.between_sites) == (cluster.machines, cluster.between_sites)
    assert all(m.intra.source and m.inter.source for m in cluster.machines)


def test_there_are_examples():
    assert {p.stem for p in EXAMPLES} == {"dgx-h100-pod", "mixed-a100-h100", "two-sites"}
