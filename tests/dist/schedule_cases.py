"""Training under one schedule on real processes, beside the same model on one device.

Arguments: number of processes, and the options of ``autopar.compile`` as ``name=value``. The model
is in float64 with dropout and a tied embedding; gradients accumulate over two calls per step.
"""

import copy
import json
import sys
from typing import Any

import torch
from torch import nn

import autopar

STEPS = 2
TOLERANCE = 1e-10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.up(self.norm(x)).tanh()))


class Tied(nn.Module):
    """float64 throughout: no operator rounds to a lower precision inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def check(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    gap = float((found - wanted).abs().max())
    allowed = TOLERANCE * max(float(wanted.abs().max()), 1e-3)
    assert gap <= allowed, f"{what} differs by {gap:.3g}, allowed is {allowed:.3g}"


def given() -> tuple[str, dict[str, Any], Tied, dict[str, torch.Tensor]]:
    """Number of processes, options, a new model and a batch."""
    world, *words = sys.argv[1:]
    options = {name: json.loads(value) for name, value in (word.split("=") for word in words)}
    torch.manual_seed(0)
    model = Tied().double()
    ids = torch.randint(0, 24, (14, 5))
    return world, options, model, {"ids": ids, "labels": ids.roll(-1, 1)}


def train_beside(model: Tied, twin: Tied, batch: dict[str, torch.Tensor], *, calls: int) -> None:
    """Train both, gradients summed over some calls per step; losses and parameters must agree."""
    both = (model, twin)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in both]
    for step in range(STEPS):
        for _ in range(calls):
            losses = [each(**batch) for each in both]
            check(f"loss of step {step}", *(loss.detach() for loss in losses))
            for loss in losses:
                loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, wanted = (each.full_state_dict() for each in both)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        check(key, found[key], value)


def main() -> None:
    world, options, model, batch = given()
    twin = autopar.compile(copy.deepcopy(model), f"{world}:cpu", batch, dp=1, tp=1, pp=1)
    model = autopar.compile(model, f"{world}:cpu", batch, num_microbatches=7, **options)
    for name, value in options.items():
        found = getattr(model.plan, name, getattr(model.plan.mesh, name, value))
        assert found in (value, tuple(value) if isinstance(value, list) else value), (name, found)
    train_beside(model, twin, batch, calls=2)
    sys.stdout.write("passed\n")


if __name__ == "__main__":
    main()
