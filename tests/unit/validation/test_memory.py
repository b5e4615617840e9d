"""Bytes of a step: closed forms of what frameworks keep, and what their reports show of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.units import MIB
from autopar.validation.blocks import Collective
from autopar.validation.family import ALL_REGIONS, Framework
from autopar.validation.memory import FRAGMENTED_SHARE, predict_memory, printed_bytes
from autopar.validation.probes import Part
from autopar.validation.records import Shape, balanced_layers, parse_record
from autopar.validation.works import pieces_of, works_of
from tests.unit.validation.test_records import changed

S, B, H, FFN, VOCAB, TP = 128, 2, 256, 512, 1024, 2
LLAMA = {"arch": "llama", "ffn": FFN, "vocab": VOCAB}


def nanotron(**parallel):
    return parse_record(
        changed(notes="nanotron", model=LLAMA, parallel={"precision": "bf16", **parallel})
    )


def gathers(items):
    return sum(c for i, c in items if isinstance(i, Collective) and i.kind == "all_gather")


@pytest.mark.parametrize(
    ("shape", "pp", "want"),
    [
        # 243.3 M weights a layer, 536.9 M of the head: 8,321.5 M, of which half are 17.1 layers
        (Shape(arch="llama", layers=32, hidden=4096, ffn=14336, vocab=131072), 2, (18, 14)),
        (Shape(arch="llama", layers=32, hidden=4096, ffn=14336, vocab=131072), 4, (9, 9, 8, 6)),
        # exactly half is no excess: the next layer is taken too
        (Shape(arch="llama", layers=16, hidden=2048, ffn=8192, vocab=131072), 2, (11, 5)),
        (Shape(arch="llama", layers=28, hidden=3072, ffn=8192, vocab=131072), 1, (28,)),
    ],
)
def test_layers_are_balanced_against_the_head(shape, pp, want):
    assert balanced_layers(shape, pp) == want


def test_nanotron_splits_layers_and_the_sequence_and_says_that_it_was_assumed():
    record = nanotron()
    # 4 h^2 + 3 h f is 655,360 weights; the head's 262,144 are less than half of a layer
    assert record.layout.layer_shares == (3.0, 1.0)
    assert record.layout.sequence_parallel
    assert "parallel.seq_parallel" in record.assumed
    assert not nanotron(seq_parallel=False).layout.sequence_parallel
    assert not parse_record(changed(model=LLAMA)).layout.sequence_parallel


def test_inputs_that_were_gathered_are_kept_and_not_gathered_again():
    record = nanotron(recompute="none")
    cut = replace(record, family=replace(record.family, framework=Framework.MEGATRON))
    kept, again = (pieces_of(r)[Part.BLOCK] for r in (record, cut))
    whole_bytes = S * B * H * 2
    assert kept.saved_bytes - again.saved_bytes == pytest.approx(2 * whole_bytes * (1 - 1 / TP))
    assert gathers(kept.forward) == gathers(again.forward) == 2
    assert gathers(again.backward) - gathers(kept.backward) == 2
    # the two that stand for the reductions of forward stay
    assert gathers(kept.backward) == 2


def test_an_activation_that_is_two_kernels_keeps_its_inner_value():
    record = nanotron(recompute="none")
    assert record.family.fused == ALL_REGIONS - {"activation"}
    one = replace(record, family=replace(record.family, fused=ALL_REGIONS))
    apart, fused = (pieces_of(r)[Part.BLOCK].saved_bytes for r in (record, one))
    assert apart - fused == pytest.approx(S * B * FFN * 2 / TP)


def test_nanotron_prints_its_first_rank_and_others_their_fullest():
    record = nanotron()
    memory = predict_memory(works_of(record))
    last = replace(memory, rank=1, rank_bytes=(5.0, 9.0), rank_reserve_bytes=(1.0, 2.0))
    assert printed_bytes(record, last) == 5.0
    assert printed_bytes(parse_record(changed()), last) == 9.0


def test_a_list_of_stages_is_of_the_first_ranks_and_holds_what_was_reserved():
    listed = {"stage_max_reserved_mb": [10_000.0], "mem_gib": "drop"}
    record = parse_record(changed(measured=listed))
    assert record.measured.printed_bytes == 10_000 * MIB
    memory = predict_memory(works_of(record))
    memory = replace(memory, rank=1, rank_bytes=(5.0, 9.0), rank_reserve_bytes=(1.0, 2.0))
    assert printed_bytes(record, memory) == 6.0
    both = parse_record(changed(measured=listed | {"stage_max_reserved_mb": [1.0, 2.0]}))
    assert printed_bytes(both, memory) == 11.0


def test_torchtitan_prints_what_the_allocator_reserved():
    record = parse_record(
        changed(
            notes="torchtitan", model=LLAMA,
            parallel={"tp": 1, "pp": 1, "dp": 16, "microbatches": 1, "zero_stage": 3},
        )
    )  # fmt: skip
    assert record.family.framework is Framework.FSDP
    memory = predict_memory(works_of(record))
    lost = FRAGMENTED_SHARE * (memory.parts_bytes["activations"] + memory.parts_bytes["transients"])
    assert memory.reserve_bytes == pytest.approx(lost)
    assert printed_bytes(record, memory) == pytest.approx(memory.total_bytes + lost)


def test_a_compiler_casts_weights_where_they_are_read_and_holds_float32_scores():
    record = parse_record(
        changed(
            notes="xla", model={"vocab": 25_600},
            parallel={"tp": 1, "pp": 1, "dp": 16, "microbatches": 1, "zero_stage": 0},
        )
    )  # fmt: skip
    assert record.family.framework is Framework.XLA
    works = works_of(record)
    stage = works.stages[0]
    memory = predict_memory(works)
    assert memory.parts_bytes["buffers"] == 2 * max(2 * stage.layer_params, stage.edge_params)
    scores = S * B * 25_600
    # exponentials and gradient in float32, beside the kept scores
    assert pieces_of(record)[Part.HEAD].backward_peak_bytes == pytest.approx(8 * scores, rel=0.02)


def test_the_loss_on_split_scores_of_torch_holds_a_float32_copy_more():
    split = {
        "tp": 2, "pp": 1, "dp": 8, "gbs": 16, "microbatches": 1, "zero_stage": 3,
        "seq_parallel": True,
    }  # fmt: skip
    record = parse_record(
        changed(notes="torchtitan", model=LLAMA | {"vocab": 25_600}, parallel=split)
    )
    head = pieces_of(record)[Part.HEAD].backward_peak_bytes
    scores = S * B * 25_600 / TP
    assert works_of(record).stages[0].backward_peak_bytes == pytest.approx(head + 4 * scores)
    whole = parse_record(
        changed(
            notes="torchtitan", model=LLAMA | {"vocab": 25_600},
            parallel=split | {"tp": 1, "dp": 16, "gbs": 32, "seq_parallel": False},
        )
    )  # fmt: skip
    head = pieces_of(whole)[Part.HEAD].backward_peak_bytes
    assert works_of(whole).stages[0].backward_peak_bytes == pytest.approx(head)
