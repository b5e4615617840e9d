"""Splits that are easily wrong without an error: gradients of experts, uneven blocks, views."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.ir.graph import Graph
from autopar.plan.decisions import decisions_of
from autopar.plan.types import TP_AXIS, MeshShape, ScheduleKind
from autopar.runtime.equivalence import verify_programs
from autopar.runtime.simulate import SimulatedStep
from autopar.sharding.build import localize
from autopar.sharding.placement import R, Shard
from autopar.sharding.programs import LocalPrograms
from autopar.solver.force import forced_plan
from tests.equivalence.harness import (
    Problem,
    actions_for,
    fuzz_decisions,
    problem_of,
    simulate,
    worst_difference,
)

F = nn.functional


def verified(problem: Problem, **options: object) -> tuple[LocalPrograms, SimulatedStep]:
    """A forced plan of a problem on simulated ranks, equal to one device, outputs included."""
    plan = forced_plan(problem.graph, "hash", **options)  # type: ignore[arg-type]
    outputs = frozenset(o.target for o in problem.graph.outputs if o.kind == "output")
    decisions = replace(decisions_of(plan, problem.graph), gather_outputs=outputs)
    programs = localize(problem.graph, decisions, problem.signatures)
    zero = [stage.zero_level for stage in plan.stages]
    actions = actions_for(programs, plan.mesh, plan.num_microbatches, plan.schedule, zero)
    result = verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)
    assert result.step is not None
    return programs, result.step


class TwoExperts(nn.Module):
    """A dense mixture: every expert computes every sample, a mask keeps one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.up = nn.Parameter(torch.randn(2, 8, 12) / 3)
        self.down = nn.Parameter(torch.randn(2, 12, 8) / 3)
        self.scale = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1)
        kept = F.one_hot(share.argmax(-1), 2) * share
        hidden = F.gelu(torch.einsum("bd,edh->ebh", x, self.up))
        out = torch.einsum("ebh,ehd->ebd", hidden, self.down) * self.scale[:, None]
        return F.mse_loss(torch.einsum("ebd,be->bd", out, kept), target)


def reduced_over(graph: Graph, name: str) -> set[str]:
    """Axes of the all-reduces that a value went through, in buckets or alone."""
    nodes, found, stack = graph.node_map(), set(), [name]
    while stack:
        node = nodes.get(stack.pop())
        if node is not None:
            found |= {str(node.args[2])} if node.op == "comm.all_reduce" else set()
            stack += node.refs()
    return found


@pytest.mark.parametrize("placement", ["S(0)", "R"])
def test_expert_gradients_are_reduced_over_the_axes_that_split_tokens(placement: str) -> None:
    torch.manual_seed(0)
    problem = problem_of(TwoExperts(), {"x": torch.randn(8, 8), "target": torch.randn(8, 8)})
    placements = dict.fromkeys(("up", "down", "scale"), placement)
    programs, step = verified(problem, dp=2, tp=2, placements=placements)
    wanted = Shard(0) if placement == "S(0)" else R
    assert programs.params["up"].compute[2] == wanted
    reduce = programs.stages[0].reduce
    origins = {o.target: reduced_over(reduce, o.value.name) for o in reduce.outputs if o.value}
    assert all("dp" in origins[name] for name in ("up", "down", "scale"))
    assert step.replica_gap == 0.0  # bit for bit


class Wide(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, size)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x).tanh()
        return {"loss": (out**2).sum(), "out": out}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 8])
def test_an_output_of_any_size_comes_back_whole_from_four_ranks(size: int) -> None:
    torch.manual_seed(0)
    problem = problem_of(Wide(size), {"x": torch.randn(3, 6)})
    programs, step = verified(problem, tp=4)
    assert step.outputs["out"].shape == (3, size)
    is_split = programs.params["layer.weight"].compute[2] == Shard(0)
    # five rows over four ranks would be blocks of two, and none for the last rank
    assert is_split == (size in (7, 8))


@pytest.mark.parametrize(
    ("degrees", "placement"),
    [
        ({"tp": 3}, "S(1)"),
        ({"tp": 6}, "S(1)"),
        ({"tp": 3}, "S(0)"),
        ({"dp": 3}, "R"),
        ({"dp": 3, "tp": 2}, "S(1)"),
    ],
)
def test_sixteen_inputs_are_split_over_three_and_six_ranks(
    degrees: dict[str, int], placement: str
) -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).logsumexp(-1).mean()

    problem = problem_of(Model(), {"x": torch.randn(9, 16)})
    programs, _ = verified(problem, **degrees, placements={"layer.weight": placement})
    wanted = {"S(0)": Shard(0), "S(1)": Shard(1)}.get(placement)
    assert wanted is None or programs.params["layer.weight"].compute[2] == wanted


class Scores(nn.Module):
    """Integers become floats by a number, in torch's default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids * 0.3 * self.weight).square().mean()


def test_integers_times_a_number_are_judged_in_double_precision() -> None:
    torch.manual_seed(0)
    problem = problem_of(Scores(), {"ids": torch.randint(0, 9, (4, 6))})
    verified(problem, dp=2, tp=2)
    assert torch.get_default_dtype() == torch.float32


# -- views -----------------------------------------------------------------------------------------


class FusedQKV(nn.Module):
    """q, k and v from one projection, taken apart in one of several ways."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        y = self.qkv(x)
        if self.order == "3hd":
            q, k, v = y.view(b, s, 3, 4, 4).unbind(2)
        elif self.order == "h3d":
            q, k, v = y.view(b, s, 4, 3, 4).unbind(3)
        else:
            q, k, v = (part.unflatten(-1, (4, 4)) for part in y.chunk(3, -1))
        o = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        return (o.transpose(1, 2).flatten(2) * x).mean()


class Flattened(nn.Module):
    """Sequence and heads put together and taken apart again, in both orders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(4, 4), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)  # (b, s, h, d)
        rows = y.flatten(1, 2).tanh()  # (b, s h, d)
        wide = self.mix(y.transpose(2, 3).flatten(1, 2).transpose(1, 2).flatten(2)[..., :32])
        back = rows.unflatten(1, (8, 4)).permute(0, 2, 1, 3).reshape(4, 4, 32)
        return (back * wide).mean() + rows.unflatten(1, (4, 8)).sin().mean()


VIEWS: dict[str, Callable[[], Problem]] = {
    **{
        order: lambda order=order: problem_of(FusedQKV(order), {"x": torch.randn(4, 8, 16)})
        for order in ("3hd", "h3d", "chunk")
    },
    "flatten": lambda: problem_of(Flattened(), {"x": torch.randn(4, 8, 4, 4)}),
}


@pytest.mark.parametrize("name", VIEWS)
def test_chains_of_views_are_exact_under_every_split(name: str) -> None:
    torch.manual_seed(0)
    problem = VIEWS[name]()
    reference = problem.reference()
    split = 0
    for seed, (dp, tp) in enumerate([(2, 2), (2, 2), (2, 2), (1, 4), (1, 4), (4, 2), (1, 3)]):
        decisions = fuzz_decisions(problem, microbatches=1, dp=dp, tp=tp, stages=1, seed=seed)
        _, step = simulate(problem, decisions, MeshShape(dp=dp, tp=tp), ScheduleKind.GPIPE)
        ratio, tensor = worst_difference(step, reference)
        assert ratio <= 1, f"seed {seed}: {tensor}: {ratio:.3g} times the allowance"
        split += sum(
            n.op == "aten.view.default" and decisions.strategy(TP_AXIS, n.name) is not None
            for n in problem.graph.nodes
        )
    assert split > 10
