"""Operators that are written as simpler ones: strided copies, row-wise picks, weight norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.rewrites.strided import dense_order
from autopar.capture.tracing import capture
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.ir.promote import promote


def _captured(model: nn.Module, *args: torch.Tensor) -> Graph:
    """The program, once it has been found equal to torch in loss and gradients."""
    captured = capture(model, args)
    results = run_graph(captured.graph, bind_inputs(captured, model, args))
    loss = model(*args)
    loss.backward()
    torch.testing.assert_close(results[f"loss:{captured.loss_path}"], loss)
    found = gradients(results)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    return captured.graph


def _ops(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


class Scaled(nn.Module):
    """``function(x * weight)`` squared and summed."""

    def __init__(self, shape, function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self.weight, *args).square().sum()


def test_a_read_by_strides_of_a_whole_tensor_is_a_view_and_a_permutation() -> None:
    model = Scaled(
        (4, 6), lambda w: w.as_strided((6, 2, 2), (1, 12, 6)) * torch.arange(6.0).view(6, 1, 1)
    )
    graph = _captured(model)
    assert not {op for op in _ops(graph) if "strided" in op}


def test_a_write_by_strides_over_a_whole_tensor_is_the_value_written() -> None:
    def overwritten(w: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(4, 6, dtype=w.dtype)
        target.as_strided((6, 4), (1, 6)).copy_(w)
        return target * torch.arange(6.0)

    graph = _captured(Scaled((6, 4), overwritten))
    assert not {op for op in _ops(graph) if "strided" in op}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda w: w.as_strided((3, 6), (6, 1)), r"reads 18 of 24 elements"),
        (lambda w: w.as_strided((4, 6), (1, 1)), r"by strides \(1, 1\)"),
    ],
    ids=["part", "overlap"],
)
def test_a_read_by_strides_that_needs_a_memory_layout_is_refused(function, words) -> None:
    with pytest.raises(CaptureError, match=rf"test_simpler_forms\.py.* {words}.*use slicing"):
        capture(Scaled((4, 6), function), ())


def test_dense_order_of_broadcast_overlapping_and_permuted_strides() -> None:
    assert dense_order((4, 6), (6, 1)) == (0, 1)
    assert dense_order((4, 1, 6), (1, 99, 4)) == (1, 2, 0)
    assert dense_order((4, 6), (0, 1)) is None
    assert dense_order((), ()) == ()


@pytest.mark.parametrize(
    ("rows", "index"),
    [
        (lambda: torch.arange(4), torch.tensor([2, 0, 1, 1])),
        (lambda: torch.arange(4), torch.tensor([-1, 0, -3, 1])),  # from the end, as index has it
        (lambda: torch.arange(4)[:, None], torch.tensor([[0, 2], [1, 1], [2, 0], [0, -1]])),
    ],
    ids=["one", "negative", "two"],
)
def test_one_rows_own_index_is_a_gather(rows, index: torch.Tensor) -> None:
    graph = _captured(Scaled((4, 3, 5), lambda w, i: w[rows(), i] * torch.arange(5.0)), index)
    assert {"aten.gather.default", "aten.scatter_add.default"} <= _ops(graph)
    assert "aten.index.Tensor" not in _ops(graph)


@pytest.mark.parametrize(
    ("rows", "index"),
    [
        (lambda: torch.arange(3), torch.tensor([2, 0, 1])),  # not every row
        (lambda: torch.arange(4).flip(0), torch.tensor([2, 0, 1, 1])),  # in another order
        (lambda: torch.arange(4), torch.tensor([2])),  # one index for all rows
    ],
    ids=["part", "reversed", "shared"],
)
def test_other_indices_stay_an_index(rows, index: torch.Tensor) -> None:
    assert "aten.index.Tensor" in _ops(
        _captured(Scaled((4, 3, 5), lambda w, i: w[rows(), i]), index)
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm_is_written_with_simple_operators(dim: int) -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 5), dim=dim).double()
    model = nn.Sequential(layer, nn.Flatten(0))
    captured = capture(model, (torch.randn(2, 3, dtype=torch.float64),), loss=_square)
    assert not {op for op in _ops(captured.graph) if "weight_norm" in op}
    x = torch.randn(2, 3, dtype=torch.float64)
    results = run_graph(captured.graph, bind_inputs(captured, model, (x,), batch=x))
    loss = _square(model(x), x)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients(results)[name], parameter.grad)


def _square(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().sum()


def test_a_layer_on_joined_features_is_captured() -> None:
    # backward slices its gradient and forward joins its input: the mirror of a fused projection
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.top = nn.Linear(3, 4), nn.Linear(3, 2), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(torch.cat([self.left(x), self.right(x)], 1)).square().sum()

    _captured(Joined(), torch.randn(4, 3))


def test_floats_of_integers_follow_the_precision_of_the_program() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, time: torch.Tensor) -> torch.Tensor:
            steps = torch.exp(-0.3 * torch.arange(8) / 7)
            return (time[:, None] / 3 * steps * self.scale + time.sqrt()[:, None]).sum()

    model, time = Positions(), torch.arange(1, 5)
    captured = capture(model, (time,))
    loss = run_graph(captured.graph, bind_inputs(captured, model, (time,)))["loss:output"]
    torch.testing.assert_close(loss, model(time))
    graph = promote(captured.graph)
    values = bind_inputs(captured, model, (time,), graph=graph)
    wide = run_graph(graph, values)["loss:output"]
    assert wide.dtype == torch.float64
    steps = torch.exp(-0.3 * torch.arange(8).double() / 7)
    exact = (time.double()[:, None] / 3 * steps + time.double().sqrt()[:, None]).sum()
    torch.testing.assert_close(wide, exact, rtol=1e-12, atol=0)
