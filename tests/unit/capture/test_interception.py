"""The neutral attention that stands for torch's while a model is traced."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from autopar.capture.interception import neutral_attention, scaled_dot_product_attention

SHAPES = {
    "batch and heads": ((2, 3, 5, 4), (2, 3, 6, 4)),
    "one sample": ((1, 3, 5, 4), (1, 3, 6, 4)),
    "no batch": ((3, 5, 4), (3, 6, 4)),
    "neither batch nor heads": ((5, 4), (6, 4)),
    "two dims of samples": ((2, 2, 3, 5, 4), (2, 2, 3, 6, 4)),
    "one sample of keys": ((2, 3, 5, 4), (1, 3, 6, 4)),
    "one sample of queries": ((1, 3, 5, 4), (2, 3, 6, 4)),
    "one head of keys": ((2, 3, 5, 4), (2, 1, 6, 4)),
}


def operands(name: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = SHAPES[name]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in (q, k, k)
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_the_neutral_attention_computes_what_torchs_does(name):
    ours, theirs = operands(name), operands(name)
    out = scaled_dot_product_attention(*ours)
    expected = functional.scaled_dot_product_attention(*theirs)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_operands_that_fit_are_attended_to_without_views():
    tensors = [x.detach() for x in operands("batch and heads")]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v)

    graph = make_fx(attend, tracing_mode="fake")(*tensors).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called[0] == "autopar.attention.default"
    assert not any("view" in name or "expand" in name for name in called)


def test_torch_has_its_attention_back_after_an_error():
    before, seen = functional.scaled_dot_product_attention, []

    @neutral_attention()
    def fail() -> None:
        seen.append(functional.scaled_dot_product_attention)
        raise ValueError("in vain")

    with pytest.raises(ValueError, match="in vain"):
        fail()
    assert seen == [scaled_dot_product_attention]
    assert functional.scaled_dot_product_attention is before
