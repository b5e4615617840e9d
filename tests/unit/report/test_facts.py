"""With the graph the report speaks of the model's own names; without it, of the plan's texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.graph import Graph, Input, InputKind, Node, Phase, Ref, TensorMeta
from autopar.plan.types import MeshShape
from autopar.report.facts import facts_of
from autopar.report.text import render_plan

META = TensorMeta((8, 16), "float32")  # 512 bytes
FORWARD = (
    Node("mm", "aten.mm.default", (Ref("u_x"), Ref("p_h_0_w")), META, scope="net.h.0.fc"),
    Node("tanh", "aten.tanh.default", (Ref("mm"),), META, scope="net.h.0.act"),
    Node("mm_1", "aten.mm.default", (Ref("tanh"), Ref("p_h_1_w")), META, scope="net.h.1.fc"),
    Node("tanh_1", "aten.tanh.default", (Ref("mm_1"),), META, scope="net.h.1.act"),
)
BACKWARD = tuple(
    Node(f"mul{i}", "aten.mul.Tensor", (Ref(v), Ref(v)), META, phase=Phase.BACKWARD)
    for i, v in enumerate(("tanh_1", "mm_1", "tanh", "mm"))
)


@pytest.fixture
def graph():
    inputs = (
        Input("u_x", InputKind.USER, "batch.x", META),
        Input("u_mask", InputKind.USER, "mask", META),
        Input("p_h_0_w", InputKind.PARAM, "net.h.0.w", META, True),
        Input("p_h_1_w", InputKind.PARAM, "net.h.1.w", META, True),
    )
    return Graph(inputs, (*FORWARD, *BACKWARD), ())


@pytest.fixture
def plan(example_plan):
    stage = replace(
        example_plan.stages[0], first="mm", recompute=("tanh", "tanh_1"), num_in_flight=2
    )
    cut = dict.fromkeys(("tanh", "tanh_1"), "S(0) -> S(0) | b")
    cut |= dict.fromkeys(("mm", "mm_1"), "S(0) R -> S(0) | b")
    return replace(
        example_plan,
        mesh=MeshShape(dp=2, tp=2),
        stages=(stage,),
        splits={
            "mb": {"u_x": "S(0)", **cut},
            "dp": {"u_x": "S(0)"},
            "tp": {
                "p_h_0_w": "S(1)", "p_h_1_w": "S(1)",
                "mm": "R S(1) -> S(1) | n", "mm_1": "R S(1) -> S(1) | n",
            },
        },
    )  # fmt: skip


def test_with_the_graph_arguments_and_parameters_have_the_users_names(plan, graph):
    facts = facts_of(plan, graph)
    assert facts.arguments == {"batch.x": {"mb": 0, "dp": 0}}
    assert facts.whole_arguments == ("mask",)
    assert facts.parameters == (("net.h.*.w", 2, "column-parallel over tp"),)
    assert facts.num_operators == 8


def test_without_the_graph_they_have_the_plans(plan):
    facts = facts_of(plan)
    assert facts.arguments == {"x": {"mb": 0, "dp": 0}}
    assert facts.parameters == (("h_*_w", 2, "dim 1 over tp"),)
    assert facts.recompute == {0: ("2 operators: 2 x tanh",)}


def test_recompute_is_told_by_block_with_the_bytes_that_it_saves(plan, graph):
    # two values of 512 bytes, each cut into 4 micro-batches
    assert facts_of(plan, graph).recompute == {
        0: (
            "net.h.[0-1]: everything but fc",
            "keeps about 256 B less per micro-batch, 512 B with 2 in flight",
        )
    }


def test_zero_3_is_told_per_parameter(plan, graph):
    stage = replace(plan.stages[0], zero_level=3)
    rows = facts_of(replace(plan, stages=(stage,)), graph).parameters
    assert rows == (("net.h.*.w", 2, "column-parallel over tp, dp (ZeRO-3)"),)


def test_the_report_with_a_graph(plan, graph):
    text = render_plan(plan, width=100, graph=graph)
    assert "  batch.x: dim 0 in 4 micro-batches x 2 data ranks\n" in text
    assert "  mask: whole on every rank\n" in text
    assert "4 of 8 operators split, the others replicated" in text
