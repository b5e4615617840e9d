"""Random numbers that are not torch's are refused: a program would hold one draw for ever."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from autopar.capture.tracing import capture
from autopar.errors import CaptureError


class Skips(nn.Module):
    def __init__(self, draw) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return (x * self.draw(x)).sum()


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda _: random.choice([1.0, 2.0]), "random"),
        (lambda _: float(np.random.rand(1).item()), "numpy.random"),
    ],
    ids=["random", "numpy"],
)
def test_a_draw_outside_torch_is_refused_with_its_line(draw, name: str) -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist())
    with pytest.raises(CaptureError, match=rf"from {name}\n  at .*test_host_random\.py:\d+ in"):
        capture(Skips(draw), (torch.randn(2, 4),))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_a_draw_in_the_loss_function_is_refused_too() -> None:
    with pytest.raises(CaptureError, match="the function given as loss= draws a number"):
        capture(
            nn.Linear(4, 4),
            (torch.randn(2, 4),),
            loss=lambda output, _: output.sum() * random.random(),
        )


def test_a_draw_by_torch_is_captured() -> None:
    captured = capture(Skips(lambda x: torch.rand_like(x)), (torch.randn(2, 4),))
    assert "autopar.uniform" in {node.op for node in captured.graph.nodes}
