"""A small file from its lines to tables and JSON."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace

import pytest

from autopar.plan.types import ScheduleKind
from autopar.validation.blocks import Collective
from autopar.validation.command import main
from autopar.validation.engine import summaries, validate, works_of_all
from autopar.validation.memory import predict_memory
from autopar.validation.predict import pipeline_time_s, predict_time
from autopar.validation.records import Recompute, parse_record
from autopar.validation.works import is_tied, layer_of, works_of
from cost_models.pipeline import balanced_step_time_s
from tests.unit.validation.test_records import ENTRY, changed


class FlatPrices:
    """A second for every kernel, ten for a collective."""

    pipelined_share = 1.0

    def work_s(self, work):
        return 1.0

    def collective_s(self, item: Collective, ranks):
        return 10.0 if len(ranks) > 1 else 0.0

    def issued_s(self, device_s, num_operators):
        return device_s

    def beside_s(self, compute_s, comm_s):
        return max(compute_s, comm_s)

    def step_s(self):
        return 0.5


def flat(_works):
    return FlatPrices()


@pytest.fixture(scope="module")
def works():
    return works_of(parse_record(ENTRY))


def test_works_are_plain_values_that_can_be_kept(works):
    assert pickle.loads(pickle.dumps(works)) == works
    assert predict_time(works) == predict_time(works)


def test_parts_of_a_step_add_up(works):
    for prices in ((), (flat,)):
        time = predict_time(works, *prices)
        assert sum(time.parts_s.values()) == pytest.approx(time.total_s)
        assert all(s >= -1e-12 for s in time.parts_s.values())


def test_groups_are_numbered_tensor_first_then_data_then_pipeline(works):
    assert works.ranks_of(0, "tp") == (0, 1)
    assert works.ranks_of(1, "tp") == (8, 9)
    assert works.ranks_of(1, "dp") == (8, 10, 12, 14)
    assert works.ranks_of(0, "pp") == (0, 8)


def test_a_balanced_pipeline_takes_what_the_closed_form_says(works):
    long = replace(works, microbatches=1001)
    messages = {(0, 1): 0.0, (1, 0): 0.0}
    got = pipeline_time_s(long, (1.0, 1.0), (2.0, 2.0), messages)
    want = balanced_step_time_s(
        ScheduleKind.ONE_F_ONE_B,
        num_ranks=2,
        num_microbatches=1001,
        forward_s=1.0,
        backward_s=2.0,
    )
    assert got == pytest.approx(want)


def test_full_recompute_costs_a_forward_and_keeps_inputs_alone():
    full = layer_of(parse_record(ENTRY)).stages[0]
    none = layer_of(parse_record(ENTRY), recompute=Recompute.NONE).stages[0]
    assert full.forward == none.forward
    count = sum(c for _, c in full.backward) - sum(c for _, c in none.backward)
    assert count == pytest.approx(sum(c for _, c in none.forward))
    assert full.saved_bytes == 2 * 128 * 2 * 256
    assert full.backward_peak_bytes > none.backward_peak_bytes


def test_zero_levels_divide_what_they_say():
    def parts(level):
        # one framework at every level: sharded parameters are FSDP's unless another is named
        record = parse_record(changed(notes="DeepSpeed", parallel={"zero_stage": level}))
        return predict_memory(works_of(record)).parts_bytes

    plain, one, two, three = (parts(level) for level in range(4))
    assert one["optimizer"] == pytest.approx(plain["optimizer"] / 4)
    assert one["gradients"] == plain["gradients"]
    assert two["gradients"] == pytest.approx(plain["gradients"] / 4)
    assert three["parameters"] == pytest.approx(plain["parameters"] / 4)


def test_mixed_precision_keeps_sixteen_bytes_per_parameter(works):
    memory = predict_memory(works)
    state = sum(memory.parts_bytes[n] for n in ("parameters", "gradients", "optimizer"))
    params = sum(s.params for s in works.stages[memory.rank :: works.pp])
    assert state == pytest.approx(16 * params)
    assert memory.fits


def test_a_head_that_is_the_embedding_is_counted_once_on_one_rank():
    one = {"tp": 1, "pp": 1, "dp": 16, "mbs": 2, "microbatches": 1}
    tied = works_of(parse_record(changed(parallel=one))).stages[0]
    vocab, h, s, layers = 51_200, 256, 128, 4
    assert tied.params == vocab * h + s * h + layers * (12 * h**2 + 13 * h) + 2 * h


@pytest.mark.parametrize(("stated", "is_shared"), [(0.0, False), (1.003, True), (1.1, False)])
def test_stated_parameters_tell_whether_a_head_is_the_embedding(stated, is_shared):
    h, ffn, vocab = 256, 512, 1000
    counted = 4 * (4 * h**2 + 3 * h * ffn + 2 * h) + vocab * h + h
    model = {"arch": "llama", "ffn": ffn, "vocab": vocab, "params_b": stated * counted / 1e9}
    if not stated:
        del model["params_b"]
    assert is_tied(parse_record(changed(model=model))) is is_shared


def test_a_model_that_is_too_large_is_told_so():
    wide = {"hidden": 16384, "heads": 128, "layers": 32}
    big = changed(model=wide, status="oom", measured={"iter_s": "drop"})
    assert not predict_memory(works_of(parse_record(big))).fits


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "runs.jsonl"
    lines = []
    for number, (tp, dp) in enumerate(((1, 8), (2, 4), (4, 2))):
        entry = changed(parallel={"tp": tp, "dp": dp, "microbatches": 16 // dp})
        entry["id"] = f"made-up-{number}"
        lines.append(entry)
    layer = copy.deepcopy(ENTRY) | {"id": "layer", "kind": "layer_time", "source_id": "layers"}
    layer["measured"] = {"layer_fwd_ms": 1.0, "layer_bwd_ms": 2.0}
    lines += [layer, changed(hardware={"gpu": "unknown"}), changed(model={"seq": "drop"})]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_every_record_is_predicted_or_skipped_with_a_reason(data):
    outcomes, skipped = validate(data)
    assert [o.record.name for o in outcomes] == ["made-up-0", "made-up-1", "made-up-2", "layer"]
    assert sorted(s.reason.split(";")[0] for s in skipped) == [
        "hardware.gpu is 'unknown'", "model.seq is missing",
    ]  # fmt: skip
    steps, layers = summaries(outcomes, skipped)
    assert (steps.records, steps.skipped, steps.groups[0].count) == (3, 2, 3)
    assert layers.other is not None
    assert layers.other.count == 2
    assert len(works_of_all(data)) == 3


def test_the_command_prints_tables_and_writes_every_prediction(data, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["--data", str(data), "--source", "made-up", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "made-up" in text
    assert "skipped: 2" in text
    written = json.loads(out.read_text())
    first = written["records"][0]
    assert sum(first["predicted"]["parts_s"].values()) == pytest.approx(
        first["predicted"]["total_s"]
    )
    assert first["memory"]["fits"] is True
    assert [r["status"] for r in written["records"]] == ["ok"] * 3 + ["skipped"] * 2


def test_the_command_refuses_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["--data", str(tmp_path / "absent")]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_before_any_work(data, tmp_path, capsys):
    assert main(["--data", str(data), "--out", str(tmp_path / "none" / "o.json")]) == 2
    assert main(["--data", str(data), "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.count("name a file in one") == 2
