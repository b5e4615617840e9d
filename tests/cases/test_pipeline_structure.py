"""Values that several stages need, inputs that enter late, and what crosses a cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.tracing import capture
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.report.text import render_plan
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.sharding.programs import LocalPrograms
from autopar.solver.force import forced_plan
from tests.equivalence.harness import actions_for, problem_of

F = nn.functional

WIDTH, HEADS, VOCAB = 16, 2, 24
STAGES = ("blocks.1", "blocks.2", "blocks.3")


def four_stages(
    model: nn.Module, batch: dict[str, torch.Tensor], **options: object
) -> tuple[LocalPrograms, Plan]:
    """One block a stage, four micro-batches, checked against one device."""
    problem = problem_of(model, batch)
    plan = forced_plan(
        problem.graph, "hash", pp=4, num_microbatches=4, boundaries=STAGES, **options
    )  # type: ignore[arg-type]
    programs = localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)
    zero = [stage.zero_level for stage in plan.stages]
    actions = actions_for(programs, plan.mesh, 4, plan.schedule, zero)
    verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)
    return programs, plan


def crossing(programs: LocalPrograms) -> dict[tuple[int, int], list[str]]:
    """Dtypes of what every pair of stages exchanges."""
    edges = {**programs.forward_edges, **programs.backward_edges}
    return {e: [programs.edge_metas[n].dtype for n in names] for e, names in edges.items()}


class RotaryBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cos, sin, mask, skip=None):
        b, s, _ = x.shape
        x = self.norm(x) if skip is None else self.norm(x) + 0.5 * skip
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(o.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.mlp(x).tanh()


class RotaryModel(nn.Module):
    """Tables and mask are made once at the top; block 0 is added into block 3."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rates = nn.Parameter(torch.rand(4), requires_grad=learned)
        self.blocks = nn.ModuleList(RotaryBlock() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, places, labels):
        angles = places[:, :, None].to(self.rates.dtype) * self.rates
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        x = first = self.blocks[0](self.embed(ids), cos, sin, mask)
        for block in self.blocks[1:3]:
            x = block(x, cos, sin, mask)
        x = self.blocks[3](x, cos, sin, mask, skip=first)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("learned", [False, True])
def test_tables_made_once_serve_all_stages_beside_a_long_skip(learned: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (8, 6))
    batch = {
        "ids": ids,
        "places": torch.arange(6).expand(8, 6).contiguous(),
        "labels": ids.roll(-1, 1),
    }
    programs, _ = four_stages(RotaryModel(learned), batch)
    found = crossing(programs)
    assert (0, 3) in found, "the skip goes straight to the block that adds it"
    assert (3, 1) in found, "and its gradient to where it is added to the other one"
    # each later stage adds its share of the tables' gradients and passes the sum on
    hidden = 1
    assert len(found[1, 0]) == (hidden + 2 if learned else hidden)


class LateInputs(nn.Module):
    """Labels are read in the last block alone, a mask in the first and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask, labels):
        x = self.blocks[0](x * mask[:, None]).tanh()
        x = self.blocks[2](self.blocks[1](x).tanh()).tanh()
        return (F.cross_entropy(self.blocks[3](x), labels, reduction="none") * mask).sum()


def test_an_input_goes_to_the_stages_that_read_it_and_the_report_says_so() -> None:
    torch.manual_seed(0)
    batch = {
        "x": torch.randn(8, 8),
        "mask": torch.rand(8),
        "labels": torch.randint(0, 8, (8,)),
    }
    model = LateInputs()
    programs, plan = four_stages(model, batch)
    assert programs.user_stages == {"x": (0,), "mask": (0, 3), "labels": (3,)}
    text = render_plan(plan, graph=capture(model, (), batch).graph)
    for words in ("x: read by stage 0", "mask: read by stages 0 and 3", "labels: read by stage 3"):
        assert words in text


class MixedInputs(nn.Module):
    """Stages receive a hidden value with a gradient, a float without one, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.table = nn.Embedding(8, 8)

    def forward(self, x, target):
        x = self.blocks[0](x).tanh()
        chosen = x.argmax(-1)  # integers
        level = x.detach().abs().mean(-1, keepdim=True)  # a float without gradient
        x = self.blocks[1](x).tanh() * level
        x = self.blocks[2](x).tanh() + self.table(chosen)
        return F.mse_loss(self.blocks[3](x) * level, target)


def test_only_the_values_that_need_gradients_have_them_sent_back() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "target": torch.randn(8, 8)}
    programs, _ = four_stages(MixedInputs(), batch)
    found = crossing(programs)
    assert sorted(found[0, 1]) == ["float64", "float64"]  # the hidden value and the level
    assert found[0, 2] == ["int64"]
    assert found[1, 0] == found[2, 1] == found[3, 2] == ["float64"]
    assert (2, 0) not in found


class ComplexTable(nn.Module):
    """Complex rotations, learned or not, applied in every block."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(4), requires_grad=learned)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, target):
        angles = torch.arange(x.shape[1])[:, None] * self.rates
        table = torch.view_as_complex(torch.stack((angles.cos(), angles.sin()), -1))
        for block in self.blocks:
            turned = torch.view_as_complex(block(x).unflatten(-1, (4, 2))) * table
            x = torch.view_as_real(turned).flatten(-2).tanh()
        return F.mse_loss(x, target)


@pytest.mark.parametrize("learned", [False, True])
def test_a_complex_table_serves_all_stages(learned: bool) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6, 8), "target": torch.randn(8, 6, 8)}
    programs, _ = four_stages(ComplexTable(learned), batch)
    dtypes = {dtype for names in crossing(programs).values() for dtype in names}
    assert dtypes == {"float64", "complex128"}
