"""A user's own operator: without a rule it is replicated and reported, with one it is split."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.sharding.rules import default_registry
from autopar.solver.force import forced_plan


@torch.library.custom_op("autopar_tests::swish_pair", mutates_args=())
def swish_pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(a) * a * b


@swish_pair.register_fake
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("autopar_tests::swish_pair_backward", mutates_args=())
def swish_pair_backward(
    g: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.sigmoid(a)
    return g * b * (s + a * s * (1 - s)), g * a * s


@swish_pair_backward.register_fake
def _(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a), torch.empty_like(b)


swish_pair.register_autograd(
    lambda ctx, g: torch.ops.autopar_tests.swish_pair_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(8, 16, bias=False)
        self.up = torch.nn.Linear(8, 16, bias=False)
        self.down = torch.nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swish_pair(self.gate(x), self.up(x))).square().sum()


@pytest.fixture
def ruled() -> object:
    """The rules registered for the length of one test."""
    rules = default_registry()
    kept = dict(rules._rules)
    autopar.register_op("autopar_tests.swish_pair", "(b, h), (b, h) -> (b, h)")
    autopar.register_op(
        "autopar_tests.swish_pair_backward", "(b, h), (b, h), (b, h) -> (b, h), (b, h)"
    )
    yield None
    rules._rules.clear()
    rules._rules.update(kept)


def test_an_operator_without_a_rule_is_replicated_and_listed() -> None:
    captured = capture(Gated(), (torch.randn(4, 8),))
    plan = forced_plan(captured.graph, captured.hash, tp=2)
    assert {text.split(" at ")[0] for text in plan.unruled} == {
        "autopar_tests.swish_pair.default",
        "autopar_tests.swish_pair_backward.default",
    }
    assert "test_custom_op.py" in plan.unruled[0]


def test_an_operator_with_a_rule_is_split_between_column_and_row(ruled: object) -> None:
    del ruled
    captured = capture(Gated(), (torch.randn(4, 8),))
    plan = forced_plan(captured.graph, captured.hash, tp=2)
    assert plan.unruled == ()
    names = [n.name for n in captured.graph.nodes if "swish_pair" in n.op]
    assert all(name in plan.splits["tp"] for name in names)


@pytest.mark.parametrize("is_ruled", [False, True])
def test_equivalence_of_a_custom_operator(is_ruled: bool, request: pytest.FixtureRequest) -> None:
    if is_ruled:
        request.getfixturevalue("ruled")
    report = autopar.verify(Gated(), 2, {"x": torch.randn(4, 8)}, tp=2)
    assert report.num_ranks == 2
