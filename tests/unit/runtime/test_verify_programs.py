"""A captured model under a plan, in simulation, equals the captured graph on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.capture.reference import bind_inputs
from autopar.capture.tracing import capture
from autopar.errors import EquivalenceError
from autopar.ir.graph import Phase
from autopar.ir.promote import promote
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.decisions import Decisions
from autopar.sharding.propagate import split_data_axes
from tests.zoo import build


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2 (tied embeddings, dropout) over two micro-batches, dp 2, three stages, ZeRO 3."""
    model, batch = build("gpt2", dropout=0.1)
    captured = capture(model, kwargs=batch)
    graph = promote(captured.graph)
    signatures = signatures_of(graph)
    mesh = MeshShape(pp=3, dp=2)
    splits = split_data_axes(graph, signatures, num_microbatches=2, dp=2)
    forward = [n.name for n in graph.nodes if n.phase is Phase.FORWARD and n.op != "getitem"]
    decisions = Decisions(
        axis_sizes=(2, 2, 1),
        choices=splits.choices,
        firsts=(forward[len(forward) // 3], forward[2 * len(forward) // 3]),
        zero_levels=(3, 3, 3),
    )
    programs = localize(graph, decisions, signatures)
    tied = [(p.owner, s) for p in programs.params.values() for s in p.stages if s != p.owner]
    actions = action_lists(
        compute_order(ScheduleKind.ONE_F_ONE_B, 3, 1, 2),
        mesh,
        forward_edges=programs.forward_edges,
        backward_edges=programs.backward_edges,
        tied=tied,
        zero_levels=(3, 3, 3),
    )
    values = bind_inputs(captured, model, kwargs=batch, graph=graph, rng_key=5)
    return graph, programs, mesh, actions, values


def test_losses_gradients_and_weights_are_those_of_one_device(gpt2):
    outcome = verify_programs(*gpt2)
    assert outcome.worst.ratio < 1e-2  # far from the limit: rounding only
    names = {gap.name for gap in outcome.gaps}
    assert "gradient of transformer.wte.weight" in names  # tied: once, by its first name
    assert "weight transformer.h.0.ln_1.weight after a step" in names
    assert not any("lm_head" in name for name in names)


def test_a_tied_weight_travels_once_each_way(gpt2):
    _, programs, _, actions, _ = gpt2
    kinds = [str(a) for row in actions for a in row if "TIED" in a.kind.value]
    assert kinds == ["0FETCH_TIED<2", "0SYNC_TIED<2", "2FETCH_TIED<0", "2SYNC_TIED<0"]
    assert programs.params["transformer.wte.weight"].owner == 0


def test_another_plan_gives_the_same_dropout(gpt2):
    graph, programs, mesh, actions, values = gpt2
    key = next(i.name for i in graph.inputs if i.kind.value == "rng")
    other = {**values, key: values[key] + 1}
    assert verify_programs(graph, programs, mesh, actions, other).step is not None


def test_a_gradient_that_never_comes_home_is_found(gpt2):
    graph, programs, mesh, actions, values = gpt2
    lost = [[a for a in row if a.kind.value != "SYNC_TIED"] for row in actions]
    with pytest.raises(EquivalenceError, match=r"transformer\.wte\.weight"):
        verify_programs(graph, programs, mesh, lost, values)


def test_a_reduction_that_is_left_out_is_found(gpt2):
    graph, programs, mesh, actions, values = gpt2
    stage = programs.stages[1]
    nodes = tuple(
        replace(n, op="local.shard", args=(n.args[0], n.args[2], 0, 2))
        if n.op == "comm.reduce_scatter"
        else n
        for n in stage.reduce.nodes
    )
    broken = replace(stage, reduce=replace(stage.reduce, nodes=nodes))
    stages = (programs.stages[0], broken, programs.stages[2])
    with pytest.raises(EquivalenceError, match=r"transformer\.h\."):
        verify_programs(graph, replace(programs, stages=stages), mesh, actions, values)
