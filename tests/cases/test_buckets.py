"""Gradients reduced and parameters gathered in buckets are those of single collectives."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.runtime.simulate import SimulatedStep
from autopar.sharding import buckets
from autopar.sharding.programs import LocalPrograms
from autopar.solver.force import forced_plan
from tests.equivalence.harness import Problem, problem_of, simulate, worst_difference
from tests.moe_models import build as build_moe

OVER_DP = {"*.experts.gate_up_proj": "S(0)@dp"}


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, a frozen and an unused parameter, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 10)
        self.up, self.down = nn.Linear(10, 7), nn.Linear(7, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.norm = nn.LayerNorm(10)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(10, 13, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        x = self.norm(x + self.scale * self.down(functional.gelu(self.up(x))))
        return functional.cross_entropy(self.head(self.frozen(x)).flatten(0, 1), labels.flatten())


def uneven(precision: str | None = None) -> Problem:
    torch.manual_seed(0)
    ids = torch.randint(0, 13, (8, 3))
    return problem_of(Uneven(), {"ids": ids, "labels": ids.roll(-1, 1)}, precision=precision)


def collectives(programs: LocalPrograms) -> int:
    return sum(
        node.op.startswith("comm.")
        for stage in programs.stages
        for graph in (stage.unshard, stage.reduce)
        for node in graph.nodes
    )


def planned(problem: Problem, **degrees: object) -> Plan:
    """One plan for all sizes of buckets, of whose prices it may depend."""
    return forced_plan(problem.graph, "hash", **degrees)  # type: ignore[arg-type]


def step_of(problem: Problem, plan: Plan) -> tuple[LocalPrograms, SimulatedStep]:
    return simulate(problem, decisions_of(plan, problem.graph), plan.mesh, plan.schedule)


PLANS: Mapping[str, dict[str, object]] = {
    "dp2, two micro-batches": {"dp": 2, "num_microbatches": 2},
    "dp4": {"dp": 4},
    "zero1": {"dp": 4, "zero": 1},
    "zero2": {"dp": 2, "zero": 2, "num_microbatches": 2},
    "zero3": {"dp": 4, "zero": 3},
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "dp2 x tp2 x zero3": {"dp": 2, "tp": 2, "zero": 3},
    "tied over stages": {"pp": 2, "dp": 2, "num_microbatches": 2, "zero": 1},
}


@pytest.mark.parametrize("most_bytes", [300, buckets.BUCKET_BYTES])
@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_those_of_single_collectives(
    name: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = uneven()
    plan = planned(problem, **PLANS[name])
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 0)
    alone, wanted = step_of(problem, plan)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", most_bytes)
    together, found = step_of(problem, plan)
    assert collectives(together) < collectives(alone)
    assert found.grads.keys() == wanted.grads.keys()
    for key, grad in found.grads.items():
        assert torch.equal(grad, wanted.grads[key]), key
    assert worst_difference(found, problem.reference())[0] <= 1.0


def test_low_precision_parameters_and_their_float32_gradients_have_buckets_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = uneven("bf16")
    plan = planned(problem, dp=2, zero=3)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 0)
    _, wanted = step_of(problem, plan)
    monkeypatch.undo()
    together, found = step_of(problem, plan)
    for key, grad in found.grads.items():
        assert torch.equal(grad, wanted.grads[key]), key
    unshard = together.stages[0].unshard
    assert sum(n.op == "local.pack" for n in unshard.nodes) >= 1


@pytest.mark.parametrize(
    "degrees", [{"dp": 2, "placements": OVER_DP}, {"dp": 2, "zero": 3, "placements": OVER_DP}]
)
def test_experts_of_data_ranks_are_reduced_with_nobody(
    degrees: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_of(*build_moe("mixtral"))
    plan = planned(problem, **degrees)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 0)
    alone, wanted = step_of(problem, plan)
    monkeypatch.undo()
    together, found = step_of(problem, plan)
    assert collectives(together) < collectives(alone) / 2
    for key, grad in found.grads.items():
        assert torch.equal(grad, wanted.grads[key]), key
    assert worst_difference(found, problem.reference())[0] <= 1.0
    reduce = together.stages[0].reduce
    moved = {r for n in reduce.nodes for r in n.refs()}
    targets = {i.target for i in reduce.inputs if i.name in moved}
    assert not any("gate_up_proj" in target for target in targets)
