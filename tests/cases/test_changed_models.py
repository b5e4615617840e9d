"""What is changed in a model after it was compiled counts at the next call, or is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own habit

import autopar
from autopar.errors import ConfigError
from autopar.runtime import session
from autopar.runtime.changes import ModelChanges
from tests.cases.eager_parity import check

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Act(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.drop = nn.Dropout(0.0)
        self.act = Act(torch.tanh)
        self.factor, self.shifts, self.step = 1.0, [0.0, 1.0], 0
        self.mask = torch.ones(6)
        self.tensors = [torch.ones(6)]

    def forward(self, x):
        h = self.act(self.b(self.drop(self.a(x)))) * self.factor
        return (h * self.mask * self.tensors[0] + sum(self.shifts)).pow(2).mean()


def replace_activation(m: nn.Module) -> None:
    m.act = Act(torch.sin)


CHANGES = {
    "a factor": lambda m: setattr(m, "factor", 5.0),
    "a factor of another type": lambda m: setattr(m, "factor", True),
    "an entry of a list": lambda m: m.shifts.__setitem__(0, 2.0),
    "a tensor": lambda m: setattr(m, "mask", torch.full((6,), 3.0)),
    "a tensor in a list": lambda m: m.tensors.__setitem__(0, torch.full((6,), 7.0)),
    "a tensor in a list, in place": lambda m: m.tensors[0].fill_(7.0),
    "a hook of a submodule": lambda m: m.b.register_forward_hook(lambda _m, _i, out: out * 2),
    "a hook of two levels": lambda m: m.act.register_forward_pre_hook(lambda _m, args: args[0] + 1),
    "a module without tensors": replace_activation,
    "a function": lambda m: setattr(m.act, "function", F.gelu),
    "dropout of everything": lambda m: setattr(m.drop, "p", 1.0),
}


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(X)
    loss.backward()
    grads = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_after_compile_counts_at_the_next_call(change):
    model = Model()
    eager = copy.deepcopy(model)
    compiled = autopar.compile(model, devices=1, inputs=(X,))
    check(step(compiled), step(eager))
    for one in (compiled, eager):
        change(one)
    check(step(compiled), step(eager))
    for one in (compiled.eval(), eager.eval()):
        one.factor = 0.5
    check(step(compiled), step(eager))


def test_a_second_module_of_the_same_class_counts_too():
    model = Model()
    eager = copy.deepcopy(model)
    compiled = autopar.compile(model, devices=1, inputs=(X,))
    for function in (torch.sin, torch.cos, torch.relu, torch.tanh, torch.exp):
        compiled.act, eager.act = Act(function), Act(function)
        check(step(compiled), step(eager))


def test_a_change_between_compile_and_the_first_call_counts():
    model = Model()
    eager = copy.deepcopy(model)
    compiled = autopar.compile(model, devices=1, inputs=(X,))
    compiled.factor = eager.factor = 3.0
    check(step(compiled), step(eager))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "b", nn.Linear(6, 6)), r"'b' \(Linear\) was replaced by a Linear"),
        (lambda m: setattr(m, "act", nn.Linear(6, 6)), r"'act' \(Act\) was replaced by a Linear"),
        (lambda m: delattr(m, "b"), r"'b' \(Linear\) was removed"),
    ],
    ids=["same class", "first tensors", "removed"],
)
def test_a_module_with_tensors_is_not_replaced_after_compile(change, words):
    compiled = autopar.compile(Model(), devices=1, inputs=(X,))
    change(compiled)
    with pytest.raises(ConfigError, match=words):
        compiled(X)


@pytest.fixture
def captures(monkeypatch):
    """A list that grows by one entry with every capture of a call."""
    made: list[object] = []
    capture = session.capture

    def counted(*args, **kwargs):
        made.append(args)
        return capture(*args, **kwargs)

    monkeypatch.setattr(session, "capture", counted)
    return made


def test_a_counter_that_the_program_does_not_read_is_soon_left_alone(captures):
    compiled = autopar.compile(Model(), devices=1, inputs=(X,))
    for number in range(12):
        compiled.step = number
        compiled(X).backward()
    assert len(captures) == 3
    compiled.factor = 2.0  # others still count
    compiled(X)
    assert len(captures) == 4


def test_going_back_to_what_was_captured_captures_nothing(captures):
    compiled = autopar.compile(Model(), devices=1, inputs=(X,))
    before = compiled(X).item()
    for _ in range(3):
        compiled.factor = 2.0
        assert compiled(X).item() != before
        compiled.factor = 1.0
        assert compiled(X).item() == before
    assert len(captures) == 1


def test_training_and_evaluation_are_no_changes(captures):
    compiled = autopar.compile(Model(), devices=1, inputs=(X,))
    for _ in range(3):
        compiled.train()(X)
        compiled.eval()(X)
    assert len(captures) == 1


def test_changes_are_told_apart_by_value_and_not_by_address():
    model = Model()
    changes = ModelChanges(model)
    model.factor = float("1.0")
    assert changes.of(model).changes == ()
    model.factor = 2.5
    model.drop.p = 0.25
    assert changes.of(model).changes == (("factor", "(2.5,)"), ("drop.p", "(0.25,)"))
