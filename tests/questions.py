"""Questions about plans, for tests of their answers."""

from __future__ import annotations

from autopar.cluster import Cluster, parse_devices
from autopar.ir.graph import Graph
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints
from autopar.solver.question import Question
from autopar.solver.search import solve
from cost_models.analytic import AnalyticCostModel


def question(
    graph: Graph, devices: str | Cluster, limit: int | None = None, **given: object
) -> Question:
    """What is asked of a graph on a cluster, with given constraints."""
    cluster = parse_devices(devices)
    return Question(
        graph=graph,
        model_hash="hash",
        cluster=cluster,
        constraints=Constraints(**given),  # type: ignore[arg-type]
        optimizer="adamw",
        limit_bytes=limit or cluster.memory_bytes,
        prices=AnalyticCostModel,
    )


def plan_for(
    graph: Graph, devices: str | Cluster, limit: int | None = None, **given: object
) -> Plan:
    """The plan for a graph on a cluster under given constraints, at data-sheet prices."""
    cluster = parse_devices(devices)
    plan, _ = solve(
        graph, "hash", cluster, constraints=Constraints(**given),  # type: ignore[arg-type]
        optimizer="adamw", memory_limit_bytes=limit, cost_model=AnalyticCostModel(cluster),
    )  # fmt: skip
    return plan
