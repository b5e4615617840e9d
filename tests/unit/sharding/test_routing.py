"""Which groups of sorted rows may be split, and what plans ask about them."""

from __future__ import annotations

import pytest

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorMeta
from autopar.sharding.build import signatures_of
from autopar.sharding.emitter import Emitter
from autopar.sharding.placement import (
    R,
    Routed,
    RoutedForm,
    Shard,
    local_shape,
    parse_placement,
)
from autopar.sharding.routing import (
    are_rows_consistent,
    capacity_percent_of,
    exchanges_rows,
    expert_weights,
    routes_rows,
    splits_experts,
)
from autopar.sharding.signature import AxisStrategy, axis_strategies

TOKENS, K, EXPERTS, HIDDEN = 6, 2, 4, 3
SLOTS = TOKENS * K
INT, F = "int64", "float32"


def _node(
    name: str, op: str, args: tuple[object, ...], *shapes: tuple[tuple[int, ...], str]
) -> Node:
    metas = tuple(TensorMeta(shape, dtype) for shape, dtype in shapes)
    return Node(name, op, args, metas if op.endswith("moe_route") else metas[0])  # type: ignore[arg-type]


def _graph(*extra: Node, outputs: tuple[str, ...] = ("out",)) -> Graph:
    inputs = (
        Input("x", InputKind.USER, "x", TensorMeta((TOKENS, HIDDEN), F)),
        Input("ids", InputKind.USER, "ids", TensorMeta((SLOTS,), INT)),
        Input("w", InputKind.PARAM, "w", TensorMeta((HIDDEN, EXPERTS, HIDDEN), F)),
    )
    rows = ((SLOTS, HIDDEN), F)
    nodes = (
        _node("route", "autopar.moe_route", (Ref("ids"), EXPERTS, K),
              ((SLOTS,), INT), ((EXPERTS,), INT), ((2, EXPERTS), INT)),
        _node("order", "getitem", (Ref("route"), 0), ((SLOTS,), INT)),
        _node("counts", "getitem", (Ref("route"), 1), ((EXPERTS,), INT)),
        _node("splits", "getitem", (Ref("route"), 2), ((2, EXPERTS), INT)),
        _node("rows", "autopar.moe_dispatch", (Ref("x"), Ref("order"), Ref("splits"), K), rows),
        _node("turned", "aten.permute.default", (Ref("w"), (1, 0, 2)),
              ((EXPERTS, HIDDEN, HIDDEN), F)),
        _node("product", "autopar.grouped_mm", (Ref("rows"), Ref("turned"), Ref("counts"), 1.0),
              rows),
        *extra,
        _node("out", "autopar.moe_combine",
              (Ref("product"), Ref("order"), Ref("splits"), K, (TOKENS, HIDDEN)),
              ((TOKENS, HIDDEN), F)),
    )  # fmt: skip
    return Graph(
        inputs, nodes, tuple(Output(OutputKind.OUTPUT, name, Ref(name)) for name in outputs)
    )


def _forms(graph: Graph, name: str = "route") -> set[RoutedForm]:
    signature = signatures_of(graph)[name]
    assert signature is not None
    placements = [p for s in signature.extra for p in (*s.inputs, *s.outputs)]
    return {p.form for p in placements if isinstance(p, Routed)}


def test_a_plain_group_has_every_form() -> None:
    graph = _graph()
    for name in ("route", "rows", "product", "out"):
        assert _forms(graph, name) == set(RoutedForm)
    assert _forms(graph, "turned") == set()


def test_row_wise_operators_pass_rows_on() -> None:
    relu = _node("relu", "aten.relu.default", (Ref("product"),), ((SLOTS, HIDDEN), F))
    graph = _graph(relu)
    assert _forms(graph, "relu") == set(RoutedForm)
    texts = {str(s) for s in axis_strategies(signatures_of(graph)["relu"], 2)}  # type: ignore[arg-type]
    assert {"T(0) -> T(0) | d0", "E(0) -> E(0)", "X(0) -> X(0)"} <= texts


def test_a_sum_over_rows_leaves_tokens_only() -> None:
    total = _node("total", "aten.sum.dim_IntList", (Ref("product"), (0,), False), ((HIDDEN,), F))
    graph = _graph(total, outputs=("out", "total"))
    assert _forms(graph) == {RoutedForm.TOKENS}
    texts = {str(s) for s in axis_strategies(signatures_of(graph)["total"], 2)}  # type: ignore[arg-type]
    assert "T(0) -> P(sum) | d0" in texts


