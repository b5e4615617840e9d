"""Questions about plans, for tests of their answers."""

from __future__ import annotations

from autopar.cluster import Cluster, parse_devices
from autopar.ir.graph import Graph
from autopar.solver.constraints import Constraints
from autopar.solver.question import Question
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
