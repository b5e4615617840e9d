from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from autopar.capture.tracing import capture
from autopar.report.coverage import coverage
from autopar.sharding.build import signatures_of
from autopar.sharding.propagate import DataAxes
from tests.zoo import build


class Towers(nn.Module):
    """Two inputs that meet in a product of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(
                nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
            )
            for _ in range(2)
        )

    def forward(self, a, b):
        scores = self.left(a) @ self.right(b).T
        return functional.cross_entropy(scores, torch.arange(len(a)))


def test_a_language_model_is_covered_and_split() -> None:
    model, batch = build("gpt2", layers=1)
    found = coverage(capture(model, (), batch).graph)
    assert found.unruled == ()
    assert found.unruled_flops_share == found.unruled_share == 0.0
    assert found.whole_flops_share < 0.001
    assert found.flops > 0


def test_an_operator_without_a_rule_is_counted_with_its_arithmetic() -> None:
    model, batch = build("gpt2", layers=1)
    graph = capture(model, (), batch).graph
    rules = {n: None if "attention" in n else s for n, s in signatures_of(graph).items()}
    found = coverage(graph, rules)
    assert {text.split(" at ")[0] for text in found.unruled} == {
        "autopar.attention",
        "autopar.attention_backward",
    }
    assert 0.01 < found.unruled_flops_share < 0.5


def test_both_towers_of_a_contrastive_loss_are_split() -> None:
    batch = {"a": torch.randn(8, 16), "b": torch.randn(8, 16)}
    graph = capture(Towers(), (), batch).graph
    dims = DataAxes(graph, signatures_of(graph)).batch_dims(2)
    assert dims == {"u_a": 0, "u_b": 0}
    # but for one gradient, a sum over ranks in which moving the factor would cost more
    assert coverage(graph).whole_flops_share < 0.05


def test_work_that_data_ranks_repeat_is_counted_by_operator() -> None:
    # sorting along the batch can't be split: every rank sorts all of it
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return (self.linear(x).flatten().sort().values * torch.arange(512.0)).sum()

    found = coverage(capture(Sorted(), (), {"x": torch.randn(8, 64)}).graph)
    assert "aten.sort.default" in dict(found.whole)
    assert found.whole_flops_share > 0.001
