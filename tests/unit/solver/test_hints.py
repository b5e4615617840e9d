"""Plans that people would set up beside those of the search."""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import parse_devices
from autopar.plan.types import Plan
from autopar.solver.candidates import VIRTUAL_STAGES
from autopar.solver.constraints import Constraints
from autopar.solver.force import ProportionalCostModel
from autopar.solver.hints import joined, with_hints
from autopar.solver.search import solve
from tests.joint_graphs import residual_network

NET = residual_network(6, rows=24, width=32, hidden=64)
CLUSTER = parse_devices("2:h100-sxm")


def solved(*hints: Constraints, **fixed: int) -> Plan:
    plan, _ = solve(
        NET, "hash", CLUSTER, constraints=Constraints(**fixed), optimizer="adamw",
        memory_limit_bytes=None, cost_model=ProportionalCostModel(), hints=hints,
    )  # fmt: skip
    return plan


def test_a_hint_outside_of_the_declared_space_is_judged():
    assert 3 not in VIRTUAL_STAGES
    hint = Constraints(pp=2, virtual=3, num_microbatches=6)
    free = solved(pp=2, dp=1, num_microbatches=6)
    forced = solved(pp=2, dp=1, virtual=3, num_microbatches=6)
    both = solved(hint, pp=2, dp=1, num_microbatches=6)
    assert both.time_s == min(free.time_s, forced.time_s)
    assert both.bound_s <= min(free.bound_s, forced.bound_s, both.time_s)
    told = {c.name for c in both.constraints if c.origin == "user"}
    assert told == {"pp", "dp", "num_microbatches"}


def test_the_faster_plan_is_taken_and_the_bound_holds_for_both():
    plan = solved(dp=2, tp=1, pp=1)
    better = replace(plan, time_s=plan.time_s / 2, bound_s=plan.bound_s / 4, constraints=())
    found = with_hints(plan, Constraints(dp=2), [Constraints(tp=1)], lambda _: better)
    assert (found.time_s, found.bound_s) == (better.time_s, better.bound_s)
    assert found.constraints == plan.constraints
    assert found.provenance["found by"] == "a hint"
    worse = replace(plan, time_s=plan.time_s * 2, bound_s=plan.bound_s)
    assert with_hints(plan, Constraints(), [Constraints(tp=1)], lambda _: worse) == plan


def test_a_hint_that_contradicts_the_user_is_left_out():
    assert joined(Constraints(dp=2), Constraints(dp=4)) is None
    assert joined(Constraints(dp=2), Constraints(dp=2, tp=4)) == Constraints(dp=2, tp=4)
    assert joined(Constraints(zero=1, pp=1), Constraints(warmup=(2, 1))) is None

    def never(_: Constraints) -> Plan:
        raise AssertionError("asked")

    plan = solved(dp=2, tp=1, pp=1)
    assert with_hints(plan, Constraints(dp=2), [Constraints(dp=1)], never) == plan
