"""Sizes that the ranks do not divide: planned and run exactly, or refused with both numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.errors import ConstraintError
from autopar.plan.decisions import decisions_of
from autopar.plan.types import TP_AXIS, Plan
from autopar.report.text import render_plan
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.sharding.rules.attention import QUERY_HEADS
from autopar.sharding.signature import AxisStrategy
from autopar.solver.force import forced_plan
from tests.cases.small_models import GroupedAttention, SmallGPT, tokens
from tests.equivalence.harness import Problem, actions_for, problem_of


def grouped(heads: int, kv_heads: int, length: int = 6) -> Problem:
    torch.manual_seed(0)
    model = GroupedAttention(heads, kv_heads)
    shape = (2, length, heads * model.head)
    return problem_of(model, {"x": torch.randn(shape), "target": torch.randn(shape)})


def attention_splits(problem: Problem, plan: Plan) -> dict[str, AxisStrategy | None]:
    decisions = decisions_of(plan, problem.graph)
    return {
        node.op: decisions.strategy(TP_AXIS, node.name)
        for node in problem.graph.nodes
        if node.op.startswith("autopar.attention")
    }


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(4, 8, 2), (8, 8, 2), (3, 6, 2)])
def test_query_heads_split_over_more_ranks_than_key_heads(
    ranks: int, heads: int, kv_heads: int
) -> None:
    problem = grouped(heads, kv_heads)
    plan = forced_plan(problem.graph, "hash", tp=ranks)
    decisions = decisions_of(plan, problem.graph)
    choices = {axis: dict(table) for axis, table in decisions.choices.items()}
    # whatever the prices say: every attention by its query heads
    for node in problem.graph.nodes:
        signature = problem.signatures.get(node.name)
        if signature is not None and QUERY_HEADS in signature.sizes:
            choices[TP_AXIS][node.name] = next(
                s for s in signature.extra if s.factor == QUERY_HEADS
            )
    programs = localize(problem.graph, replace(decisions, choices=choices), problem.signatures)
    assert any(n.op == "local.take_heads" for n in programs.stages[0].forward.nodes)
    actions = actions_for(programs, plan.mesh, 1, plan.schedule, (0,))
    verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_solver_splits_attention_over_more_ranks_than_key_heads(ranks: int) -> None:
    problem = grouped(8, 2, length=130)  # long enough that attention is worth splitting
    splits = attention_splits(problem, forced_plan(problem.graph, "hash", tp=ranks))
    assert [s.factor if s else "" for s in splits.values()] == [QUERY_HEADS, QUERY_HEADS]


@pytest.mark.parametrize("devices", [4, 8])
def test_two_key_heads_are_planned_on_more_devices(devices: int) -> None:
    model = GroupedAttention
    batch = {"x": torch.randn(8, 6, 32), "target": torch.randn(8, 6, 32)}
    for degrees in ({}, {"tp": devices}):
        plan = autopar.compile(model(), f"{devices}:h100-sxm", batch, **degrees).plan
        assert plan.mesh.num_ranks <= devices
        assert not degrees or plan.mesh.tp == devices


def test_what_data_ranks_split_where_there_is_one_sample_is_named() -> None:
    plan = autopar.compile(SmallGPT(layers=1), "2:cpu", tokens(1), dp=2).plan
    (own,) = (c for c in plan.constraints if c.name == "dp")
    assert re.fullmatch(
        r"ranks that split dim 1 of '\w+', which stands for the batch of 1", own.effect
    )
    assert re.search(r"mesh .*dim 1 of .* over 2\n", render_plan(plan, width=100))
    assert not any(c.effect.startswith("the batch is split") for c in plan.constraints)


def test_a_batch_that_the_degrees_do_not_divide_is_refused_with_both_numbers() -> None:
    torch.manual_seed(0)
    model = SmallGPT(layers=1)
    with pytest.raises(
        ConstraintError, match=r"dp=4: does not divide the batch of 10; use a divisor"
    ):
        autopar.compile(model, "4:cpu", tokens(10), dp=4)