@pytest.mark.parametrize(
    "reader",
    [
        _node("bad", "aten.add.Tensor", (Ref("order"), 1), ((SLOTS,), INT)),
        _node("bad", "aten.cumsum.default", (Ref("product"), 0), ((SLOTS, HIDDEN), F)),
        _node("bad", "aten.view.default", (Ref("product"), (TOKENS, K, HIDDEN)),
              ((TOKENS, K, HIDDEN), F)),
        _node("bad", "unknown.op.default", (Ref("product"),), ((SLOTS, HIDDEN), F)),
        _node("bad", "autopar.moe_dispatch", (Ref("product"), Ref("order"), Ref("splits"), 1),
              ((SLOTS, HIDDEN), F)),
    ],
    ids=["order", "scan", "neighbours", "no rule", "sorted twice"],
)  # fmt: skip
def test_a_reader_that_needs_the_common_order_keeps_the_group_whole(reader: Node) -> None:
    graph = _graph(reader, outputs=("out", "bad"))
    for name in ("route", "rows", "product", "out"):
        assert _forms(graph, name) == set()


def test_rows_that_leave_the_program_keep_the_group_whole() -> None:
    assert _forms(_graph(outputs=("out", "product"))) == set()
    assert _forms(_graph(outputs=("out", "counts"))) == set(RoutedForm)  # counts have a place


def test_tokens_and_experts_must_divide() -> None:
    signature = signatures_of(_graph())["route"]
    assert signature is not None

    def forms(parts: int) -> set[str]:
        return {str(s.outputs[0])[0] for s in axis_strategies(signature, parts)}

    assert forms(2) == {"R", "T", "E", "X"}
    assert forms(3) == {"R", "T"}  # 6 tokens, 4 experts
    assert forms(4) == {"R", "E"}
    divided = axis_strategies(signature, 2, divide={"t": 2})
    assert {str(s.outputs[0])[0] for s in divided} == {"R", "E"}


def test_expert_weights_are_found_through_views() -> None:
    graph = _graph()
    found = expert_weights(graph, signatures_of(graph))
    assert list(found) == ["w"]
    assert (found["w"].group, found["w"].dim, found["w"].is_free) == ("route", 1, True)
    whole = _graph(outputs=("out", "product"))
    assert not expert_weights(whole, signatures_of(whole))["w"].is_free


def test_rows_are_consistent_only_in_the_form_in_which_they_are_made() -> None:
    graph = _graph()
    signatures = signatures_of(graph)
    choices = {}
    for node in graph.nodes:
        signature = signatures.get(node.name)
        if signature is not None:
            fitting = [s for s in axis_strategies(signature, 2) if "E(0)" in str(s)][:1]
            choices.update(dict.fromkeys([node.name] if fitting else [], *fitting))
    assert are_rows_consistent(graph, choices)
    assert all(routes_rows(s) and splits_experts(s) and not exchanges_rows(s)
               for s in choices.values())  # fmt: skip
    del choices["product"]
    assert not are_rows_consistent(graph, choices)
    assert capacity_percent_of({"tp": choices}) == 0
    assert capacity_percent_of({"tp": {"a": AxisStrategy.parse("E(0,150) -> E(0,150)")}}) == 150


# -- the placement -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["T(0)", "E(1)", "X(0)", "X(0,150)"])
def test_placements_of_rows_are_read_as_they_print(text: str) -> None:
    assert str(parse_placement(text)) == text


def test_room_for_rows_by_hand() -> None:
    def room(text: str, parts: int) -> int:
        return local_shape((96, 3), (parse_placement(text),), (parts,))[0]

    assert [room(t, 4) for t in ("T(0)", "E(0)", "X(0)")] == [24, 96, 96]
    assert [room(t, 4) for t in ("E(0,100)", "X(0,150)", "X(0,900)")] == [24, 36, 96]


@pytest.mark.parametrize(
    ("have", "want"), [("T(0)", "R"), ("R", "T(0)"), ("T(0)", "S(0)"), ("E(0)", "X(0)")]
)
def test_rows_cannot_change_their_layout(have: str, want: str) -> None:
    emitter = Emitter(("tp",), (2,))
    ref = emitter.bind("rows", TensorMeta((8, 3), F))
    with pytest.raises(ShardingError, match="their order is each rank's own"):
        emitter.reshard(ref, (16, 3), (parse_placement(have),), (parse_placement(want),))


def test_an_outer_axis_cannot_cut_rows_of_an_inner_one() -> None:
    emitter = Emitter(("dp", "tp"), (2, 2))
    rows = Routed(0, RoutedForm.TOKENS)
    ref = emitter.bind("rows", TensorMeta((8, 3), F))
    with pytest.raises(ShardingError, match="their order is each rank's own"):
        emitter.reshard(ref, (16, 3), (R, rows), (Shard(0), rows))
    assert emitter.reshard(ref, (16, 3), (R, rows), (Shard(1), rows)) is not None
