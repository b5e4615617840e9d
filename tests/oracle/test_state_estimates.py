"""Bytes of states in the solver's cut problems against those of the programs that ranks run."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.cluster import parse_devices
from autopar.ir.graph import Graph
from autopar.solver.candidates import shapes
from autopar.solver.constraints import Constraints
from autopar.solver.search import MeshSearch
from cost_models.analytic import AnalyticCostModel
from tests.equivalence.harness import problem_of
from tests.zoo import build

CLUSTER = parse_devices("1x4:a100-80gb")


@cache
def captured(name: str) -> Graph:
    return problem_of(*build(name, layers=2)).graph


@pytest.mark.parametrize(
    ("dp", "tp", "zero"), [(1, 2, 0), *((d, t, z) for d, t in ((2, 2), (4, 1)) for z in range(4))]
)
@pytest.mark.parametrize(
    ("name", "split"),
    [("gpt2", {"*.c_attn.weight": "S(1)"}), ("llama", {"*.gate_proj.weight": "S(0)"})],
)
def test_a_state_is_as_large_as_in_the_programs(
    name: str, split: dict[str, str], dp: int, tp: int, zero: int
) -> None:
    """GPT-2 stores queries, keys and values in one parameter, which is used in parts."""
    search = MeshSearch(
        graph=captured(name),
        model_hash="",
        cluster=CLUSTER,
        constraints=Constraints(
            dp=dp, tp=tp, pp=1, num_microbatches=1, zero=zero, placements=split if tp > 1 else {}
        ),
        optimizer="adamw",
        limit_bytes=CLUSTER.memory_bytes,
        model=AnalyticCostModel(CLUSTER),
    )
    (shape,) = shapes(search.prepare())
    ranked = search.open(shape, float("inf"))
    assert ranked is not None
    parts = search.evaluated(ranked).figures.stages[0].memory
    found = parts.params_bytes + parts.grads_bytes + parts.optimizer_bytes
    assert sum(b.state_bytes for b in ranked.stage_problem.blocks) == pytest.approx(found, rel=0.01)
