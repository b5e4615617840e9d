"""Recomputing changes when a value is made, never which: masks, gradients and bytes held."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own habit
from torch.nn.functional import scaled_dot_product_attention as attend

import autopar
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.sharding.build import localize
from tests.cases.eager_parity import found_in, plan_for, problem_for
from tests.equivalence.harness import Problem, run
from tests.zoo import build

SHAPE = (8, 6, 16)
X = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
WORDS = ("none", "selective", "full")
PLANS = {
    "one device": {},
    "1F1B of 4 micro-batches on 2 stages": {"pp": 2, "num_microbatches": 4},
    "tp2": {"tp": 2},
}


def dropped(y: torch.Tensor) -> torch.Tensor:
    return F.dropout(y, 0.7)


def compared(y: torch.Tensor) -> torch.Tensor:
    return y * (torch.rand_like(y) > 0.7)


def drawn(y: torch.Tensor) -> torch.Tensor:
    return y * torch.bernoulli(torch.full_like(y, 0.3))


class Block(nn.Module):
    """One weight per element of the batch, so that a mask is seen in the weight's gradient."""

    def __init__(self, mask: object) -> None:
        super().__init__()
        self.w = nn.Embedding(SHAPE[0], SHAPE[1] * SHAPE[2])
        self.mask = mask

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.mask(self.w(rows).view(x.shape) * x)
        return torch.sin(y) + x, y


class Chain(nn.Module):
    """Blocks that draw their masks in different ways; gives the masked values too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(m) for m in (dropped, dropped, dropped, compared, drawn))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {}
        for index, block in enumerate(self.blocks):
            x, found[f"y{index}"] = block(x, rows)
        return {"loss": x.pow(2).mean(), **found}


def stepped(problem: Problem, plan: Plan, gather: frozenset[str] = frozenset()):
    decisions = decisions_of(plan, problem.graph, gather_outputs=gather)
    programs = localize(problem.graph, decisions, problem.signatures)
    zero = [stage.zero_level for stage in plan.stages]
    return run(problem, programs, plan.mesh, plan.num_microbatches, plan.schedule, zero)


@pytest.fixture(scope="module")
def chain() -> Problem:
    return problem_for(Chain(), {"x": X, "rows": torch.arange(SHAPE[0])})[1]


@pytest.mark.parametrize("degrees", PLANS.values(), ids=PLANS.keys())
def test_a_gradient_is_zero_exactly_where_its_forward_was_dropped(chain, degrees):
    paths = frozenset(f"y{i}" for i in range(5))
    steps, num_recomputed = {}, {}
    for word in WORDS:
        plan = plan_for(chain.graph, recompute=word, **degrees)
        num_recomputed[word] = sum(len(stage.recompute) for stage in plan.stages)
        # what the test looks at must not be kept for its sake: gradients without outputs first
        steps[word] = stepped(chain, plan)
        values = stepped(chain, plan, paths).outputs
        for index in range(5):
            zeros = values[f"y{index}"] == 0
            gradient = steps[word].grads[f"blocks.{index}.w.weight"].view(SHAPE)
            assert 0.6 < float(zeros.float().mean()) < 0.8
            assert torch.equal(gradient == 0, zeros), (word, index)
    assert num_recomputed["none"] == 0 < num_recomputed["full"]
    for word in WORDS[1:]:
        for name, tensor in found_in(steps["none"]).items():
            # the same operators in the same order: not even rounding differs
            assert torch.equal(found_in(steps[word])[name], tensor), (word, name)


def test_recomputing_is_neutral_for_a_model_with_dropout():
    losses = {}
    for word in WORDS:
        model, batch = build("gpt2", dropout=0.3)
        model = autopar.compile(model, 1, batch, recompute=word, num_microbatches=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[word] = []
        for _ in range(3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[word].append(loss.item())
    assert losses["full"] == losses["none"]
    assert losses["selective"] == losses["none"]
    assert len(set(losses["none"])) == 3


@pytest.mark.parametrize(
    "degrees",
    [{}, {"pp": 2, "num_microbatches": 4}, {"tp": 2}, {"dp": 2, "num_microbatches": 2}],
    ids=["one device", "pp2", "tp2", "dp2 x mb2"],
)
def test_bytes_held_between_forward_and_backward_are_those_of_the_report(degrees):
    model, batch = build("gpt2", layers=3, dropout=0.1)
    _, problem = problem_for(model, batch)
    held = {}
    for word in WORDS:
        plan = plan_for(problem.graph, recompute=word, **degrees)
        measured = stepped(problem, plan).peak_saved_bytes
        width = plan.mesh.dp * plan.mesh.tp
        for stage in plan.stages:
            promised = stage.memory.activations_bytes
            for rank in stage.devices:
                assert measured[rank] == pytest.approx(promised, rel=0.1), (word, stage.index)
        held[word] = measured[0]
        assert len(measured) == width * plan.mesh.pp
    assert held["full"] < held["selective"] < held["none"]


def test_eager_checkpointing_in_the_model_is_taken_for_what_it_computes():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
            return self.second(torch.tanh(h)).pow(2).mean()

    model, x = Checkpointed(), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, x)
    for each in (model, twin):
        each(x).backward()
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


class CheckpointedAttention(nn.Module):
    """Attention whose function was imported by name, in a part that runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)
        return (x + h).pow(2).mean()


class CheckpointedRecurrence(nn.Module):
    """A recurrent layer that runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = nn.LSTM(8, 8, num_layers=2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.utils.checkpoint.checkpoint(lambda y: self.rnn(y)[0], x, use_reentrant=False)
        return self.out(h).pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "shape"), [(CheckpointedAttention, (4, 6, 16)), (CheckpointedRecurrence, (4, 5, 8))]
)
def test_what_runs_again_in_the_backward_is_traced_like_its_first_run(
    kind: type[nn.Module], shape: tuple[int, ...]
):
    model, x = kind().double(), torch.randn(shape, dtype=torch.float64)
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, x)
    loss, wanted_loss = model(x), twin(x)
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-10, atol=1e-12)
    loss.backward()
    wanted_loss.backward()
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)
    operators = {node.op for node in problem_for(kind().double(), {"x": x})[1].graph.nodes}
    kernels = ("scaled_dot_product", "flash_attention", "lstm", "mkldnn")
    assert not [op for op in operators for word in kernels if word in op]
