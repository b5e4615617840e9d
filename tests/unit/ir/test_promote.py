"""Promotion to double precision."""

from __future__ import annotations

from autopar.ir.graph import (
    Dtype,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Ref,
    TensorMeta,
)
from autopar.ir.printer import print_graph
from autopar.ir.promote import promote

HALF = TensorMeta((2,), "bfloat16")


def test_every_float_becomes_double_and_nothing_else():
    graph = Graph(
        (
            Input("x", InputKind.USER, "x", HALF),
            Input("i", InputKind.USER, "i", TensorMeta((2,), "int64")),
        ),
        (
            Node("wide", "aten._to_copy.default", (Ref("x"),), TensorMeta((2,), "float32"),
                 kwargs=(("dtype", Dtype("float32")),)),
            Node("top", "aten.topk.default", (Ref("wide"), 1, -1, True, True),
                 (TensorMeta((1,), "float32"), TensorMeta((1,), "int64"))),
        ),
        (Output(OutputKind.OUTPUT, "y", Ref("wide")),),
    )  # fmt: skip
    assert print_graph(promote(graph)).splitlines() == [
        "input  x: float64[2] = user 'x'",
        "input  i: int64[2] = user 'i'",
        "%wide: float64[2] = aten._to_copy.default(%x, dtype=float64)",
        "%top: (float64[1], int64[1]) = aten.topk.default(%wide, 1, -1, True, True)",
        "output output 'y' = %wide",
    ]
