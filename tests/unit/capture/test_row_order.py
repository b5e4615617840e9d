"""A batch that a view merges behind another dim comes first, where that is needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.tracing import Captured, capture
from autopar.sharding.build import signatures_of
from autopar.sharding.propagate import DataAxes
from tests.zoo import build

LENGTH, BATCH, WIDTH = 6, 4, 8


class Rows(nn.Module):
    """Attention over dim 0 of ``(S, B, E)``, with rows ``(S*B, E)`` before and behind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x, y):
        rows = self.inner(x.reshape(-1, WIDTH))
        if self.kind == "ordered":
            rows = rows.cumsum(0)
        if self.kind == "table":
            rows = rows + x.new_ones(LENGTH * BATCH, 1).cumsum(0)
        q = rows.view(LENGTH, BATCH * 2, WIDTH // 2).transpose(0, 1)
        mixed = functional.scaled_dot_product_attention(q, q, q).transpose(0, 1)
        result = self.outer(mixed.reshape(LENGTH * BATCH, WIDTH)).view(LENGTH, BATCH, 2)
        return functional.mse_loss(result, y)


def _batch() -> dict[str, torch.Tensor]:
    x, y = torch.randn(LENGTH, BATCH, WIDTH), torch.randn(LENGTH, BATCH, 2)
    return {"x": x.double(), "y": y.double()}


def _axes(captured: Captured) -> tuple[DataAxes, dict[str, int]]:
    axes = DataAxes(captured.graph, signatures_of(captured.graph))
    inputs = captured.graph.input_map()
    return axes, {inputs[n].target: d for n, d in axes.batch_dims(2).items()}


def _check_numbers(model: nn.Module, batch: dict[str, torch.Tensor], captured: Captured) -> None:
    results = run_graph(captured.graph, bind_inputs(captured, model, (), batch))
    loss = model(**batch)
    loss.backward()
    torch.testing.assert_close(results[f"loss:{captured.loss_path}"], loss)
    found = gradients(results)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-6)


def test_rows_with_the_batch_inside_can_be_cut_and_keep_their_numbers() -> None:
    torch.manual_seed(0)
    model, batch = Rows("plain").double(), _batch()
    captured = capture(model, (), batch)
    axes, dims = _axes(captured)
    assert dims == {"x": 1, "y": 1}
    assert axes.can_be_cut()
    _check_numbers(model, batch, captured)


@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_is_cut_along_its_samples(batch_first: bool) -> None:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

        def forward(self, x, y):
            return functional.mse_loss(self.attention(x, x, x, need_weights=False)[0], y)

    model, x, y = Mixed(), *torch.randn(2, LENGTH, BATCH, WIDTH)
    captured = capture(model, (), {"x": x, "y": y})
    axes, dims = _axes(captured)
    sample_dim = 0 if batch_first else 1
    assert dims == {"x": sample_dim, "y": sample_dim}
    assert axes.can_be_cut()
    _check_numbers(model, {"x": x, "y": y}, captured)


@pytest.mark.parametrize("kind", ["ordered", "table"])
def test_rows_whose_order_matters_stay_as_they_are(kind: str) -> None:
    # a scan along the rows, or a value by row number: another order would be another function
    torch.manual_seed(0)
    model, batch = Rows(kind).double(), _batch()
    captured = capture(model, (), batch)
    axes, _ = _axes(captured)
    assert not axes.can_be_cut()
    _check_numbers(model, batch, captured)


def test_a_model_whose_batch_is_outermost_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.capture.row_order._rules", pytest.fail)
    model, batch = build("gpt2", layers=1)
    capture(model, (), batch)
