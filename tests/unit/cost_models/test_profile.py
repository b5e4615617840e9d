from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cluster import DeviceKind, parse_devices
from autopar.cluster.presets import PRESETS
from autopar.errors import ConfigError
from autopar.ir.graph import Dtype, Ref, TensorMeta
from cost_models.local import (
    device_from_profile,
    gpu_cluster,
    gpu_preset,
    host_memory_bytes,
    is_cpu,
    link_from_profile,
    local_cluster,
)
from cost_models.profile import (
    Point,
    PointKind,
    Profile,
    check_same_machine,
    check_writable,
    dump_profile,
    load_profile,
    op_key,
    parse_profile,
    profile_cache_path,
    save_profile,
)

K = PointKind
PROFILE = Profile(
    machine="test CPU",
    date="2025-01-31",
    num_cores=4,
    memory_bytes=16 * 10**9,
    versions={"torch": "2.13"},
    points=(
        Point(K.LAUNCH, "float32", (), 2e-6),
        Point(K.MATMUL, "float32", (1, 500, 1000, 1000), 5e-3 + 2e-6),
        Point(K.MATMUL, "float32", (1, 10, 10, 10), 3e-6),
        Point(K.MATMUL, "bfloat16", (1, 500, 1000, 1000), 10e-3 + 2e-6),
        Point(K.STREAM, "float32", (10**6,), 1e-4),
        Point(K.STREAM, "float32", (10**7,), 2e-3),
        Point(K.STREAM, "float32", (10**8,), 50e-3),
    ),
)


def test_a_profile_survives_its_file(tmp_path: Path):
    path = tmp_path / "deep" / "profile.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


def test_rates_are_read_off_the_points():
    device = device_from_profile(PROFILE)
    # 1e9 FLOP in 5 and in 10 ms; the 3 us matmul is all launch; the median of 10, 5, 2 GB/s
    assert device.peak_flops_for("float32") == pytest.approx(2e11)
    assert device.peak_flops_for("bfloat16") == pytest.approx(1e11)
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(5e9)
    assert device.launch_overhead_s == 2e-6
    # not measured: as in the preset
    preset = PRESETS["cpu"].device
    assert device.peak_flops_for("float64") == preset.peak_flops_for("float64")
    assert device.source == "profile of test CPU on 2025-01-31, torch 2.13"


def test_a_link_is_fitted_to_all_reduces():
    def ring_s(payload: int, size: int) -> float:
        return 2 * (size - 1) * (3e-4 + payload / size / 2e9)

    points = tuple(
        Point(K.ALL_REDUCE, "float32", (payload, size), ring_s(payload, size))
        for payload in (1024, 2**20, 2**25)
        for size in (2, 4)
    )
    link = link_from_profile(Profile(machine="m", date="d", points=points))
    assert link.latency_s == pytest.approx(3e-4)
    assert link.bandwidth_bytes_per_s == pytest.approx(2e9)


def test_a_link_that_was_not_measured_is_the_presets():
    same = tuple(Point(K.ALL_REDUCE, "float32", (1024, 2), t) for t in (1e-3, 2e-3))
    for points in ((), same, same[:1]):
        profile = Profile(machine="m", date="d", points=points)
        assert link_from_profile(profile) == PRESETS["cpu"].intra


def test_a_profiled_machine_has_a_device_for_every_core_and_says_so():
    cluster = local_cluster(PROFILE)
    assert str(cluster) == "4:cpu"
    assert cluster.memory_bytes == 4 * 10**9
    assert cluster.assumptions[0].startswith("profile of test CPU on 2025-01-31")
    assert parse_devices(2, local=cluster).memory_bytes == 8 * 10**9


