"""A traced model keeps nothing of the trace; what its forward assigns to buffers is recorded."""

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.errors import CaptureError, ConfigError


class Model(torch.nn.Module):
    """One layer, a buffer, and room for attributes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.cache = {}
        self.losses = []


class Assigns(Model):
    """Counts by assignment, not in place."""

    def forward(self, x):
        self.seen = self.seen + x.detach().sum(0)
        return (self.layer(x) * self.seen).sum()


class Keeps(Model):
    """Keeps values in an attribute, a dict and a list."""

    def forward(self, x):
        if "positions" not in self.cache:
            self.cache["positions"] = torch.arange(4.0).to(x)
        self.last = self.layer(x) * self.cache["positions"]
        self.losses.append(self.last.sum())
        return self.losses[-1]


class Registers(Model):
    """Makes a buffer in its forward."""

    persistent = True

    def forward(self, x):
        self.register_buffer("table", torch.arange(4.0), persistent=self.persistent)
        return (self.layer(x) * self.table).sum()


class MakesTable(Registers):
    """The same as a cache."""

    persistent = False


def test_a_buffer_that_forward_assigns_is_updated_under_a_plan():
    model = Assigns()
    assert autopar.verify(model, 2, torch.randn(4, 4), dp=2).mesh == "dp2"
    compiled = autopar.compile(model, 1, torch.ones(4, 4))
    compiled(torch.ones(4, 4))
    compiled(torch.ones(4, 4))
    assert compiled.seen.tolist() == [8.0] * 4


def test_attributes_and_containers_hold_no_tensor_of_the_trace():
    model = Keeps()
    captured = capture(model, (torch.randn(4, 4),))
    assert not hasattr(model, "last")
    assert model.cache == {}
    assert model.losses == []
    assert (
        "assigns to attributes is not kept (3, such as cache, last, losses)"
        in (captured.assumptions[0])
    )
    assert autopar.verify(model, 2, torch.randn(4, 4), dp=2).num_ranks == 2


def test_what_forward_does_not_keep_is_an_assumption_of_the_plan():
    compiled = autopar.compile(Keeps(), 2, torch.randn(4, 4))
    assert any("assigns to attributes" in text for text in compiled.plan.assumptions)


def test_a_new_persistent_buffer_is_refused_and_not_left_behind():
    model = Registers()
    with pytest.raises(CaptureError, match=r"buffer 'table' the form .*before it had none"):
        capture(model, (torch.randn(4, 4),))
    assert "table" not in dict(model.named_buffers())


def test_a_buffer_that_is_a_cache_is_made_in_every_step():
    assert autopar.verify(MakesTable(), 2, torch.randn(4, 4), dp=2).num_ranks == 2


def test_a_tensor_with_history_in_an_attribute_does_not_stop_verify():
    model = Keeps()
    model(torch.randn(4, 4))
    assert autopar.verify(model, 2, torch.randn(4, 4), dp=2).num_ranks == 2


def test_lazy_parameters_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"2 parameters of LazyLinear .* 'weight'; call"):
        capture(torch.nn.LazyLinear(4), (torch.randn(2, 3),))
