from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest

from autopar.cluster import dump_cluster, load_cluster, parse_devices
from autopar.cluster.presets import PRESETS
from autopar.errors import ConfigError
from autopar.units import GIB

LINK = {"kind": "ethernet", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
DEVICE = {
    "peak_flops": {"float32": 1e13},
    "memory": "10GiB",
    "kind": "cuda",
    "memory_bandwidth_bytes_per_s": 1e12,
    "launch_overhead_s": 1e-6,
}


def _write(tmp_path, **changes):
    data = {
        "format": "autopar-cluster",
        "version": 1,
        "devices": {"lab": DEVICE},
        "machines": [{"count": 2, "devices": 4, "device": "lab", "intra": LINK, "inter": LINK}],
    }
    data.update(changes)
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    return path


def test_a_file_describes_devices_and_machines(tmp_path):
    path = _write(tmp_path)
    cluster = parse_devices(str(path))
    assert str(cluster) == "2x4:lab"
    assert cluster.memory_bytes == 10 * GIB
    assert cluster.link_for((0, 4)).bandwidth_bytes_per_s == 1e9
    assert parse_devices(path) == cluster
    assert cluster.assumptions == (f"figures from cluster file '{path}'",)


def test_a_device_may_be_based_on_a_preset(tmp_path):
    device = {"based_on": "h100", "memory": "40GiB", "reserved": 0, "efficiency": {"tile": 64}}
    path = _write(
        tmp_path,
        devices={"half": device},
        machines=[{"devices": 8, "device": "half"}, {"count": 2, "devices": 4, "device": "l4"}],
    )
    cluster = load_cluster(path)
    assert str(cluster) == "8:half + 2x4:l4"
    half, h100 = cluster.devices[0], PRESETS["h100-sxm"].device
    assert half.memory_bytes == half.usable_bytes == 40 * GIB
    assert half.peak_flops == h100.peak_flops
    assert (half.curve.tile, half.curve.half_k) == (64, h100.curve.half_k)
    assert cluster.machines[0].intra == PRESETS["h100-sxm"].intra


@pytest.mark.parametrize(
    "spec", ["4x8:h100-sxm", "3:cpu", "2x8:a100-80gb + 4x4:l4 + 2x8:a100-80gb", "12:h200"]
)
def test_dumping_and_loading_is_the_identity(tmp_path, spec):
    cluster = parse_devices(spec, memory_limit="2GiB")
    path = tmp_path / "dumped.json"
    path.write_text(dump_cluster(cluster))
    assert load_cluster(path).machines == cluster.machines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"has format 'autopar-cluster' version 2, expected 'autopar-cluster'"),
        ({"format": "x"}, r"has format 'x' version 1"),
        (
            {"colour": "red"},
            r"has unknown entry 'colour'; allowed are assumptions, between_sites, devices",
        ),
        ({"machines": []}, r"machines must be a list with at least 1 entry"),
        ({"machines": [3]}, r"machines\[0\]: is a int, must be an object"),
        ({"machines": [{"device": "lab"}]}, r"machines\[0\]: devices is missing"),
        ({"machines": [{"device": "l4", "devices": 0}]}, r"devices is 0, must be a whole number"),
        ({"machines": [{"device": "l5", "devices": 1}]}, r"device is 'l5', which is neither in"),
        ({"machines": [{"device": "lab", "devices": 1}]}, r"machines\[0\]: intra is missing"),
        (
            {"machines": [{"device": "l4", "devices": 1, "intra": {**LINK, "kind": "string"}}]},
            r"machines\[0\].intra: kind is 'string', must be one of",
        ),
        (
            {"machines": [{"device": "l4", "devices": 1, "inter": {**LINK, "latency_s": "1"}}]},
            r"machines\[0\].inter: latency_s is '1', must be a number",
        ),
        ({"devices": []}, r"devices is a list, must be an object"),
        ({"devices": {"lab": {**DEVICE, "memory": "x"}}}, r"memory: 'x' is not an amount"),
        ({"devices": {"lab": {**DEVICE, "memory": -5}}}, r"memory_bytes is -5, must be above 0"),
        ({"devices": {"lab": {**DEVICE, "kind": "tpu"}}}, r"kind is 'tpu', must be one of"),
        ({"devices": {"lab": {**DEVICE, "peak_flops": {"float16": 1}}}}, r"float32 must be among"),
        ({"devices": {"lab": {"based_on": "p100"}}}, r"based_on is 'p100', no such preset"),
        (
            {"devices": {"lab": {**DEVICE, "efficiency": {"matmul_fraction": 2}}}},
            r"efficiency: EfficiencyCurve: matmul_fraction is 2.0, not in",
        ),
        (
            {"devices": {"lab": {**DEVICE, "efficiency": {"speed": 2}}}},
            r"efficiency: has unknown entry 'speed'",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_the_entry_at_fault(tmp_path, changes, message):
    path = _write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load_cluster(path)
    assert str(caught.value).startswith(f"cluster file '{path}'")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "machines": [
                    {"device": "l4", "devices": 1, "inter": {**LINK, "latency_s": math.nan}}
                ]
            },
            r"inter: latency_s is nan, must be a finite number",
        ),
        (
            {"devices": {"lab": {**DEVICE, "memory_bandwidth_bytes_per_s": math.inf}}},
            r"memory_bandwidth_bytes_per_s is inf, must be a finite number",
        ),
        (
            {"devices": {"lab": {**DEVICE, "peak_flops": {"float32": math.nan}}}},
            r"peak_flops\['float32'\] is nan, must be a finite number",
        ),
        ({"devices": {"lab": {**DEVICE, "memory": math.nan}}}, r"memory: nan is not an amount"),
        (
            {"machines": [{"device": "l4", "devices": 1, "speed": -1}]},
            r"machines\[0\]: device 'l4': speed is -1, must be a number above 0",
        ),
        (
            {"machines": [{"device": "l4", "devices": 8, "count": 1 << 20}]},
            r"8388608 devices, must be from 1 to 1048576",
        ),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_cluster(_write(tmp_path, **changes))


