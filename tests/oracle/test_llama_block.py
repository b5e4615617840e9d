"""What the solver finds by itself on a Llama block over eight devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
import transformers

from autopar.capture.tracing import Captured, capture
from autopar.cluster.parse import parse_devices
from autopar.ir.graph import Graph, InputKind
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.programs import StagePrograms
from autopar.solver.force import forced_plan
from cost_models.analytic import AnalyticCostModel

BLOCK = "model.layers.0"
ACTIVATION = (2, 2048, 4096)


@pytest.fixture(scope="module")
def captured() -> Captured:
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(ACTIVATION[:2], dtype=torch.int64)
    return capture(model, (), {"input_ids": ids, "labels": ids})


def _solve(
    captured: Captured,
    *,
    sequence_parallel: bool | None,
    placements: Mapping[str, str] | None = None,
) -> tuple[Plan, StagePrograms]:
    cluster = parse_devices("1x8:h100-sxm")
    plan = forced_plan(
        captured.graph,
        captured.hash,
        tp=8,
        cluster=cluster,
        cost_model=AnalyticCostModel(cluster),
        sequence_parallel=sequence_parallel,
        placements=placements or {},
    )
    decisions = decisions_of(plan, captured.graph)
    programs = localize(captured.graph, decisions, signatures_of(captured.graph))
    return plan, programs.stages[0]


def _large(program: Graph) -> Counter[str]:
    """Collectives of the block that carry a whole activation, by kind."""
    least_bytes = 2 * 2048 * 4096 * 2 // 8
    return Counter(
        node.op.removeprefix("comm.")
        for node in program.nodes
        if node.op.startswith("comm.")
        and node.scope.startswith(BLOCK)
        and sum(m.bytes for m in node.metas() if m is not None) >= least_bytes
    )


def _weights(captured: Captured, plan: Plan) -> dict[str, str]:
    return {
        entry.target.removeprefix(f"{BLOCK}."): plan.splits["tp"].get(entry.name, "R")
        for entry in captured.graph.of_kind(InputKind.PARAM)
        if entry.target.startswith(BLOCK) and "norm" not in entry.target
    }


# torch stores a linear's weight as (out, in): S(0) splits columns of x W^T, S(1) its rows
COLUMN_ROW = {
    "self_attn.q_proj.weight": "S(0)",
    "self_attn.k_proj.weight": "S(0)",
    "self_attn.v_proj.weight": "S(0)",
    "self_attn.o_proj.weight": "S(1)",
    "mlp.gate_proj.weight": "S(0)",
    "mlp.up_proj.weight": "S(0)",
    "mlp.down_proj.weight": "S(1)",
}


OUTPUT_ROWS = {"*.o_proj.weight": "S(1)"}


@pytest.mark.parametrize("sequence_parallel", [None, True, False])
def test_columns_then_rows_are_found(captured: Captured, sequence_parallel: bool | None) -> None:
    plan, _ = _solve(captured, sequence_parallel=sequence_parallel)
    if sequence_parallel is None:
        # over split features either split of the output projection costs the same, to the bit of
        # a rounding: gather before it, or scatter behind it
        rows, _ = _solve(captured, sequence_parallel=None, placements=OUTPUT_ROWS)
        assert rows.objective_s == pytest.approx(plan.objective_s, rel=1e-9)
        plan = rows
    assert _weights(captured, plan) == COLUMN_ROW


def test_whole_norms_need_two_all_reduces_each_way(captured: Captured) -> None:
    found, _ = _solve(captured, sequence_parallel=False)
    # an all_reduce costs what a reduce_scatter and an all_gather cost: either may be found
    plan, stage = _solve(captured, sequence_parallel=False, placements=OUTPUT_ROWS)
    assert plan.objective_s == pytest.approx(found.objective_s, rel=1e-9)
    assert _large(stage.forward) == {"all_reduce": 2}
    assert _large(stage.backward) == {"all_reduce": 2}


def test_norms_on_shards_of_the_sequence_need_two_gathers_and_two_scatters_each_way(
    captured: Captured,
) -> None:
    _, stage = _solve(captured, sequence_parallel=True)
    # forward enters the block with an all_to_all, from the embedding's split of features
    assert _large(stage.forward) - Counter(all_to_all=1) == {"all_gather": 2, "reduce_scatter": 2}
    # the two gathered norms are kept for the weights' gradients, so nothing is gathered again
    assert _large(stage.backward) == {"all_gather": 2, "reduce_scatter": 2}


def test_left_free_it_is_no_slower_than_either(captured: Captured) -> None:
    free, _ = _solve(captured, sequence_parallel=None)
    for forced in (True, False):
        other, _ = _solve(captured, sequence_parallel=forced)
        assert free.objective_s <= other.objective_s * (1 + 1e-9)
