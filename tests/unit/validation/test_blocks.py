"""Blocks: the collectives, bytes and FLOPs of a layer under the split that Megatron writes."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.errors import ConfigError
from autopar.validation.blocks import Collective, PieceKey, piece_of
from autopar.validation.chains import EVERYTHING, region_of
from autopar.validation.family import ALL_REGIONS
from autopar.validation.formulas import evaluate
from autopar.validation.models import BlockShape
from autopar.validation.probes import Part
from cost_models.flops import OpClass, Work

S, B, H, A = 256, 2, 512, 8
GPT = BlockShape(
    arch="gpt", hidden=H, heads=A, kv_heads=A, ffn=4 * H, vocab=1024, seq=S, batch=B,
    explicit_attention=True, dropout=0.1,
)  # fmt: skip
LLAMA = BlockShape(
    arch="llama", hidden=H, heads=A, kv_heads=2, ffn=1408, vocab=1024, seq=S, batch=B
)


def gpt(**changes):
    return piece_of(PieceKey(part=Part.BLOCK, shape=GPT, fused=ALL_REGIONS, **changes))


def collectives(items):
    found = Counter()
    for item, count in items:
        if isinstance(item, Collective):
            found[item.kind] += count
    return dict(found)


def flops(items, op_class=OpClass.MATMUL):
    return sum(i.flops * c for i, c in items if isinstance(i, Work) and i.op_class is op_class)


def test_tensor_parallel_blocks_have_two_all_reduces_each_way():
    piece = gpt(tp=4)
    assert collectives(piece.forward) == {"all_reduce": 2}
    assert collectives(piece.backward) == {"all_reduce": 2}
    sizes = {i.payload_bytes for i, _ in piece.forward if isinstance(i, Collective)}
    assert sizes == {2.0 * S * B * H}


def test_sequence_parallel_blocks_gather_and_scatter_and_gather_again_for_weights():
    piece = gpt(tp=4, sequence_parallel=True)
    assert collectives(piece.forward) == {"all_gather": 2, "reduce_scatter": 2}
    assert collectives(piece.backward) == {"all_gather": 4, "reduce_scatter": 2}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_llama_blocks_with_grouped_heads_have_the_same_form(sequence_parallel):
    key = PieceKey(part=Part.BLOCK, shape=LLAMA, tp=2, sequence_parallel=sequence_parallel)
    piece = piece_of(key)
    want = {"all_gather": 2, "reduce_scatter": 2} if sequence_parallel else {"all_reduce": 2}
    assert collectives(piece.forward) == want


@pytest.mark.parametrize(
    ("changes", "formula"),
    [
        ({}, "s*b*h*(34+5*a*s/h)"),
        ({"tp": 4}, "s*b*h*(10+24/t+5*a*s/(h*t))"),
        ({"tp": 4, "sequence_parallel": True}, "s*b*h*(34/t+5*a*s/(h*t))"),
        ({"tp": 4, "recompute": "selective"}, "s*b*h*(10+24/t)"),
        ({"tp": 4, "recompute": "selective", "sequence_parallel": True}, "s*b*h*34/t"),
    ],
)
def test_saved_bytes_are_those_of_the_published_table(changes, formula):
    t = changes.get("tp", 1)
    want = evaluate(formula, {"s": S, "b": B, "h": H, "a": A, "t": t})
    # the statistics of the norms are not in the table
    assert gpt(**changes).saved_bytes == pytest.approx(want, rel=0.005)


def test_flops_are_those_of_the_published_formula():
    one = gpt()
    want = 72 * B * S * H**2 * (1 + S / (6 * H))
    assert one.flops == pytest.approx(want)
    assert gpt(tp=4).flops == pytest.approx(want / 4)


def test_selective_recompute_runs_the_attention_core_once_more():
    extra = flops(gpt(tp=4, recompute="selective").backward) - flops(gpt(tp=4).backward)
    assert extra == pytest.approx(4 * B * S**2 * H / 4)


def test_parameters_of_a_block_and_of_the_ends():
    assert gpt().params == 12 * H**2 + 13 * H
    # norms and the biases after rows stay whole
    assert gpt(tp=4).params == 12 * H**2 // 4 + (4 * H + 3 * H) // 4 + 6 * H
    ends = [
        piece_of(PieceKey(part=part, shape=GPT, tp=4)).params
        for part in (Part.EMBEDDING, Part.HEAD)
    ]
    assert ends == [1024 * H // 4 + S * H, 1024 * H // 4 + 2 * H]


def test_the_split_head_reduces_rows_of_scores_and_never_the_vocabulary():
    piece = piece_of(PieceKey(part=Part.HEAD, shape=GPT, tp=4))
    sizes = [
        i.payload_bytes for i, _ in (*piece.forward, *piece.backward) if isinstance(i, Collective)
    ]
    assert max(sizes) == 2 * S * B * H  # the gradient of the head's input
    assert sorted(sizes)[-2] <= 4 * S * B


def test_a_loss_on_gathered_scores_gathers_them_once_and_holds_all_of_them():
    whole, split = (
        piece_of(PieceKey(part=Part.HEAD, shape=GPT, tp=4, split_loss=f)) for f in (False, True)
    )
    sizes = [i.payload_bytes for i, _ in whole.forward if isinstance(i, Collective)]
    assert sizes == [2 * S * B * GPT.vocab]
    assert flops(whole.forward) == flops(split.forward)
    scores = 4 * S * B * GPT.vocab
    assert whole.saved_bytes - split.saved_bytes == pytest.approx(scores * 3 / 4, rel=0.01)


def test_fused_kernels_move_and_keep_less():
    plain, fused, compiled = (
        piece_of(PieceKey(part=Part.BLOCK, shape=LLAMA, fused=f))
        for f in (frozenset(), ALL_REGIONS, frozenset({EVERYTHING}))
    )

    def moved(piece):
        return sum(
            i.moved_bytes * c
            for i, c in (*piece.forward, *piece.backward)
            if isinstance(i, Work) and i.op_class is OpClass.MEMORY
        )

    assert moved(compiled) < moved(fused) < moved(plain)
    assert fused.saved_bytes < plain.saved_bytes
    assert flops(plain.forward) == flops(fused.forward) == flops(compiled.forward)


def test_regions_are_told_by_module_names():
    assert region_of("block.norm_2") == "norm"
    assert region_of("block.attention.core") == "softmax"
    assert region_of("block.attention.core.drop") == ""
    assert region_of("block.residual_1.drop") == "residual"


def test_a_split_that_does_not_divide_a_weight_is_refused():
    with pytest.raises(ConfigError, match="is not a multiple of tp 3"):
        gpt(tp=3)
