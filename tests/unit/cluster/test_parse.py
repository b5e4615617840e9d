from __future__ import annotations

import pytest

from autopar.cluster import Cluster, DeviceKind, Machine, parse_devices
from autopar.cluster.presets import PRESETS
from autopar.errors import ConfigError
from autopar.units import GB, GIB


@pytest.mark.parametrize(
    ("spec", "text", "num_devices", "num_machines"),
    [
        (1, "1:cpu", 1, 1),
        (8, "8:cpu", 8, 1),
        ("6", "6:cpu", 6, 1),
        ("cpu", "1:cpu", 1, 1),
        ("4:cpu", "4:cpu", 4, 1),
        ("4x8:h100-sxm", "4x8:h100-sxm", 32, 4),
        (" 4 x 8 : H100 ", "4x8:h100-sxm", 32, 4),
        ("8:a100-80gb", "8:a100-80gb", 8, 1),
        ("16:a100-80gb", "2x8:a100-80gb", 16, 2),
        ("12:h200", "8:h200 + 4:h200", 12, 2),
        ("8:t4", "2x4:t4", 8, 2),
        ("2x8:a100-80gb + 4x4:l4", "2x8:a100-80gb + 4x4:l4", 32, 6),
        ("1x4:l4+1x4:l4", "2x4:l4", 8, 2),
    ],
)
def test_specs_are_read_and_printed_in_canonical_form(spec, text, num_devices, num_machines):
    cluster = parse_devices(spec)
    assert str(cluster) == text
    assert cluster.num_devices == num_devices == len(cluster.devices)
    assert len(cluster.machines) == num_machines
    assert str(parse_devices(text)) == text


def test_every_preset_can_be_named_and_says_where_its_figures_come_from():
    for name, preset in PRESETS.items():
        cluster = parse_devices(f"2x2:{name}")
        assert str(cluster) == f"2x2:{name}"
        assert preset.device.source
        assert preset.intra.source
        assert preset.inter.source
        assert any(preset.inter.source in note for note in cluster.assumptions)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, r"devices='0': 0 devices, must be from 1 to 1048576; write a count"),
        (-3, r"devices='-3': -3 devices, must be from 1"),
        ("0:l4", r"devices='0:l4': 0 devices, must be from 1"),
        ("0x8:l4", r"devices='0x8:l4': 0 machines, must be from 1"),
        ("-2x8:l4", r"-2 machines, must be from 1"),
        ("1000x10000:l4", r"10000000 devices in all, must be from 1"),
        ("", r"devices='': '' is not understood; write a count \(8\)"),
        ("4y8:l4", r"'4y8:l4' is not understood"),
        ("8:l4 +", r"devices='8:l4 \+': '' is not understood"),
        ("8:", r"'8:' is not understood"),
        ("l4:8", r"'l4:8' is not understood"),
        (True, r"devices is True of type bool; write a count"),
        (2.0, r"devices is 2.0 of type float"),
        (None, r"devices is None of type NoneType"),
        (
            "8:h10",
            r"no device is called 'h10'; did you mean 'h100-sxm' or 'h100-96gb'\? known are ",
        ),
        ("8:a100", r"no device is called 'a100'; did you mean 'a100-40gb' or 'a100-80gb'\?"),
        ("8:xyz", r"no device is called 'xyz'; known are .*describe another one in a cluster file"),
        ("no_such.json", r"cluster file 'no_such.json' can't be read: No such file"),
    ],
)
def test_bad_devices_are_refused_with_rule_and_remedy(spec, message):
    with pytest.raises(ConfigError, match=message):
        parse_devices(spec)


def test_a_memory_limit_is_exactly_what_may_be_used():
    cluster = parse_devices("8:a100-80gb", memory_limit="40GiB")
    assert cluster.memory_bytes == 40 * GIB
    assert {d.usable_bytes for d in cluster.devices} == {40 * GIB}
    assert parse_devices(2, memory_limit=1000).memory_bytes == 1000


def test_without_a_limit_a_reserve_is_kept():
    # 79.2 GiB reported, less 1 GiB of context, less 4 % fragmentation
    expected = 79.2 * GIB - 1 * GIB - 0.04 * 79.2 * GIB
    assert parse_devices("8:a100-80gb").memory_bytes == pytest.approx(expected, abs=2)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("90GB", r"memory_limit is 90,000,000,000 bytes, 'a100-80gb' has 85,040,352,"),
        (0, r"memory_limit is 0 bytes, must be at least 1"),
        ("-1GB", r"memory_limit is -1000000000 bytes, must be at least 1"),
        ("lots", r"memory_limit: 'lots' is not an amount of memory; write a number with"),
        (True, r"memory_limit is True; write bytes or text"),
    ],
)
def test_bad_memory_limits_are_refused(limit, message):
    with pytest.raises(ConfigError, match=message):
        parse_devices("8:a100-80gb", memory_limit=limit)


def test_a_cluster_passes_through():
    cluster = parse_devices("4x8:h100-sxm")
    assert parse_devices(cluster) is cluster
    assert parse_devices(cluster, memory_limit="1GB").memory_bytes == 1 * GB


def _local(num_devices: int, name: str) -> Cluster:
    preset = PRESETS[name]
    machine = Machine(
        device=preset.device, num_devices=num_devices, intra=preset.intra, inter=preset.inter
    )
    return Cluster(machines=(machine,), assumptions=("ours",))


def test_cpu_ranks_share_the_memory_of_the_machine():
    local = _local(4, "cpu")
    total_bytes = 4 * local.machines[0].device.memory_bytes
    two, eight = parse_devices(2, local=local), parse_devices("8:cpu", local=local)
    assert two.memory_bytes == total_bytes // 2
    assert eight.memory_bytes == total_bytes // 8
    assert two.devices[0].peak_flops == local.devices[0].peak_flops


def test_more_cpu_ranks_than_cores_share_the_cores():
    local = _local(4, "cpu")
    eight = parse_devices(8, local=local)
    # 8 ranks on 4 cores: half of a core each
    assert eight.devices[0].peak_flops_for("float32") == pytest.approx(
        local.devices[0].peak_flops_for("float32") / 2
    )
    assert eight.link_for(range(8)).bandwidth_bytes_per_s == pytest.approx(
        local.link_for(range(4)).bandwidth_bytes_per_s / 2
    )
    assert eight.assumptions[-1] == "8 ranks share the 4 cores of this machine"


def test_a_count_of_gpus_repeats_the_local_machine():
    cluster = parse_devices(20, local=_local(8, "a100-80gb"))
    assert str(cluster) == "2x8:a100-80gb + 4:a100-80gb"
    assert cluster.assumptions == ("ours",)


def test_cpu_on_a_gpu_machine_is_the_cpu():
    assert parse_devices("2:cpu", local=_local(8, "a100-80gb")).devices[0].kind is DeviceKind.CPU
