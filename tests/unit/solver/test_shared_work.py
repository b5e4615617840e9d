"""What searches under other constraints share changes no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import parse_devices
from autopar.plan.io import plan_hash
from autopar.plan.types import Plan
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints
from autopar.solver.search import solve
from autopar.solver.work import Work
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network

NETWORK = residual_network(4, rows=64, width=256, hidden=1024)
CLUSTER = parse_devices("2x2:h100-sxm")
MODEL = AnalyticCostModel(CLUSTER)
FREE = Constraints()


def analysed(wish: Constraints = FREE) -> Analysis:
    return Analysis(NETWORK, CLUSTER, MODEL, wish, "adamw")


def planned(analysis: Analysis, wish: Constraints, limit: int | None = None) -> Plan:
    return solve(
        NETWORK, "hash", CLUSTER, constraints=wish, optimizer="adamw", memory_limit_bytes=limit,
        cost_model=MODEL, analysis=analysis.under(wish),
    )[0]  # fmt: skip


@pytest.mark.parametrize(
    "wish",
    [
        Constraints(recompute="none"),
        Constraints(recompute={"layers.1": "none", "*": "full"}),
        Constraints(recompute="selective", sequence_parallel=True, tp=2),
    ],
)
def test_a_plan_is_the_same_after_another_search_as_alone(wish: Constraints) -> None:
    shared = analysed()
    free = planned(shared, FREE)
    after = planned(shared, wish)
    assert plan_hash(after) == plan_hash(planned(analysed(wish), wish))
    assert after.bound_s == planned(analysed(wish), wish).bound_s
    assert plan_hash(planned(shared, FREE)) == plan_hash(free)


def test_bodies_under_a_rule_have_the_splits_of_those_without() -> None:
    analysis = analysed()
    free = Work.of(analysis)
    ruled = Work.of(analysis.under(Constraints(recompute="none")))
    assert ruled is Work.of(analysis.under(Constraints(recompute="none")))
    whole, body = free.bodies.body((2, 1, 2)), ruled.bodies.body((2, 1, 2))
    assert body is not whole
    assert body.problem is whole.problem
    assert ruled.bodies.solved(body) is free.bodies.solved(whole)
    assert all(len(menu.options) == 1 for menu in body.least)
    assert any(len(menu.options) > 1 for menu in whole.least)


def test_what_is_shared_goes_on_with_another_cluster_under_a_rule_too() -> None:
    wish = Constraints(recompute="none")
    analysis = analysed()
    planned(analysis, wish)
    fewer = parse_devices("1x2:h100-sxm")
    moved = analysis.on(fewer, AnalyticCostModel(fewer))
    ruled = Work.of(moved.under(wish))
    assert ruled.bodies.analysis.cluster is fewer
    known = Work.of(analysis.under(wish)).bodies.body((1, 1, 2))
    assert ruled.bodies.body((1, 1, 2)).problem is known.problem  # the links of tp are the same


def test_other_splits_to_choose_from_share_blocks_and_prices_alone() -> None:
    analysis = analysed()
    wish = replace(FREE, sequence_parallel=False)
    other = analysis.under(wish)
    assert other.chain is analysis.chain
    assert other.signatures is analysis.signatures
    assert other.shared is not analysis.shared
    assert analysis.under(wish).shared is other.shared
    assert other.under(FREE).shared is analysis.shared
