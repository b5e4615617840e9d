"""The normal form of programs: which operators occur, and that rewrites keep the numbers."""

from __future__ import annotations

import time

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.tracing import capture
from tests.zoo import build, tiny_models

GONE = {
    "aten.addmm.default", "aten.t.default", "aten.transpose.int", "aten._unsafe_view.default",
    "aten.detach.default", "aten.alias.default", "aten.clone.default", "aten.mean.dim",
    "aten.lift_fresh_copy.default", "aten.split.Tensor", "aten.unsqueeze.default",
    "aten.squeeze.dim", "aten.slice_backward.default", "aten.select_backward.default",
    "aten.slice_scatter.default", "aten.select_scatter.default", "aten.zeros.default",
    "aten.zeros_like.default", "aten.full_like.default", "aten.mul.Scalar", "aten.div.Scalar",
    "aten.add.Scalar", "aten.native_dropout.default", "aten.nll_loss_forward.default",
    "aten.native_batch_norm_backward.default", "aten.arange.default", "aten.copy.default",
}  # fmt: skip


def attentions(graph):
    return [n for n in graph.nodes if n.op == "autopar.attention"]


def ops(graph):
    return {n.op for n in graph.nodes}


def assert_same_as_eager(model, args=(), kwargs=None, *, loss=None, batch=None, rtol=1e-4):
    """Loss and gradients of the captured program are the model's; gives the program."""
    kwargs = kwargs or {}
    captured = capture(model, args, kwargs, loss=loss, batch=batch)
    results = run_graph(captured.graph, bind_inputs(captured, model, args, kwargs, batch=batch))
    model.zero_grad()
    output = model(*args, **kwargs)
    if loss is not None:
        value = loss(output, batch if batch is not None else args[0])
    else:
        value = output if isinstance(output, torch.Tensor) else output.loss
    value.backward()
    (key,) = (k for k in results if k.startswith("loss:"))
    torch.testing.assert_close(results[key], value)
    for name, gradient in gradients(results).items():
        torch.testing.assert_close(
            gradient, model.get_parameter(name).grad, rtol=rtol, atol=1e-5, msg=name
        )
    return captured.graph


@pytest.mark.parametrize("name", tiny_models())
def test_replaced_operators_do_not_occur(case, name):
    assert not ops(case(name, 0.1).captured.graph) & GONE


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_models_have_no_mask(case, name):
    nodes = attentions(case(name).captured.graph)
    assert [(n.args[3], n.args[5], n.args[6]) for n in nodes] == [(None, True, 0)] * 2


def test_grouped_heads_are_not_repeated(case):
    graph = case("llama").captured.graph
    metas = graph.metas()
    for node in graph.nodes:
        if node.op in ("autopar.attention", "autopar.attention_backward"):
            first = 1 if node.op == "autopar.attention" else 2
            shapes = [metas[node.args[first + i].name].shape for i in (0, 1)]
            assert shapes == [(4, 2, 16, 8)] * 2


def test_bert_has_no_mask_unless_it_is_given_one(case):
    assert {(n.args[3], n.args[5]) for n in attentions(case("bert").captured.graph)} == {
        (None, False)
    }
    model, batch = build("bert", batch=4)
    batch["attention_mask"] = torch.ones(4, 16, dtype=torch.int64)
    batch["attention_mask"][1, 10:] = 0
    graph = assert_same_as_eager(model, (), batch)
    assert all(n.args[3] is not None for n in attentions(graph))


def test_padding_of_a_causal_model_stays_and_causal_is_taken_out():
    model, batch = build("llama", batch=4)
    batch["attention_mask"] = torch.ones(4, 16, dtype=torch.int64)
    batch["attention_mask"][1, 10:] = 0
    graph = assert_same_as_eager(model, (), batch)
    metas = graph.metas()
    for node in attentions(graph):
        assert node.args[5] is True
        assert metas[node.args[3].name].shape == (4, 1, 1, 16)


def test_bias_of_t5_stays_and_causal_is_taken_out(case):
    graph = case("t5").captured.graph
    metas = graph.metas()
    forms = [(n.args[3] and metas[n.args[3].name].shape, n.args[5]) for n in attentions(graph)]
    bias = (1, 4, 16, 16)
    encoder, decoder, cross = (bias, False), (bias, True), (None, False)
    assert forms == [encoder, encoder, decoder, cross, decoder, cross]


@pytest.mark.parametrize(("window", "form"), [(4, (False, True)), (64, (True, False))])
def test_sliding_window_is_folded_only_if_it_covers_everything(window, form):
    config = transformers.MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    ids = torch.randint(0, 32, (2, 16))
    model = transformers.MistralForCausalLM(config)
    graph = assert_same_as_eager(model, (), {"input_ids": ids, "labels": ids})
    (node,) = attentions(graph)
    assert (node.args[5], node.args[3] is not None) == form


