"""What tracing spares itself changes no graph, and is left out where torch has no such name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar import torch_tracing
from autopar.capture.tracing import Captured, capture
from autopar.errors import CaptureError
from tests.zoo import build

MODELS = ("llama", "gpt2", "t5", "resnet")


def captured(name: str) -> Captured:
    model, batch = build(name, batch=4)
    return capture(model, (), batch)


class Counting(torch.nn.Module):
    """Changes a buffer in place, reads views of it, and has a value that its output shares."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.fc(x)
        h.relu_()
        self.seen += h.detach().sum(0)
        self.seen[:2].mul_(0.5)
        return (h * self.seen.view(2, 2).t().reshape(4)).sum(), h.t()


@contextmanager
def all_of_it() -> Iterator[None]:
    yield


@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_the_same_as_with_all_that_torch_makes(monkeypatch, name):
    spared = captured(name)
    monkeypatch.setattr(torch_tracing, "only_the_graph", all_of_it)
    assert captured(name).graph == spared.graph  # sources and scopes included


def test_a_program_of_changes_in_place_is_the_same_as_with_all_that_torch_makes(monkeypatch):
    spared = capture(Counting(), (torch.zeros(3, 4),))
    monkeypatch.setattr(torch_tracing, "only_the_graph", all_of_it)
    assert capture(Counting(), (torch.zeros(3, 4),)).graph == spared.graph


def test_a_torch_without_these_names_gives_the_same_program(monkeypatch):
    spared = captured("llama")
    monkeypatch.setattr(torch_tracing, "_NO_FUNCTION_NAMES", "no_such_argument")
    monkeypatch.setattr(torch_tracing, "_LAZY_MODULE", "torch.fx.no_such_module")
    optional = torch_tracing._optional
    monkeypatch.setattr(torch_tracing, "_optional", lambda module, _: optional(module, "no_such"))
    assert captured("llama").graph == spared.graph


class Failing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no forward")


def test_torch_has_its_own_functions_back_after_an_error():
    before = proxy_tensor.set_meta, torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(CaptureError, match="no forward"):
        capture(Failing(), (torch.zeros(2, 4),))
    after = proxy_tensor.set_meta, torch.nn.functional.scaled_dot_product_attention
    assert after == before


def test_a_trace_on_another_thread_has_all_that_torch_makes():
    described: list[bool] = []

    def trace() -> None:
        graph = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.zeros(2)).graph
        described.extend("tensor_meta" in node.meta for node in graph.nodes if node.op != "output")

    with torch_tracing.only_the_graph():
        other = threading.Thread(target=trace)
        other.start()
        other.join()
    assert described == [True, True]
