"""Undivided arithmetic is found, and products of sorted rows are counted once per row."""

from __future__ import annotations

from autopar.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorMeta
from autopar.sharding.signature import AxisStrategy
from cost_models.flops import work_of
from cost_models.undivided import undivided

F = "float32"


def _meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, F)


GRAPH = Graph(
    (
        Input("x", InputKind.USER, "x", _meta(4, 8)),
        Input("w", InputKind.PARAM, "w", _meta(8, 2)),
        Input("v", InputKind.PARAM, "v", _meta(2, 16)),
    ),
    (
        Node("mm", "aten.mm.default", (Ref("x"), Ref("w")), _meta(4, 2)),
        Node("relu", "aten.relu.default", (Ref("mm"),), _meta(4, 2)),
        Node("mm_1", "aten.mm.default", (Ref("relu"), Ref("v")), _meta(4, 16)),
    ),
    (Output(OutputKind.OUTPUT, "y", Ref("mm_1")),),
)


def test_operators_that_are_left_out_or_pass_pending_sums_are_whole() -> None:
    rows = AxisStrategy.parse("S(0) R -> S(0) | m")
    pending = AxisStrategy.parse("P(sum) R -> P(sum)")
    assert undivided(GRAPH, {"mm": rows, "mm_1": rows}).whole_share == 0
    found = undivided(GRAPH, {"mm": rows})
    # 2 * 4 * 8 * 2 = 128 and 2 * 4 * 2 * 16 = 256 FLOPs
    assert (found.total_flops, found.whole_flops, found.whole) == (384, 256, ("mm_1",))
    assert str(found) == "66.7% of 384 FLOPs whole on every rank: mm_1"
    assert undivided(GRAPH, {"mm": rows, "mm_1": pending}).whole == ("mm_1",)


def test_rows_of_a_grouped_product_meet_one_matrix_each() -> None:
    rows, weight, counts = _meta(12, 8), _meta(4, 8, 2), TensorMeta((4,), "int64")
    args = (Ref("a"), Ref("b"), Ref("c"), 1.0)
    work = work_of("autopar.grouped_mm", args, [rows, weight, counts], _meta(12, 2))
    assert work.flops == 2 * 12 * 8 * 2
    share = work_of("autopar.grouped_mm", (*args[:3], 0.25), [rows, weight, counts], _meta(12, 2))
    assert share.flops == work.flops / 4
    gradient = work_of(
        "autopar.grouped_mm_weight", args, [rows, _meta(12, 2), counts], _meta(4, 8, 2)
    )
    assert gradient.flops == work.flops
