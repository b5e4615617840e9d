"""Small models for tests of precision, and how far two sets of gradients are apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.plan.decisions import decisions_of
from autopar.runtime.equivalence import verify_programs
from autopar.runtime.variants import schedule_actions
from autopar.sharding.build import localize
from autopar.solver.force import forced_plan
from tests.equivalence.harness import Problem

BATCH, WIDTH = 8, 32
Batch = Mapping[str, object]


class Mlp(torch.nn.Module):
    """Two layers and a norm; ``scale`` shrinks the loss, and with it the gradients."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.last(torch.nn.functional.gelu(self.norm(self.first(x))))
        return {"loss": (out.float() - y).square().mean() * self.scale, "out": out}


class Rotary(torch.nn.Module):
    """A position table from a float32 buffer, as models with rotary embeddings have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        frequencies = 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions.float().unsqueeze(-1) @ self.inv_freq.unsqueeze(0)
        table = torch.cat([angles.cos(), angles.sin()], -1)
        return (self.linear(x) * table.to(x.dtype)).float().square().mean()


def mlp_batch(seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(BATCH, WIDTH), "y": torch.randn(BATCH, WIDTH)}


def in_parameters(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Parameters cast, buffers not."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def one_step(model: torch.nn.Module, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, in float64."""
    output = model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Relative distance of all gradients together."""
    gap = sum(float((found[n].double() - w).square().sum()) for n, w in wanted.items())
    return float((gap / sum(float(w.square().sum()) for w in wanted.values())) ** 0.5)


class Blocks(torch.nn.Module):
    """Norm, a wide layer, an activation, a layer back: what a transformer keeps most of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(),
                torch.nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(3)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def check_plan(problem: Problem, **degrees: object) -> None:
    """Simulated ranks under a forced plan against one device, in float64."""
    made = forced_plan(problem.graph, "hash", **degrees)  # type: ignore[arg-type]
    programs = localize(problem.graph, decisions_of(made, problem.graph), problem.signatures)
    actions = schedule_actions(programs, made, backward=True, has_loss=True)
    outcome = verify_programs(problem.graph, programs, made.mesh, actions, problem.values)
    assert outcome.worst.ratio < 1
