"""Records: what is read, what is skipped and why."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

import autopar.validation
from autopar.cluster.presets import RDMA_EFFICIENCY
from autopar.errors import ConfigError
from autopar.validation.errors import SkipRecord
from autopar.validation.family import Framework
from autopar.validation.hardware import Stated, cluster_of
from autopar.validation.records import (
    DEFAULT_VOCAB,
    Recompute,
    parse_record,
    published_flops,
    read_records,
)

ENTRY = {
    "id": "made-up-1",
    "source_id": "made-up",
    "kind": "e2e_train",
    "status": "ok",
    "source": {"paper": "made up", "table": "1"},
    "hardware": {
        "gpu": "A100-SXM4-80GB",
        "n_gpus": 16,
        "gpus_per_node": 8,
        "inter_node": "one HDR adapter per GPU",
        "inter_node_gbs_per_gpu": 25.0,
    },
    "model": {"name": "m", "arch": "gpt", "layers": 4, "hidden": 256, "heads": 4, "seq": 128},
    "parallel": {
        "tp": 2, "pp": 2, "dp": 4, "mbs": 2, "gbs": 32, "microbatches": 4, "precision": "fp16",
        "recompute": "full",
    },
    "measured": {"iter_s": 1.0, "mem_gib": 10.0},
}  # fmt: skip


def changed(**parts):
    entry = copy.deepcopy(ENTRY)
    for name, values in parts.items():
        if isinstance(values, dict):
            entry[name] |= values
            entry[name] = {k: v for k, v in entry[name].items() if v != "drop"}
        else:
            entry[name] = values
    return entry


def test_a_whole_record_is_read_and_says_what_it_assumed():
    record = parse_record(ENTRY)
    assert record.layout.tp == (2, 2)
    assert record.layout.dp == (4, 4)
    assert record.layout.layer_shares == (2.0, 2.0)
    assert record.shape.vocab == DEFAULT_VOCAB
    assert record.shape.ffn == 1024
    assert record.measured.memory_bytes == 10 * 2**30
    assert {"model.vocab", "model.ffn", "model.kv_heads", "parallel.cp"} <= set(record.assumed)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (changed(model={"hidden": "drop"}), "model.hidden is missing"),
        (changed(model={"heads": 3}), "no multiple of model.heads"),
        (changed(model={"arch": "rnn"}), "model.arch is 'rnn'"),
        (changed(model={"layers": -1}), "must be above 0"),
        (changed(model={"layers": 2.5}), "not a whole number"),
        (changed(model={"seq": float("nan")}), "not a number"),
        (changed(parallel={"tp": "drop", "dp": "drop"}), "the plan is not stated"),
        (changed(parallel={"dp": 5, "gbs": 40}), "the degrees use 20"),
        (
            changed(
                kind="layer_time",
                hardware={"n_gpus": 3},
                measured={"layer_fwd_ms": 1.0},
            ),
            "n_gpus is 3, but the degrees use 16",
        ),
        (changed(hardware={"hbm_gbs": 2.039}), "hbm_gbs is 2.039, at least 10 is believed"),
        (changed(hardware={"mem_gb": 80_000}), "at most 10000 is believed"),
        (changed(hardware={"intra_node_bw_gbs": 1e-300}), "at least 0.1 is believed"),
        (changed(measured={"iter_s": 1e-300}), "at least 1e-05 is believed"),
        (changed(measured={"mem_gib": 1e-9}), "at least 0.001 is believed"),
        (changed(parallel={"gbs": 33}), "gbs 33 is not dp 4 x mbs 2 x microbatches 4"),
        (changed(parallel={"microbatches": 2.5}), "is not dp 4 x mbs 2 x microbatches 2.5"),
        (changed(parallel={"microbatches": "drop", "gbs": 36}), "microbatches 4.5"),
        (changed(parallel={"dp": [4, 3], "gbs": 32}), "does not divide a micro-batch of 8"),
        (changed(parallel={"tp": []}), "parallel.tp is an empty list"),
        (changed(parallel={"tp": [2, 2, 2]}), "has 3 entries for pp 2"),
        (changed(parallel={"pp": 10**12}), "at most 1024 is believed"),
        (changed(parallel={"mbs": 10**400}), "is believed"),
        (changed(parallel={"pp": 1024, "gbs": 2**20, "microbatches": 2**17}), "actions"),
        (changed(parallel={"virtual_stages": 3}), "do not divide into pp 2 x virtual stages 3"),
        (changed(parallel={"schedule": "zigzag"}), "parallel.schedule is 'zigzag'"),
        (changed(parallel={"kernel": "magic"}), "parallel.kernel is 'magic'"),
        (changed(parallel={"compile": "yes"}), "parallel.compile is 'yes'"),
        (changed(parallel={"async_tp": 1}), "parallel.async_tp is 1"),
        (changed(parallel={"cpu_offload": True}), "not predicted"),
        (changed(parallel={"layer_split": [0, 4]}), "layer_split has 2 entries, must have 3"),
        (changed(parallel={"layer_split": [0, 5, 3]}), "layer_split must rise from 0"),
        (changed(parallel={"ops_per_stage": ["a", 1]}), "ops_per_stage is 'a', not a number"),
        (changed(parallel={"ops_per_stage": [0, 0]}), "holds no operator"),
        (changed(measured={"stage_max_reserved_mb": [None]}), "is None, not a number"),
        (changed(model={"layers": 10**12}), "model.layers is 1000000000000, at most"),
        (changed(model={"layers": 5}), "model.layers 5 do not divide into pp 2"),
        (changed(model={"heads": 1}), "parallel.tp 2 does not divide model.heads 1"),
        (changed(model={"kv_heads": 3}), "no multiple of model.kv_heads 3"),
        (changed(hardware={"gpus_per_node": 0.5}), "not a whole number"),
        (changed(parallel={"recompute": "sometimes"}), "has no known meaning"),
        (changed(parallel={"precision": "int4"}), "has no known meaning"),
        (changed(parallel={"zero_stage": 7}), "known are 0 to 3"),
        (changed(parallel={"tp": [2, 2, 2]}), "3 entries for pp 2"),
        (changed(parallel={"mbs": "drop", "microbatches": "drop"}), "does not follow"),
        (changed(measured={"iter_s": "drop"}), "no iteration time"),
        (changed(kind="inference"), "kind is 'inference'"),
        (changed(status="lost"), "status is 'lost'"),
        (changed(model="nothing"), "model is missing"),
    ],
)
def test_what_is_missing_or_odd_is_named(entry, reason):
    with pytest.raises(SkipRecord, match=reason):
        parse_record(entry)


def test_the_example_of_the_readme_is_a_whole_record():
    text = Path(autopar.validation.__file__).with_name("README.md").read_text(encoding="utf-8")
    record = parse_record(json.loads(text.split("```json")[1].split("```")[0]))
    assert (record.source, record.measured.iteration_s) == ("ours", 1.9)
    assert set(record.assumed) <= {"model.kv_heads", "parallel.cp"}


def test_lines_that_cannot_be_used_are_counted_and_never_guessed(tmp_path):
    path = tmp_path / "runs.jsonl"
    lines = [
        json.dumps(ENTRY), "", "{broken", "[1]", json.dumps(changed(model={"heads": "drop"})),
    ]  # fmt: skip
    path.write_text("\n".join(lines))
    records, skipped = read_records(path)
    assert [r.name for r in records] == ["made-up-1"]
    assert [s.reason.split(" (")[0] for s in skipped] == [
        "line is no JSON", "line is no JSON object", "model.heads is missing",
    ]  # fmt: skip


def test_lines_of_any_form_are_counted_and_never_end_the_command(tmp_path):
    file = tmp_path / "f.jsonl"
    good = json.dumps({**ENTRY, "notes": "one\u2028line"}, ensure_ascii=False)
    bad = ["[" * 20_000, "1" * 5_000, "null", json.dumps({**ENTRY, "source_id": 7}), '{"id": 1']
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([good, *bad, good, ""]).encode())
    records, skipped = read_records(file)
    assert [r.name for r in records] == ["made-up-1", "made-up-1"]
    assert [r.line for r in records] == [1, 7]
    assert len(skipped) == len(bad)


def test_a_file_without_a_record_is_refused(tmp_path):
    file = tmp_path / "f.jsonl"
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no record"):
        read_records(file)


def test_memory_by_stage_is_of_the_first_stages_and_of_no_more_than_there_are():
    some = parse_record(changed(measured={"stage_max_reserved_mb": [100.0]}))
    every = parse_record(changed(measured={"stage_max_reserved_mb": [100.0, 200.0]}))
    assert some.measured.stage_memory_bytes == (100 * 2**20,)
    assert every.measured.stage_memory_bytes == (100 * 2**20, 200 * 2**20)
    with pytest.raises(SkipRecord, match=r"has 3 entries, parallel\.pp is 2"):
        parse_record(changed(measured={"stage_max_reserved_mb": [100.0, 200.0, 300.0]}))


def test_gigabytes_are_taken_as_torch_prints_them_and_that_is_counted():
    record = parse_record(changed(measured={"mem_gib": None, "mem_gb": 3.0}))
    assert record.measured.memory_bytes == 3 * 2**30
    assert "measured.mem_gb" in record.assumed
    assert "measured.mem_gb" not in parse_record(ENTRY).assumed


def test_a_memory_smaller_than_what_a_driver_keeps_is_refused():
    with pytest.raises(SkipRecord, match="less than a driver keeps"):
        cluster_of(Stated(gpu="A100-80GB", num_gpus=1, memory_gb=0.001))


@pytest.mark.parametrize("name", ["A100-PCIE-40GB", "H100 PCIe 80GB", "H200-NVL-141GB"])
def test_another_form_of_a_gpu_is_not_taken_for_the_known_one(name):
    with pytest.raises(SkipRecord, match="only the SXM form is known"):
        cluster_of(Stated(gpu=name, num_gpus=1))


def test_a_gpu_sold_with_fewer_links_has_fewer_unless_the_record_says_otherwise():
    def intra(gpu, stated=None):
        cluster = cluster_of(Stated(gpu=gpu, num_gpus=8, intra_gb_per_s=stated))
        return cluster.machines[0].intra.bandwidth_bytes_per_s

    assert intra("H800-80GB") == pytest.approx(intra("H100-SXM5-80GB") * 200 / 450)
    assert intra("H800-80GB", 450) == intra("H100-SXM5-80GB")


def test_sharded_parameters_name_the_framework_where_no_word_does():
    plain = changed(parallel={"zero_stage": 3})
    assert parse_record(plain).family.framework is Framework.FSDP
    named = parse_record({**plain, "notes": "ZeRO-3 of DeepSpeed"})
    assert named.family.framework is Framework.DEEPSPEED


def test_engines_with_stages_of_their_own_do_not_scatter_messages():
    assert parse_record(ENTRY).family.scatters_messages
    record = parse_record(changed(parallel={"ops_per_stage": [30, 26]}))
    assert record.family.framework is Framework.MEGATRON
    assert not record.family.scatters_messages


def test_a_source_that_is_not_in_the_file_is_refused_with_those_that_are(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(ENTRY))
    with pytest.raises(ConfigError, match="'other'.*it has made-up"):
        read_records(path, source="other")
    with pytest.raises(ConfigError, match="can't be read"):
        read_records(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("word", "kind", "share"),
    [
        ("none", Recompute.NONE, 1.0),
        ("full", Recompute.FULL, 1.0),
        ("selective", Recompute.CORE, 1.0),
        ("selective, per-microbatch partial", Recompute.CORE, 1.0),
        ("selective (per-op SAC default)", Recompute.PER_OPERATOR, 1.0),
        ("42% of ops recomputed", Recompute.SHARE, 0.42),
    ],
)
def test_words_for_recompute(word, kind, share):
    layout = parse_record(changed(parallel={"recompute": word})).layout
    assert (layout.recompute, layout.recompute_share) == (kind, share)


def test_layer_bounds_count_layers_and_not_the_entries_around_them():
    layout = parse_record(changed(parallel={"layer_split": [0, 3, 8]})).layout
    # two entries before the four layers, two after
    assert layout.layer_shares == (1.0, 3.0)


def test_a_rate_becomes_a_time_by_the_formula_that_the_record_names():
    entry = changed(
        measured={
            "iter_s": "drop",
            "tflops_per_gpu": 100,
            "flops_convention": "F=96*B*s*L*h^2*(...)",
        }
    )
    record = parse_record(entry)
    flops = published_flops(record.shape, 32, passes=4)
    assert record.measured.iteration_s == pytest.approx(flops / (16 * 100e12))


def test_published_flops_are_those_of_the_paper():
    shape = parse_record(ENTRY).shape
    b, s, layers, h, v = 32, 128, 4, 256, DEFAULT_VOCAB
    want = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert published_flops(shape, b, passes=4) == pytest.approx(want)


def test_an_unknown_gpu_is_skipped_and_the_known_ones_are_listed():
    with pytest.raises(SkipRecord, match="'TPU-v4'; known are A100"):
        cluster_of(Stated(gpu="TPU-v4", num_gpus=4))
    with pytest.raises(SkipRecord, match="without a memory size"):
        cluster_of(Stated(gpu="A100", num_gpus=4))


def test_a_cluster_has_what_the_record_states_and_says_what_it_took_for_granted():
    stated = Stated(
        gpu="A100-SXM4-80GB", num_gpus=20, per_node=8, inter_gb_per_s=12.5, network="InfiniBand"
    )
    cluster = cluster_of(stated)
    assert [m.num_devices for m in cluster.machines] == [8, 8, 4]
    inter = cluster.machines[0].inter
    assert inter.bandwidth_bytes_per_s == pytest.approx(RDMA_EFFICIENCY * 12.5e9)
    assert cluster.assumptions == ()
    silent = cluster_of(Stated(gpu="A100-SXM4-80GB", num_gpus=2))
    assert len(silent.assumptions) == 2


def test_a_family_is_read_off_the_words_of_a_record():
    assert parse_record(ENTRY).family.framework is Framework.MEGATRON
    llama = {"arch": "llama", "ffn": 512, "vocab": 1000}
    assert parse_record(changed(model=llama)).family.framework is Framework.TORCH
    assert parse_record(ENTRY).family.scatters_messages
    deep = parse_record(changed(notes="DeepSpeed pipeline engine"))
    assert not deep.family.scatters_messages
    assert deep.family.framework is Framework.DEEPSPEED
    flash = parse_record(changed(parallel={"kernel": "flash_attention2 + RMS kernel"})).family
    assert not flash.explicit_attention
    assert flash.fused == {"norm"}
    plain = parse_record(changed(parallel={"kernel": "torch"})).family
    assert plain.explicit_attention
    assert not plain.fused
