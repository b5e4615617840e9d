"""Parts that a plan can't hold are refused by name at compile; casts after it at the next call."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError, ConfigError

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(0, 5, (4, 3), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = nn.Linear(6, 6) if part is None else part
        self.head = nn.Linear(6, 9)

    def forward(self, x):
        return self.head(self.part(x)).pow(2).mean()


class Decomposed(Model):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        square = self.head(self.part(x)).view(-1, 3, 3)
        return self.function(square @ square.mT + torch.eye(3)).sum()


def compile_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "wrap",
    [lambda m: torch.compile(m, backend="eager"), compile_in_place],
    ids=["torch.compile", "Module.compile"],
)
def test_a_submodule_under_torch_compile_is_refused_by_name(wrap):
    with pytest.raises(CaptureError, match=r"torch.compile was applied to module 'part' \(Linear"):
        autopar.compile(Model(wrap(nn.Linear(6, 6))), devices=1, inputs=(X,))


def test_a_function_under_torch_compile_is_refused_without_a_log_of_torch(caplog):
    model = Decomposed(torch.compile(torch.tanh, backend="eager"))
    with pytest.raises(CaptureError, match="a function under torch.compile") as error:
        autopar.compile(model, devices=1, inputs=(X,))
    assert "return self.function(" in str(error.value)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("function", [torch.linalg.cholesky, torch.linalg.inv])
def test_a_function_that_checks_values_is_refused_with_its_line_and_the_form_without(function):
    with pytest.raises(
        CaptureError,
        match=r"_linalg_check_errors\S* at test_refused_parts.py:\d+ in forward .*cholesky_ex",
    ):
        autopar.compile(Decomposed(function), devices=1, inputs=(X,))


def test_the_form_that_does_not_check_values_runs():
    model = Decomposed(lambda square: torch.linalg.cholesky_ex(square)[0])
    wanted = model(X).item()
    assert autopar.compile(model, devices=1, inputs=(X,))(X).item() == pytest.approx(wanted)


def test_an_embedding_with_sparse_gradients_is_refused_at_compile():
    model = Model(nn.Embedding(5, 6, sparse=True))
    with pytest.raises(CaptureError, match="in module 'part' makes a sparse tensor.*sparse=True"):
        autopar.compile(model, devices=1, inputs=(IDS,))


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.float64),
        lambda m: m.part.bfloat16(),
    ],
    ids=["half", "to", "submodule"],
)
def test_a_cast_after_compile_is_refused_by_the_name_of_a_parameter(cast):
    compiled = autopar.compile(Model(), devices=1, inputs=(X,))
    cast(compiled)
    with pytest.raises(ConfigError, match=r"'part.weight' was cast to torch.\w+ after"):
        compiled(X)


def test_casting_to_the_dtype_that_parameters_have_changes_nothing():
    compiled = autopar.compile(Model(), devices=1, inputs=(X,))
    before = compiled(X).item()
    assert compiled.float().cpu()(X).item() == before
