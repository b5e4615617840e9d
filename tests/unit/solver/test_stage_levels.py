"""A ZeRO level for every stage: chosen where that is faster, kept where it is given."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.errors import ConstraintError, InfeasibleError
from autopar.plan.check import check_plan
from autopar.plan.decisions import decisions_of
from autopar.plan.explain import plan_name
from autopar.plan.io import plan_from_json, plan_to_json
from autopar.plan.level_words import level_words
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints, check_constraints
from autopar.solver.given import constraint_words, constraints_of
from autopar.solver.order_bound import OrderBound
from autopar.solver.question import Asker
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import StageProblem, memory_bytes, surrogate_s
from autopar.solver.state_choice import FormChoice
from autopar.solver.state_forms import leanest, resolved, useful, with_forms
from autopar.solver.why_not import why_not
from tests.joint_graphs import residual_network
from tests.oracle.search_cases import every_plan, shapes_of
from tests.questions import plan_for, question

GRAPH = residual_network(6, rows=2048, width=512, hidden=2048)
SMALL = residual_network(3, rows=16, width=64, hidden=256)
MESH = {"pp": 4, "dp": 2, "virtual": 1, "num_microbatches": 8}


def levels_of(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.zero_level for stage in plan.stages)


@pytest.fixture(scope="module")
def mixed() -> Plan:
    return plan_for(GRAPH, "8:a100-80gb", **MESH)


def test_stages_get_levels_of_their_own_where_that_is_faster(mixed: Plan):
    check_plan(mixed)
    assert len(set(levels_of(mixed))) > 1
    assert decisions_of(mixed, GRAPH).zero_levels == levels_of(mixed)
    assert 0 < mixed.bound_s <= mixed.time_s
    assert mixed.peak_bytes <= mixed.memory_limit_bytes
    for level in (0, 1, 2, 3):
        alone = plan_for(GRAPH, "8:a100-80gb", zero=level, **MESH)
        assert mixed.time_s < alone.time_s, level
        assert mixed.bound_s <= alone.time_s, level
    assert plan_from_json(plan_to_json(mixed)) == mixed


def test_less_memory_makes_other_levels_and_they_fit(mixed: Plan):
    limit = mixed.peak_bytes * 9 // 10
    tight = plan_for(GRAPH, "8:a100-80gb", limit, **MESH)
    assert tight.peak_bytes <= limit
    assert tight.time_s >= mixed.time_s
    assert tight.time_s < plan_for(GRAPH, "8:a100-80gb", limit, zero=1, **MESH).time_s


def test_a_plan_with_several_levels_says_which_stage_has_which(mixed: Plan):
    words = level_words(levels_of(mixed))
    assert re.fullmatch(r"0 in stages? [\d, and-]+, 1 in stages? [\d, and-]+", words)
    assert f"ZeRO {words}" in plan_name(mixed)
    alone = replace(mixed, stages=tuple(replace(s, zero_level=1) for s in mixed.stages))
    rows = {c.what: (c.before, c.after) for c in alone.diff(mixed).stages}
    assert rows["ZeRO level"] == ("1", words)


def test_levels_that_are_given_are_kept_whatever_they_cost():
    plan = plan_for(SMALL, "4:cpu", pp=2, dp=2, zero=(3, 1))
    assert levels_of(plan) == (3, 1)
    (given,) = (c for c in plan.constraints if c.name == "zero")
    assert (given.value, given.effect) == ("(3, 1)", "ZeRO level of each stage")
    assert constraints_of(plan.constraints).zero == (3, 1)
    assert constraint_words({"zero": (3, 1)}) == "zero=[3, 1]"
    free = plan_for(SMALL, "4:cpu", pp=2, dp=2)
    assert free.bound_s <= plan.time_s


def test_given_levels_choose_the_number_of_stages():
    plan = plan_for(SMALL, "8:cpu", dp=2, zero=(1, 2, 0))
    assert (plan.mesh.num_stages, levels_of(plan)) == (3, (1, 2, 0))


@pytest.mark.parametrize("virtual", [1, 2])
def test_given_levels_on_ranks_with_one_or_several_stages(virtual: int):
    levels = (2, 1) * virtual
    plan = plan_for(
        residual_network(6, rows=16, width=64, hidden=256), "4:cpu",
        pp=2, dp=2, virtual=virtual, num_microbatches=4, zero=levels,
    )  # fmt: skip
    assert levels_of(plan) == levels


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"zero": (1, 3), "pp": 3}, r"zero=\[1, 3\] and pp=3: 2 levels for 3 stages; give 3, or"),
        (
            {"zero": (1, 3), "pp": 2, "virtual": 2},
            r"zero=\[1, 3\] and pp=2, virtual=2: 2 levels for 4 stages",
        ),
        (
            {"zero": (1,), "boundaries": ("layers.1",)},
            r"zero=\[1\] and stages=\['layers.1'\]: 1 levels for 2 stages",
        ),
        ({"zero": (1, 4)}, r"zero=\[1, 4\]: the levels are 0, 1, 2 and 3"),
        ({"zero": ()}, r"zero=\[\]: the levels are 0, 1, 2 and 3"),
    ],
)
def test_levels_for_another_number_of_stages_are_refused(given, match: str):
    with pytest.raises(ConstraintError, match=match):
        Constraints(**given)


def test_levels_need_data_ranks():
    with pytest.raises(ConstraintError, match=r"zero=\[1, 0\] and dp=1: ZeRO splits over data"):
        check_constraints(SMALL, Constraints(zero=(1, 0), dp=1), 8)
    check_constraints(SMALL, Constraints(zero=(0, 0), dp=1), 8)


def test_levels_that_need_too_much_are_refused_with_a_way_out():
    with pytest.raises(InfeasibleError) as caught:
        plan_for(SMALL, "4:cpu", 100_000, pp=2, dp=2, zero=(1, 0), recompute="full")
    assert "allow zero=3 in every stage (now [1, 0])" in str(caught.value)


def test_why_not_other_levels():
    asker = Asker(question(SMALL, "4:cpu", pp=2, dp=2, num_microbatches=2))
    plan, _ = asker.first()
    told = str(why_not(asker, plan, Constraints(zero=(2, 3))))
    assert told.startswith("zero=[2, 3]: slower by ")
    assert "ZeRO level: " in told
    assert "2 in stage 0, 3 in stage 1" in told


# -- problems with forms -----------------------------------------------------------------------
def with_choice(seeds: range = range(40)) -> list[StageProblem]:
    """Small cut problems whose stages choose between two forms of their states."""
    found = [p for seed in seeds if seed % 5 < 2 for p in shapes_of(seed, 4) if p.forms]
    assert len(found) > 20
    return found


def test_a_bound_over_forms_is_below_each_form_alone_and_below_every_plan():
    for problem in with_choice(range(16)):
        halves = problem.schedule.splits_backward
        bound = OrderBound(problem=problem, is_open=False, may_split=halves)
        for bounded in (bound, bound.quick()):
            found = bounded.least_s()
            for menus in problem.forms:
                alone = replace(bounded, problem=replace(problem, blocks=menus, forms=()))
                assert found <= alone.least_s() * (1 + 3e-3)
            assert found <= min(plan.time_s for plan in every_plan(problem)) * (1 + 1e-9)


def test_forms_are_solved_with_cuts_and_options():
    """No choice of cuts, options and forms has a better surrogate that fits."""
    solved = 0
    for problem in with_choice():
        if problem.virtual > 1:
            continue
        plans = list(every_plan(problem))
        limit = sorted(p.peak_bytes for p in plans)[len(plans) // 4]
        tight = replace(problem, limit_bytes=limit)
        rows = [p for p in plans if p.peak_bytes <= limit]
        best = min(surrogate_s(p.chosen, p.starts, p.options) for p in rows)
        found = solve_stages(tight)
        assert found is not None
        chosen = resolved(tight, found.starts, found.forms)
        assert max(memory_bytes(chosen, found.starts, found.options)) <= limit
        assert found.objective_s == pytest.approx(surrogate_s(chosen, found.starts, found.options))
        # bytes count in units that are rounded up, so that a choice at the limit may be missed
        assert best <= found.objective_s * (1 + 1e-6)
        solved += found.objective_s <= best * (1 + 1e-3)
    assert solved > 20


def test_given_forms_are_kept():
    for problem in with_choice(range(12)):
        forms = tuple(s % 2 for s in range(problem.num_stages))
        found = FormChoice(replace(problem, given_forms=forms)).any()
        assert found is not None
        assert found.forms == forms
        rows = [p.time_s for p in every_plan(problem) if p.forms == forms]
        assert min(rows) * (1 - 1e-9) <= found.time_s <= min(rows) * 1.25


def test_a_form_that_wins_nothing_is_left_out():
    problem = next(p for p in with_choice() if p.num_stages > 1)
    one, other = problem.forms
    worse = tuple(replace(b, state_bytes=b.state_bytes + 1) for b in one)
    assert useful([one, other]) == (one, other)
    assert useful([one, worse, other]) == (one, other)
    assert useful([one, one]) == (one,)
    assert with_forms(problem, [one]).forms == ()


def test_equal_blocks_in_different_forms_are_told_apart():
    problem = next(p for p in with_choice() if p.num_stages == 2 and p.virtual == 1)
    starts = (len(problem.blocks) // 2,)
    chosen = resolved(problem, starts, (0, 1))
    assert chosen.forms == ()
    for i, block in enumerate(chosen.blocks):
        assert block.state_bytes == problem.forms[int(i >= starts[0])][i].state_bytes
    firsts = {b.key for b in chosen.blocks[: starts[0]]}
    assert not firsts & {b.key for b in chosen.blocks[starts[0] :]}
    assert resolved(chosen, starts, ()) is chosen
    assert [b.state_bytes for b in leanest(problem).blocks] == [
        min(b.state_bytes for b in row) for row in zip(*problem.forms, strict=True)
    ]
