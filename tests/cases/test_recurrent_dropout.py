"""Dropout between the layers of a recurrent module is that of single layers with nn.Dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar

X = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(1))


class Recurrent(nn.Module):
    """The squared output and final states of one stack of layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, states = self.layers(x)
        states = states if isinstance(states, tuple) else (states,)
        return out.pow(2).mean() + sum(state.pow(2).mean() for state in states)


class OneByOne(nn.Module):
    """The layers of a recurrent module, with nn.Dropout between."""

    def __init__(self, whole: nn.RNNBase, **options: object) -> None:
        super().__init__()
        width = (whole.proj_size or whole.hidden_size) * (2 if whole.bidirectional else 1)
        sizes = [whole.input_size, *[width] * (whole.num_layers - 1)]
        self.parts = nn.ModuleList(
            type(whole)(size, whole.hidden_size, batch_first=True, **options) for size in sizes
        )
        self.drop = nn.Dropout(whole.dropout)
        for number, part in enumerate(self.parts):
            for name, value in part.named_parameters():
                value.data.copy_(getattr(whole, name.replace("_l0", f"_l{number}")))

    def forward(self, x):
        ends = []
        for number, part in enumerate(self.parts):
            if number:
                x = self.drop(x)
            x, states = part(x)
            ends.append(states if isinstance(states, tuple) else (states,))
        return x, tuple(torch.cat(tensors) for tensors in zip(*ends, strict=True))


def losses_and_gradients(model: nn.Module) -> tuple[list[float], list[torch.Tensor]]:
    compiled = autopar.compile(model, devices=1, inputs=(X,), seed=3)
    losses = []
    for _ in range(2):
        loss = compiled(X)
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad.norm() for p in compiled.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"proj_size": 2, "bias": False}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
    ids=["lstm", "projected lstm", "two-way gru", "rnn", "relu rnn"],
)
def test_dropout_between_recurrent_layers_is_that_of_layers_with_a_dropout_module(kind, options):
    torch.manual_seed(0)
    whole = kind(3, 4, num_layers=2, dropout=0.5, batch_first=True, **options)
    wanted = losses_and_gradients(Recurrent(OneByOne(whole, **options)))
    losses, gradients = losses_and_gradients(Recurrent(whole))
    assert losses == pytest.approx(wanted[0], rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients, wanted[1])


def test_recurrent_layers_in_eval_mode_have_no_dropout():
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True))
    wanted = model.eval()(X).item()
    compiled = autopar.compile(model.train(), devices=1, inputs=(X,))
    assert compiled(X).item() != pytest.approx(wanted, rel=1e-6)
    assert compiled.eval()(X).item() == pytest.approx(wanted, rel=1e-6)