def test_long_masks_are_folded_quickly():
    config = transformers.MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=10**6,
    )  # fmt: skip
    ids = torch.zeros(8, 8192, dtype=torch.int64)
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(config)
    begun = time.process_time()
    (node,) = attentions(capture(model, (), {"input_ids": ids, "labels": ids}).graph)
    assert (node.args[3], node.args[5]) == (None, True)
    assert time.process_time() - begun < 5


class Moves(nn.Module):
    """Operators that move elements."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)  # (4, 6, 8)
        a, b = y.chunk(2, -1)
        c, d, e = y.split([1, 2, 5], 2)
        y = torch.cat([b, a, e, c.expand(-1, -1, 2), d], -1).roll((1, -1), (0, 1))
        y = torch.stack([y[:, ::2], y[:, 1::2]], 2).unbind(1)[1]
        y = y.repeat(1, 2, 1).repeat_interleave(2, dim=0).flatten(1)
        y = functional.pad(y, (2, -3)).unsqueeze(0).squeeze(0)
        z = torch.zeros(8, y.shape[1])
        z[:, 3:9] = y[:, :6]
        z[0] = y[1]
        z[:, ::3] = 1.0
        return (z * y.T.contiguous().T).sum() + y[:, -1].mean()


class Sums(nn.Module):
    """Reductions and scalar arithmetic."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        z = y.var() + y.std(-1).sum() + y.var(1, unbiased=False).mean() + y.mean((0, 2)).sum()
        z = z + torch.var_mean(y, dim=(0, 2), keepdim=True)[1].sum()
        z = z + (1 - y).sum() + (2 / (y * y + 1)).sum() + torch.sub(y, x, alpha=3).mean()
        z = z + torch.addmm(y[0], y[1], y[2].T @ y[3, :6], beta=0.5, alpha=2.0).sum()
        z = z + torch.where(y > 0, y, 0.1).sum() + y.masked_fill(y < 0, 2.0).sum()
        return z + (y @ torch.arange(8.0)).sum() + torch.baddbmm(x, x, x.mT @ y).sum()


@pytest.mark.parametrize("kind", [Moves, Sums])
def test_rewrites_keep_the_numbers(kind):
    torch.manual_seed(0)
    graph = assert_same_as_eager(kind(), (torch.randn(4, 6, 8),))
    assert not ops(graph) & (GONE - {"aten.slice_scatter.default"})


@pytest.mark.parametrize(
    "layer",
    [
        nn.Sequential(nn.Conv1d(6, 8, 3), nn.GroupNorm(2, 8), nn.GELU()),
        nn.Sequential(nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8)),
        nn.Sequential(nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8, affine=False)),
        nn.Sequential(nn.Conv1d(6, 8, 3), nn.InstanceNorm1d(8, affine=True)),
        nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.SiLU()),
        nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.GLU()),
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4),
                      nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
    ],
    ids=["group", "batch", "batch_plain", "instance", "rms", "glu", "images"],
)  # fmt: skip
def test_layers_keep_the_numbers(layer):
    torch.manual_seed(0)
    assert_same_as_eager(layer, (torch.randn(4, 6, 8),), loss=lambda out, _: out.pow(2).mean())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_cross_entropy_keeps_the_numbers(reduction, weighted, images):
    torch.manual_seed(0)
    weight = torch.rand(5) if weighted else None
    model = nn.Conv2d(3, 5, 1) if images else nn.Linear(3, 5)
    x = torch.randn(4, 3, 2, 2) if images else torch.randn(4, 3)
    labels = torch.randint(0, 5, (4, 2, 2) if images else (4,))
    labels[0] = -100

    def loss(out, batch):
        each = functional.cross_entropy(out, batch, weight=weight, reduction=reduction)
        return (each * torch.arange(4.0)[(...,) + (None,) * (each.dim() - 1)]).sum()

    assert_same_as_eager(model, (x,), loss=loss, batch=labels)


def test_mean_over_no_label_is_nan_as_in_torch():
    model, labels = nn.Linear(3, 5), torch.full((4,), -100)
    loss = lambda out, batch: functional.cross_entropy(out, batch)  # noqa: E731
    captured = capture(model, (torch.randn(4, 3),), loss=loss, batch=labels)
    bound = bind_inputs(captured, model, (torch.randn(4, 3),), batch=labels)
    assert run_graph(captured.graph, bound)["loss:loss"].isnan()
