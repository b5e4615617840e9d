"""Operators that autopar has not seen before, and those that no plan can hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.capture.tracing import capture
from autopar.errors import AutoparError, CaptureError
from autopar.sharding.rules import default_registry
from autopar.solver.force import forced_plan

HEADS = 4


@torch.library.custom_op("autopar_cases::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over ``(B, H, S, D)`` as one operator of a library."""
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


@attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("autopar_cases::attend_backward", mutates_args=())
def attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scale = 1 / math.sqrt(q.shape[-1])
    weights = (q @ k.mT * scale).softmax(-1)
    d_weights = grad @ v.mT
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True)) * scale
    return d_scores @ k, d_scores.mT @ q, weights.mT @ grad


@attend_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


attend.register_autograd(
    lambda ctx, grad: torch.ops.autopar_cases.attend_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = attend(q, k, v).transpose(1, 2).flatten(2)
        return functional.mse_loss(self.out(mixed), y)


@pytest.fixture
def rule():
    """The rule that splits the operator along batch and heads, for the length of one test."""
    rules = default_registry()
    kept = dict(rules._rules)
    dims = "(b, h, s!, d!)"
    autopar.register_op("autopar_cases::attend", f"{dims}, {dims}, {dims} -> {dims}")
    autopar.register_op(
        "autopar_cases::attend_backward",
        f"{dims}, {dims}, {dims}, {dims} -> {dims}, {dims}, {dims}",
        linear=[(0,)],
    )
    yield
    rules._rules.clear()
    rules._rules.update(kept)


def _batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(4, 6, 16), "y": torch.randn(4, 6, 16)}


def test_a_library_operator_stays_one_operator() -> None:
    graph = capture(Attention(), (), _batch()).graph
    assert [n.op for n in graph.nodes if "attend" in n.op] == [
        "autopar_cases.attend.default",
        "autopar_cases.attend_backward.default",
    ]


def test_an_operator_without_a_rule_is_named_with_the_way_to_add_one() -> None:
    with pytest.raises(
        AutoparError, match=r"autopar_cases\.attend\.default at test_op_coverage\.py.*register_op"
    ):
        autopar.compile(Attention(), devices="2:a100-80gb", inputs=_batch(), on_unknown="error")


def test_an_operator_without_a_rule_still_gives_the_same_numbers() -> None:
    assert autopar.verify(Attention(), 2, _batch(), tp=2).num_ranks == 2


@pytest.mark.usefixtures("rule")
def test_an_operator_with_a_rule_is_split_along_its_heads() -> None:
    captured = capture(Attention(), (), _batch())
    plan = forced_plan(captured.graph, captured.hash, tp=2)
    assert plan.unruled == ()
    assert "attend" in plan.splits["tp"]
    assert "| h" in str(plan.splits["tp"]["attend"])
    assert autopar.verify(Attention(), plan, _batch()).mesh == "tp2"


class ResNet18Like(nn.Module):
    """Convolution, batch norm, max pool, two residual blocks, adaptive pool, flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )  # fmt: skip
        self.first, self.second = _block(8, 8, 1), _block(8, 16, 2)
        self.short = nn.Conv2d(8, 16, 1, 2, bias=False)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        x = functional.relu(x + self.first(x))
        x = functional.relu(self.short(x) + self.second(x))
        return functional.cross_entropy(self.head(x), label)


def _block(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
        nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
    )  # fmt: skip


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_residual_network_keeps_loss_and_running_statistics(degrees: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = {"image": torch.randn(4, 3, 32, 32), "label": torch.randint(0, 5, (4,))}
    model = ResNet18Like()
    ranks = math.prod(degrees.values())
    report = autopar.verify(model, ranks, batch, **degrees)
    # 1 loss; per batch norm 2 statistics and a count; gradient and stepped weight per parameter
    assert report.num_tensors == 1 + 5 * 3 + 2 * len(list(model.parameters()))


class Chooses(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.kind == "nonzero":
            rows = torch.nonzero(h[:, 0] > 0)
            return h[rows].sum()
        return torch.masked_select(h, h > 0).sum()


@pytest.mark.parametrize("kind", ["nonzero", "masked_select"])
def test_a_result_whose_size_depends_on_values_is_refused_with_module_and_line(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Chooses(kind))
    with pytest.raises(CaptureError) as caught:
        autopar.compile(model, devices=1, inputs={"input": torch.randn(4, 4)})
    text = str(caught.value)
    assert "test_op_coverage.py" in text
    assert f"torch.{kind}(h" in text
    assert "in module '1' of class Chooses" in text
    assert f"aten.{kind}" in text
    assert "torch.where" in text
