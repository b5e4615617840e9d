"""The neutral operators against torch's own, and random bits under sharding."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from autopar.capture import neutral
from autopar.capture.attention_kernels import (
    AttentionOptions,
    Kernel,
    fused_forward,
    fused_gradients,
)
from autopar.capture.interception import Interception
from autopar.capture.reference import bind_inputs, gradients, run_graph

NONE = (0, 0, 0, 0)


def random_attention(dtype=torch.float64, *, heads=4, kv_heads=2, rows=6, columns=5):
    torch.manual_seed(0)
    q = torch.randn(2, heads, rows, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, columns, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def mask_of(kind, dtype):
    if kind == "bool":
        mask = torch.rand(2, 1, 6, 5) > 0.4
        mask[0, 0, 2] = False  # a row that reads nothing
        return mask
    if kind == "float":
        return torch.randn(1, 4, 6, 5, dtype=dtype, requires_grad=True)
    return None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_attention_and_gradients_equal_torch(dtype, kind, causal):
    q, k, v = random_attention(dtype)
    mask = mask_of(kind, dtype)
    with Interception():
        out = functional.scaled_dot_product_attention(
            query=q, key=k, value=v, attn_mask=mask, is_causal=causal, enable_gqa=True
        )
    whole = mask
    if causal:
        lower = torch.ones(6, 5, dtype=torch.bool).tril()
        if kind == "float":
            whole = mask.masked_fill(~lower, float("-inf"))
        else:
            whole = lower if mask is None else mask & lower
    repeated = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = functional.scaled_dot_product_attention(q, *repeated, whole)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {}
    torch.testing.assert_close(out, expected, **tolerance)
    inputs = [q, k, v, *([mask] if kind == "float" else [])]
    g = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, g), torch.autograd.grad(expected, inputs, g), **tolerance
    )


@pytest.mark.parametrize("kernel", [Kernel.CUDA_FLASH, Kernel.CUDA_EFFICIENT])
def test_calls_of_cuda_kernels_fit_their_schemas(kernel):
    dtype = torch.bfloat16 if kernel is Kernel.CUDA_FLASH else torch.float32
    q, k, v = (torch.empty(2, heads, 40, 16, dtype=dtype, device="meta") for heads in (4, 2, 2))
    options = AttentionOptions(True, 0, 0.3, 0.0, 0, (2, 4, 40, 40), NONE)
    o, lse = fused_forward(kernel, q, k, v, None, options)
    assert (o.shape, lse.shape) == ((2, 4, 40, 16), (2, 4, 40))
    found = fused_gradients(kernel, o, q, k, v, o, lse, None, options)
    assert [g.shape for g in found] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_cuda_kernels_equal_the_formula(dtype, causal):
    q, k, v = (x.detach().cuda() for x in random_attention(dtype, rows=40, columns=40))
    sizes, do = (2, 4, 40, 40), torch.randn_like(q)
    found, expected = [], []
    # a mask that bans nothing sends the call to the formula
    for results, mask in ((found, None), (expected, q.new_ones(40, 40, dtype=torch.bool))):
        common = (mask, None, causal, 0, 0.3, 0.0, 0, sizes, NONE)
        o, lse = neutral.attention(q, k, v, *common)
        results += [o, lse, *neutral.attention_backward(do, q, k, v, o, lse, *common, False)[:3]]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_attention_of_other_ranks_equals_torch():
    torch.manual_seed(0)
    for shape in [(5, 8), (3, 5, 8), (2, 3, 4, 5, 8)]:
        q, k, v = (torch.randn(shape) for _ in range(3))
        expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with Interception():
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.testing.assert_close(out, expected)


def test_interception_ends_with_its_block():
    before = functional.scaled_dot_product_attention
    with Interception():
        pass
    assert functional.scaled_dot_product_attention is before


def test_row_blocks_of_causal_attention_are_rows_of_the_whole():
    q, k, v = random_attention(rows=8, columns=8)
    sizes = (2, 4, 8, 8)
    whole, lse = neutral.attention(q, k, v, None, None, True, 0, 0.3, 0.0, 0, sizes, NONE)
    for start in (0, 4):
        rows = q[:, :, start : start + 4]
        part, part_lse = neutral.attention(
            rows, k, v, None, None, True, start, 0.3, 0.0, 0, sizes, (0, 0, start, 0)
        )
        torch.testing.assert_close(part, whole[:, :, start : start + 4])
        torch.testing.assert_close(part_lse, lse[:, :, start : start + 4])


def test_attention_dropout_of_a_block_is_the_block_of_the_whole():
    q, k, v = random_attention()
    key, sizes = torch.tensor(7), (2, 4, 6, 5)
    common = (None, key, False, 0, 0.3, 0.4, 3, sizes)
    whole, lse = neutral.attention(q, k, v, *common, NONE)
    do = torch.randn_like(whole)
    dq, dk, _, _ = neutral.attention_backward(do, q, k, v, whole, lse, *common, NONE, False)
    # batch 1, heads 2 and 3 (key head 1), rows 3 to 5
    at = (slice(1, 2), slice(2, 4), slice(3, 6))
    offsets = (1, 2, 3, 0)
    part, part_lse = neutral.attention(q[at], k[1:, 1:], v[1:, 1:], *common, offsets)
    torch.testing.assert_close(part, whole[at])
    part_dq, *_ = neutral.attention_backward(
        do[at], q[at], k[1:, 1:], v[1:, 1:], part, part_lse, *common, offsets, False
    )
    torch.testing.assert_close(part_dq, dq[at])
    assert dk.shape == k.shape


def test_attention_dropout_has_the_gradient_of_what_it_computes():
    q, k, v = random_attention()
    sizes = [2, 4, 6, 5]

    def attend(q, k, v):
        return torch.ops.autopar.attention(
            q, k, v, None, torch.tensor(7), True, 0, 0.3, 0.4, 3, sizes, [0, 0, 0, 0]
        )[0]

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_dropout_of_a_block_is_the_block_of_the_whole():
    x, key = torch.randn(6, 8, 10), torch.tensor(123)
    whole, kept = neutral.dropout(x, key, 0.3, 5, x.shape, (0, 0, 0))
    part, part_kept = neutral.dropout(x[2:4, :, 5:], key, 0.3, 5, x.shape, (2, 0, 5))
    assert torch.equal(part, whole[2:4, :, 5:])
    assert torch.equal(part_kept, kept[2:4, :, 5:])


def test_dropout_keeps_the_right_share_and_scales_it():
    x, key = torch.ones(512, 512), torch.tensor(1)
    y, kept = neutral.dropout(x, key, 0.3, 0, x.shape, (0, 0))
    # 262,144 draws: the standard deviation of the share is 0.0009
    assert abs(kept.float().mean() - 0.7) < 0.004
    torch.testing.assert_close(y, kept / 0.7)
    for dim in (0, 1):  # no row or column stands out: 512 draws, deviation 0.02
        assert (kept.float().mean(dim) - 0.7).abs().max() < 0.1


def test_dropout_bits_differ_by_key_and_operator():
    x = torch.ones(64, 64)
    kept = [
        neutral.dropout(x, torch.tensor(key), 0.5, op, x.shape, (0, 0))[1].flatten().float()
        for key, op in [(1, 0), (1, 1), (2, 0), (2**40, 0)]
    ]
    correlation = torch.corrcoef(torch.stack(kept)) - torch.eye(4)
    assert correlation.abs().max() < 0.06  # 4,096 draws: deviation 0.016


def test_normal_numbers_are_normal():
    x = neutral.normal_numbers(torch.tensor(3), 0, (400, 400), (400, 400), (0, 0), torch.float32)
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 1) < 0.02
    assert abs((x.abs() < 1).float().mean() - 0.6827) < 0.01


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit"])
def test_program_with_dropout_repeats_under_a_key(case, name):
    model, batch, captured = case(name, 0.1)
    runs = [
        run_graph(captured.graph, bind_inputs(captured, model, (), batch, rng_key=key))
        for key in (1, 1, 2)
    ]
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())
    assert runs[0]["loss:loss"] != runs[2]["loss:loss"]
    assert all(g.isfinite().all() for g in gradients(runs[0]).values())


def test_random_operators_have_distinct_numbers(case):
    graph = case("bert", 0.1).captured.graph
    numbers = [
        n.args[3] if n.op == "autopar.dropout" else n.args[9]
        for n in graph.nodes
        if n.op in ("autopar.dropout", "autopar.attention")
    ]
    assert numbers == list(range(len(numbers)))
    backward = [n.args[12] for n in graph.nodes if n.op == "autopar.attention_backward"]
    forward = [n.args[9] for n in graph.nodes if n.op == "autopar.attention"]
    assert backward == forward[::-1]


@pytest.mark.parametrize("weighted", [False, True])
def test_nll_of_parts_adds_up_to_the_mean_of_the_whole(weighted):
    torch.manual_seed(0)
    logp = torch.randn(12, 5).log_softmax(-1)
    target = torch.randint(0, 5, (12,))
    target[:5] = 2**31  # any number can be the ignored one
    weight = torch.rand(5) if weighted else None
    total = sum(neutral.nll_loss_sum(logp[i : i + 4], target[i : i + 4], weight, 2**31)
                for i in (0, 4, 8))  # fmt: skip
    count = sum(neutral.nll_count(target[i : i + 4], weight, 2**31, torch.float32)
                for i in (0, 4, 8))  # fmt: skip
    expected = functional.nll_loss(logp, target, weight, ignore_index=2**31)
    torch.testing.assert_close(total / count, expected)


@pytest.mark.parametrize(
    "name", ["attention", "dropout", "batch_norm", "nll_loss_sum", "nll_loss_backward", "uniform"]
)
def test_fakes_have_the_shapes_of_the_real_results(name):
    q, k, v = random_attention(torch.float32)
    x, w = torch.randn(4, 3, 5), torch.ones(3)
    logp, target, key = torch.randn(4, 5), torch.randint(0, 5, (4,)), torch.tensor(1)
    samples = {
        "attention": (q, k, v, None, None, True, 0, 0.3, 0.0, 0, [2, 4, 6, 5], [0] * 4),
        "dropout": (x, key, 0.5, 0, [4, 3, 5], [0, 0, 0]),
        "batch_norm": (x, w, w, w, w, 0.1, 1e-5),
        "nll_loss_sum": (logp, target, None, -100),
        "nll_loss_backward": (torch.tensor(1.0), target, None, -100, 5, torch.float32),
        "uniform": (key, 0, [2, 3], [4, 3], [2, 0], torch.bfloat16),
    }
    operator = getattr(torch.ops.autopar, name).default
    torch.library.opcheck(operator, samples[name], test_utils="test_faketensor")