def test_without_a_profile_the_assumption_is_stated():
    cluster = local_cluster()
    assert is_cpu(cluster)
    assert "this machine was not profiled" in cluster.assumptions[0]
    assert cluster.num_devices * cluster.memory_bytes <= host_memory_bytes()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
    ],
)
def test_gpus_are_known_by_the_name_that_the_driver_gives(name, key):
    assert gpu_preset(name) is PRESETS[key]
    assert str(gpu_cluster(name, num_devices=2, memory_bytes=10**9)) == f"2:{key}"


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA L40S", "NVIDIA GeForce RTX 4090"])
def test_an_unknown_gpu_has_its_own_memory_and_a_stated_assumption(name):
    cluster = gpu_cluster(name, num_devices=1, memory_bytes=24 * 10**9)
    assert gpu_preset(name) is None
    assert cluster.devices[0].memory_bytes == 24 * 10**9
    assert cluster.devices[0].kind is DeviceKind.CUDA
    assert cluster.assumptions[0].startswith(f"{name} is not known: rates of an A100 are assumed")


def test_the_cache_lies_in_the_given_folder(tmp_path: Path):
    path = profile_cache_path(tmp_path)
    assert path.parent == tmp_path / "autopar"
    assert path.name.startswith("profile-")
    assert path.suffix == ".json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": 9},
            "has version 9, expected 2; delete it and profile again",
        ),
        ({"format": "autopar.plan"}, r"is no profile: has format 'autopar.plan', .*; name another"),
        ({"date": "yesterday"}, r"date is 'yesterday', must be in ISO form; delete it"),
        ({"machine": 3}, r"machine is 3, must be text; delete it and profile again"),
        ({"num_cores": -1}, r"num_cores is -1, must be a whole number from 1 to"),
        ({"points": {}}, r"points must be a list"),
        ({"points": [7]}, r"points\[0\]: is a int, must be an object"),
        ({"points": [{"kind": "dance"}]}, r"points\[0\]: kind is 'dance', must be one of matmul"),
        (
            {"points": [{"kind": "stream", "dtype": "float32", "sizes": [1, 2], "time_s": 1}]},
            r"points\[0\]: point stream: has 2 sizes, needs 1",
        ),
        (
            {"points": [{"kind": "launch", "dtype": "float32", "sizes": [], "time_s": 0}]},
            r"points\[0\]: point launch: time_s is 0.0, must be above 0",
        ),
        (
            {"points": [{"kind": "launch", "dtype": "float32", "sizes": [], "time_s": "1"}]},
            r"points\[0\]: time_s is '1', must be a number",
        ),
        (
            {"points": [{"kind": "launch", "dtype": "float32", "sizes": [], "time_s": -1e-6}]},
            r"points\[0\]: point launch: time_s is -1e-06, must be above 0; delete it and profile",
        ),
        (
            {"points": [{"kind": "launch", "dtype": "float32", "sizes": [], "time_s": math.nan}]},
            r"points\[0\]: point launch: time_s is nan, must be above 0; delete it and profile",
        ),
        (
            {"points": [{"kind": "launch", "dtype": "float32", "sizes": [], "time_s": math.inf}]},
            r"points\[0\]: point launch: time_s is inf, must be above 0",
        ),
        (
            {
                "points": [
                    {"kind": "launch", "dtype": "float32", "sizes": [], "time_s": 1, "spread_s": -1}
                ]
            },
            r"points\[0\]: point launch: spread_s is -1.0, must be at least 0",
        ),
        (
            {
                "points": [
                    {"kind": "launch", "dtype": "float32", "sizes": [], "time_s": 1, "busy": 0}
                ]
            },
            r"points\[0\]: point launch: busy is 0 and repeats 1, both must be at least 1",
        ),
        (
            {"points": [{"kind": "stream", "dtype": "float32", "sizes": [0], "time_s": 1}]},
            r"points\[0\]: point stream: sizes are \(0,\), must be at least 1",
        ),
        ({"num_ranks": 1.5}, r"num_ranks is 1.5, must be a whole number from 1 to"),
        (
            {"points": [{"kind": "stream", "dtype": "float32", "sizes": ["a"], "time_s": 1}]},
            r"sizes is \['a'\], must be a list of whole numbers",
        ),
    ],
)
def test_an_invalid_profile_is_refused_with_the_entry_at_fault(changes, message):
    data = json.loads(dump_profile(PROFILE))
    data.update(changes)
    with pytest.raises(ConfigError, match=message):
        parse_profile(json.dumps(data))


