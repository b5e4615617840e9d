"""Invariants, text and hash of programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import PassError
from autopar.ir.graph import (
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
)
from autopar.ir.hashing import graph_hash
from autopar.ir.printer import print_graph
from autopar.ir.verify import verify_graph, verify_names

ROW = TensorMeta((2, 3), "float32")
GRAPH = Graph(
    (
        Input("p_w", InputKind.PARAM, "w", ROW, requires_grad=True, aliases=("v",)),
        Input("t_loss", InputKind.TANGENT, "loss", TensorMeta((), "float32")),
    ),
    (
        Node("relu", "aten.relu.default", (Ref("p_w"),), ROW, scope="act", source="m.py:3 in f"),
        Node("sort", "aten.sort.default", (Ref("relu"), -1, False),
             (ROW, TensorMeta((2, 3), "int64"))),
        Node("getitem", "getitem", (Ref("sort"), 0), ROW),
        Node("expand", "aten.expand.default", (Ref("t_loss"), (2, 3)), ROW,
             phase=Phase.BACKWARD, twin="relu", scope="act"),
    ),
    (Output(OutputKind.OUTPUT, "y", Ref("getitem")), Output(OutputKind.GRAD, "w", Ref("expand"))),
)  # fmt: skip


def with_node(index, **changes):
    nodes = list(GRAPH.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(GRAPH, nodes=tuple(nodes))


def test_text_is_stable():
    assert print_graph(GRAPH, details=True).splitlines() == [
        "input  p_w: float32[2, 3] = param 'w' trainable aliases=['v']",
        "input  t_loss: float32[] = tangent 'loss'",
        "%relu: float32[2, 3] = aten.relu.default(%p_w)  # scope=act m.py:3 in f",
        "%sort: (float32[2, 3], int64[2, 3]) = aten.sort.default(%relu, -1, False)",
        "%getitem: float32[2, 3] = getitem(%sort, 0)",
        "<%expand: float32[2, 3] = aten.expand.default(%t_loss, [2, 3])  # scope=act twin=relu",
        "output output 'y' = %getitem",
        "output grad 'w' = %expand",
    ]


def test_well_formed_graph_passes():
    verify_graph(GRAPH)


@pytest.mark.parametrize(
    ("graph", "text"),
    [
        (with_node(0, args=(Ref("expand"),)), r"'relu' \(aten.relu.default\) reads 'expand'"),
        (with_node(1, name="relu"), "the name 'relu' is defined twice"),
        (with_node(2, args=(Ref("sort"), 2)), "takes result 2 of 'sort', which has no such"),
        (with_node(2, meta=TensorMeta((3,), "float32")), r"is float32\[3\], but result 0 of"),
        (with_node(0, meta=None), r"operator 'relu' \(aten.relu.default\) has no result meta"),
        (with_node(0, meta=TensorMeta((-1,), "float32")), "'relu' has a negative size"),
        (replace(GRAPH, outputs=(Output(OutputKind.LOSS, "loss", Ref("gone")),)),
         "output loss:'loss' is 'gone', which nothing defines"),
    ],
)  # fmt: skip
def test_broken_graph_is_refused_by_name(graph, text):
    with pytest.raises(PassError, match=text):
        verify_graph(graph)


@pytest.mark.parametrize("check", [verify_graph, verify_names])
def test_an_operator_called_like_an_input_is_refused(check):
    with pytest.raises(PassError, match="the name 't_loss' is defined twice"):
        check(with_node(2, name="t_loss"))


def test_hash_ignores_source_lines_only():
    assert graph_hash(with_node(0, source="other.py:9 in g")) == graph_hash(GRAPH)
    others = [
        with_node(0, scope="b"),
        with_node(3, twin=None),
        with_node(1, args=(Ref("relu"), -1, True)),
        with_node(3, args=(Ref("t_loss"), (2, 3.0))),
        replace(GRAPH, inputs=GRAPH.inputs[::-1]),
        replace(GRAPH, outputs=GRAPH.outputs[:1]),
    ]
    assert len({graph_hash(g) for g in [GRAPH, *others]}) == 1 + len(others)
