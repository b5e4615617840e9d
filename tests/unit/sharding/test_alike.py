"""Stages that are alike are priced as if each had been localized."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from autopar.api.compiling import capture_call
from autopar.cluster import parse_devices
from autopar.ir.graph import Graph
from autopar.plan.decisions import decisions_of
from autopar.plan.types import ScheduleKind
from autopar.sharding.build import localize
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints
from autopar.solver.exact import Setting, exact_figures
from autopar.solver.search import solve
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network

CLUSTER = parse_devices("2x4:h100-sxm")


def both_ways(graph: Graph, wish: Constraints) -> tuple[int, int]:
    """Compares the figures; stages, and those that were localized."""
    model = AnalyticCostModel(CLUSTER)
    analysis = Analysis(graph, CLUSTER, model, wish, "adamw")
    plan, _ = solve(
        graph, "hash", CLUSTER, constraints=wish, optimizer="adamw", memory_limit_bytes=None,
        cost_model=model, analysis=analysis,
    )  # fmt: skip
    decisions = decisions_of(plan, graph)
    setting = Setting(
        cluster=CLUSTER, model=model, mesh=plan.mesh, schedule=plan.schedule,
        num_microbatches=plan.num_microbatches, zero_levels=decisions.zero_levels,
        optimizer="adamw", optimizer_s_per_byte=analysis.optimizer_s_per_byte, warmup=plan.warmup,
    )  # fmt: skip
    every = localize(graph, decisions, analysis.signatures)
    shared = localize(graph, decisions, analysis.signatures, words=analysis.words)
    left, right = exact_figures(every, setting), exact_figures(shared, setting)
    assert left.step_s == right.step_s == plan.time_s
    assert left.rank_bytes == right.rank_bytes
    for rank in range(plan.mesh.pp):  # where each would have most, were it the worst
        worst = tuple(int(other == rank) for other in range(plan.mesh.pp))
        words = replace(left, rank_bytes=worst).peak_at
        assert words == replace(right, rank_bytes=worst).peak_at
        assert words
    for a, b in zip(left.stages, right.stages, strict=True):
        assert (a.time, a.memory, a.collectives) == (b.time, b.memory, b.collectives)
        assert (a.num_in_flight, a.parameters) == (b.num_in_flight, b.parameters)
    assert every.params == shared.params
    assert every.forward_edges == shared.forward_edges
    assert every.backward_edges == shared.backward_edges
    assert every.edge_metas == shared.edge_metas
    assert every.results == shared.results
    assert every.grads == shared.grads
    assert every.user_stages == shared.user_stages
    return len(shared.stages), len({id(stage.forward) for stage in shared.stages})


@pytest.mark.parametrize(
    "wish",
    [
        Constraints(pp=4, dp=2, virtual=3, num_microbatches=4, zero=1),
        Constraints(pp=4, dp=2, schedule=ScheduleKind.ZBV, num_microbatches=8),
        Constraints(pp=8, tp=1, virtual=1, num_microbatches=8, recompute="full"),
        Constraints(pp=8, dp=1, virtual=1, schedule=ScheduleKind.GPIPE),
    ],
    ids=["interleaved", "zbv", "full", "gpipe"],
)
def test_stages_that_are_alike_share_programs_and_figures(wish: Constraints):
    graph = residual_network(22, rows=64, width=64, hidden=128)
    count, different = both_ways(graph, wish)
    assert different < count


def test_tied_parameters_keep_their_stages_apart():
    graph = residual_network(22, rows=64, width=64, hidden=128, is_tied=True)
    count, different = both_ways(graph, Constraints(pp=8, dp=1, virtual=1, recompute="none"))
    assert 3 <= different < count  # first and last share a parameter, those between do not


def test_other_choices_of_what_is_kept_tell_stages_apart():
    graph = residual_network(22, rows=64, width=64, hidden=128)
    kept = {"layers.0": "full", "layers.1": "full", "*": "none"}
    _, plain = both_ways(graph, Constraints(pp=4, dp=2, virtual=1, recompute="none"))
    _, mixed = both_ways(graph, Constraints(pp=4, dp=2, virtual=1, recompute=kept))
    assert plain <= mixed


def test_parameters_that_are_read_in_parts_do_not_tell_stages_apart():
    config = GPT2Config(n_embd=64, n_layer=12, n_head=4, n_positions=32, vocab_size=128)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    ids = torch.zeros((16, 32), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    graph = capture_call(model, batch, None, None, mode="train", precision=None)[1].graph
    count, different = both_ways(
        graph, Constraints(pp=4, tp=2, virtual=3, num_microbatches=4, recompute="none")
    )
    assert count == 12
    assert different <= 6  # the first, the last, few kinds between; each has weights in parts