def test_a_missing_or_broken_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"profile '.*none.json' can't be read: No such file"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(ConfigError, match=r"bad.json' is not JSON"):
        load_profile(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"has a list, expected an object.*; name another"):
        load_profile(tmp_path / "bad.json")


def test_a_profile_that_was_cut_short_is_refused_and_says_so():
    text = dump_profile(PROFILE)
    for end in (len(text) // 3, len(text) // 2, len(text) - 3):
        with pytest.raises(
            ConfigError, match=r"profile is not JSON.*; delete it and profile again"
        ):
            parse_profile(text[:end])
    with pytest.raises(ConfigError, match=r"is not JSON \(cut short\)"):
        parse_profile(text[: text.index('"points"')])


def test_a_point_of_the_same_thing_takes_the_place_of_an_older_one():
    newer = replace(PROFILE.points[0], time_s=9e-6)
    busy = replace(PROFILE.points[0], busy=2)
    found = PROFILE.with_points([newer, busy])
    assert found.points == (newer, *PROFILE.points[1:], busy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda"}, "p: device is 'cuda', here it is 'cpu'; profile this machine"),
        ({"machine": "another"}, "p: machine is 'another', here it is 'test CPU'"),
        ({"num_threads": 8}, "p: num_threads is 8, here it is 1"),
        ({"versions": {"torch": "1.0"}}, "p: torch is '1.0', here it is '2.13'"),
    ],
)
def test_a_profile_of_another_machine_or_library_is_refused(changes, message):
    check_same_machine(PROFILE, PROFILE, where="p")
    with pytest.raises(ConfigError, match=message):
        check_same_machine(replace(PROFILE, **changes), PROFILE, where="p")


def test_operators_are_the_same_if_operands_and_arguments_are():
    x, y = TensorMeta((4, 8), "float32"), TensorMeta((4, 8), "bfloat16")
    args = (Ref("a"), (Ref("b"), None), Dtype("float32"), 2)
    key = op_key("aten.op.default", args, [x, y])
    assert key == "aten.op.default(float32[4, 8], (bfloat16[4, 8], None), float32, 2)"
    assert key == op_key("aten.op.default", (Ref("c"), (Ref("d"), None), *args[2:]), [x, y])
    assert key != op_key("aten.op.default", args, [y, x])
    assert (
        op_key("local.shard", (Ref("a"), Ref("i")), [x, None]) == "local.shard(float32[4, 8], int)"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 20_000, "is not JSON"),
        ("1" * 5_000, "is not JSON"),
        ("", "cut short"),
        (dump_profile(PROFILE)[:-20], "cut short"),
        (dump_profile(PROFILE).replace('"device"', '"machine"'), "'machine' stands twice"),
        (dump_profile(PROFILE).replace('"num_ranks": 1', '"num_ranks": 0'), "num_ranks is 0"),
        (dump_profile(PROFILE).replace("2e-06", "1" + "0" * 400), "must be a number of at most"),
        (dump_profile(PROFILE).replace('"busy": 1', f'"busy": {10**30}'), "busy is 1000"),
        (dump_profile(PROFILE).replace("10000000\n", "1000000\n"), "points.5. measures the same"),
        (dump_profile(PROFILE).replace("true", '"yes"'), "is_complete is 'yes'"),
    ],
)
def test_a_damaged_file_is_refused_whatever_its_text(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_profile(text)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path):
    check_writable(tmp_path / "new" / "p.json")
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(ConfigError, match="can't be written: Is a directory"):
        check_writable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be written"):
        check_writable(tmp_path / "file" / "p.json")
