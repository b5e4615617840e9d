"""What a micro-batch takes at least, and the splits that take it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.api.compiling import capture_call
from autopar.cluster import parse_devices
from autopar.solver.analysis import Analysis
from autopar.solver.bodies import Bodies, Body
from autopar.solver.constraints import Constraints
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import Move, Pass, SplitsProblem, choice_terms_s
from autopar.solver.splits_structure import GroupKind
from autopar.solver.work import Work
from cost_models.analytic import AnalyticCostModel

SIZES = (4, 2, 2)


class Layer(nn.Module):
    """Two parts that add to what they read: a layer is two blocks of the chain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(torch.sigmoid(self.mix(self.norms[0](x))))
        return x + self.dropout(self.down(torch.relu(self.up(self.norms[1](x)))))


class Stack(nn.Module):
    """Layers behind an embedding, whose sum with positions the first one reads."""

    def __init__(self, depth: int = 16, width: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    batch = torch.zeros(16, 128, dtype=torch.long)
    captured = capture_call(Stack(), batch, None, None, mode="train", precision=None)[1]
    cluster = parse_devices("2x4:h100-sxm")
    model = AnalyticCostModel(cluster)
    return Work.of(Analysis(captured.graph, cluster, model, Constraints(), "adamw")).bodies


@pytest.fixture(scope="module")
def body(bodies: Bodies) -> Body:
    found = bodies.body(SIZES)
    bodies.solved(found)
    return found


def without_steps(problem: SplitsProblem) -> SplitsProblem:
    """What runs once per step for nothing: a body is the work of micro-batches."""
    variables = tuple(
        replace(v, options=tuple(replace(o, time_s=o.time_s - o.once_s) for o in v.options))
        for v in problem.variables
    )
    flows = tuple(
        replace(f, moves={pair: Move(0.0, move.is_shared) for pair, move in f.moves.items()})
        if any(r.when in (Pass.STEP, Pass.PROLOGUE) for r in f.readers)
        else f
        for f in problem.flows
    )
    return replace(problem, variables=variables, flows=flows)


def cost_s(problem: SplitsProblem, options: tuple[int, ...]) -> float:
    terms = choice_terms_s(problem, options)
    assert terms is not None
    return sum(terms.values()) / problem.num_microbatches


def test_most_operators_are_decided_together_with_the_first_layer(bodies: Bodies, body: Body):
    unit, block_of = bodies._unit_of(body), bodies.analysis.chain.block_of
    groups = [g for g in body.structure.groups if g.kind is GroupKind.NODE and len(g.members) > 1]
    inside = [sum(unit[block_of[name]] >= 0 for name in g.members) for g in groups]
    pairs = list(zip(groups, inside, strict=True))
    assert any(0 < own < len(g.members) for g, own in pairs)


def test_splits_are_as_good_as_those_of_the_whole_program(body: Body):
    assert body.splits is not None
    problem = without_steps(body.problem)
    whole_s = cost_s(problem, solve_splits(problem).options)
    own_s = cost_s(problem, body.splits.options)
    assert whole_s <= own_s * (1 + 1e-9)
    assert own_s <= whole_s * 1.005


def test_the_floor_is_below_every_choice_and_near_the_best(body: Body):
    problem = without_steps(body.problem)
    whole_s = cost_s(problem, solve_splits(problem).options)
    assert body.floor.total_s <= whole_s * (1 + 1e-9)
    assert body.floor.total_s >= whole_s * 0.95  # without what lies about the ends
