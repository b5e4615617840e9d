"""Errors of the user's model name the user's line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.tracing import capture
from autopar.errors import CaptureError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Branch(Model):
    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y.sum()


class Item(Model):
    def forward(self, x):
        return self.linear(x).sum() * x.max().item()


class Selection(Model):
    def forward(self, x):
        y = self.linear(x)
        return y[y > 0].sum()


class Boom(Model):
    def forward(self, x):
        return self.helper(self.linear(x))

    def helper(self, y):
        raise ValueError("boom")


class Shuffle(Model):
    def forward(self, x):
        return self.linear(x)[torch.randperm(2)].sum()


@pytest.mark.parametrize(
    ("kind", "line"),
    [(Branch, "if y.sum() > 0:"), (Item, "return self.linear(x).sum() * x.max().item()"),
     (Selection, "return y[y > 0].sum()")],
)  # fmt: skip
def test_decision_by_value_names_the_line_and_ways_out(kind, line):
    with pytest.raises(CaptureError) as caught:
        capture(kind(), (torch.ones(2, 4),))
    text = str(caught.value)
    assert f"{kind.__name__}.forward can't be captured: it decides by the value of a tensor" in text
    assert f"in forward: `{line}`" in text
    assert "test_errors.py:" in text
    assert "torch.where" in text


def test_error_of_the_model_is_passed_on_with_its_line():
    with pytest.raises(CaptureError) as caught:
        capture(Boom(), (torch.ones(2, 4),))
    assert "Boom.forward raised ValueError: boom" in str(caught.value)
    assert 'in helper: `raise ValueError("boom")`' in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_error_of_the_loss_function_says_so():
    def loss(out, batch):
        raise KeyError("labels")

    with pytest.raises(CaptureError, match="function given as loss= raised KeyError: 'labels'"):
        capture(nn.Linear(4, 4), (torch.ones(2, 4),), loss=loss)


def test_random_operator_without_a_counter_form_is_refused():
    with pytest.raises(CaptureError, match=r"aten.randperm.default at test_errors.py:\d+ in forw"):
        capture(Shuffle(), (torch.ones(2, 4),))