def test_an_entry_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "twice.json"
    path.write_text('{"format": "autopar-cluster", "version": 1, "machines": [], "machines": []}')
    with pytest.raises(ConfigError, match="has entry 'machines' twice; leave one of them out"):
        load_cluster(path)


YAML = """
format: autopar-cluster
version: 1
devices:
  lab:
    kind: cuda
    peak_flops: {float32: 1e13}
    memory: 10GiB
    memory_bandwidth_bytes_per_s: 1.0e12
    launch_overhead_s: 1e-6
machines:
  - {count: 2, devices: 4, device: lab, intra: &link LINK, inter: *link}
""".replace("LINK", "{kind: ethernet, latency_s: 1e-5, bandwidth_bytes_per_s: 1e9}")


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.yml"])
def test_a_yaml_file_says_the_same_as_json(tmp_path, name):
    path = tmp_path / name
    path.write_text(YAML)
    cluster = parse_devices(str(path))
    assert (
        cluster.machines
        == replace(
            load_cluster(_write(tmp_path)),
            machines=tuple(
                replace(
                    machine,
                    device=replace(machine.device, source=cluster.devices[0].source),
                    intra=replace(machine.intra, source=cluster.machines[0].intra.source),
                    inter=replace(machine.inter, source=cluster.machines[0].inter.source),
                )
                for machine in load_cluster(_write(tmp_path)).machines
            ),
        ).machines
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", r"is not YAML: while parsing"),
        ("format: autopar-cluster\nformat: other", r"has entry 'format' twice"),
        ("1: 2", r"has an entry named 1, which is no text"),
        ("- 1", r"is a list, must be an object"),
        ("", r"is empty, must be an object"),
        ("!!python/object/apply:os.getcwd []", r"is not YAML: could not determine a constructor"),
        (YAML.replace("1e-6", "soon"), r"launch_overhead_s is 'soon', must be a number"),
    ],
)
def test_a_yaml_file_is_refused_as_json_is(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_cluster(path)


def test_yaml_without_pyyaml_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML)
    with pytest.raises(ConfigError, match="PyYAML is not installed; pip install pyyaml"):
        load_cluster(path)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no text: byte 0 is not UTF-8"):
        load_cluster(path)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"cluster file '.*bad.json' is not JSON: Expecting"):
        load_cluster(path)
