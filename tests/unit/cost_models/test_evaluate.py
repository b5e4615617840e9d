from __future__ import annotations

from collections.abc import Sequence

import pytest

from autopar.cluster import parse_devices
from autopar.errors import ConfigError
from autopar.ir.graph import (
    Arg,
    Graph,
    Input,
    InputKind,
    Meta,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
)
from autopar.plan.types import CollectiveTotal
from cost_models.analytic import AnalyticCostModel
from cost_models.evaluate import evaluate_program, layout_copies

X = TensorMeta((4, 8), "float32")
W = TensorMeta((8, 8), "float32")
WIDE = TensorMeta((4, 16), "float32")


class Flat:
    """One second for an operator, and for each byte and each rank of a collective."""

    source = "flat"

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        return 1.0

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        return payload_bytes * len(ranks)


GRAPH = Graph(
    (Input("x", InputKind.USER, "x", X), Input("w", InputKind.PARAM, "w", W)),
    (
        Node("a", "aten.mm.default", (Ref("x"), Ref("w")), X),
        Node("b", "comm.all_reduce", (Ref("a"), "sum", "tp"), X),
        Node("c", "comm.all_gather", (Ref("b"), 1, "tp", 16), WIDE, phase=Phase.BACKWARD),
        Node("d", "comm.reduce_scatter", (Ref("c"), "sum", 1, "dp"), X, phase=Phase.BACKWARD),
        Node("e", "comm.all_reduce", (Ref("d"), "sum", "tp"), X, phase=Phase.BACKWARD),
        Node("f", "aten.relu.default", (Ref("e"),), X, phase=Phase.BACKWARD),
    ),
    (Output(OutputKind.OUTPUT, "f", Ref("f")),),
)


def test_a_program_by_hand():
    # tp: 128 B reduced twice and 256 B gathered, 2 ranks; dp: 256 B scattered, 3 ranks; two copies
    # around each of the latter, which go along the second dim
    cost = evaluate_program(GRAPH, Flat(), {"tp": (0, 1), "dp": (0, 2, 4)}, where="forward")
    assert cost.compute_s == 2
    assert cost.axis_comm_s == {"tp": 2 * (128 + 256 + 128) + 2, "dp": 3 * 256 + 2}
    assert cost.comm_s == 1026 + 770
    assert cost.total_s == 1798
    assert cost.phase_s == {Phase.FORWARD: 1 + 256, Phase.BACKWARD: 514 + 770 + 256 + 1}
    assert cost.flops == 2 * 4 * 8 * 8
    assert cost.collectives == (
        CollectiveTotal(
            kind="all_gather", axis="tp", where="forward", count=1, payload_bytes=256, time_s=514
        ),
        CollectiveTotal(
            kind="all_reduce", axis="tp", where="forward", count=2, payload_bytes=256, time_s=512
        ),
        CollectiveTotal(
            kind="reduce_scatter", axis="dp", where="forward", count=1, payload_bytes=256,
            time_s=770,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("node", "shapes"),
    [
        (Node("y", "comm.all_gather", (Ref("x"), 0, "tp", 8), TensorMeta((8, 8), "float32")), []),
        (Node("y", "comm.all_gather", (Ref("x"), -1, "tp", 16), WIDE), [(4, 8), (4, 16)]),
        (Node("y", "comm.reduce_scatter", (Ref("x"), "sum", 1, "tp"), W), [(4, 8), (8, 8)]),
        (Node("y", "comm.all_to_all", (Ref("x"), 1, 0, "tp", 16), W), [(8, 8)]),
        (Node("y", "comm.all_to_all", (Ref("x"), 0, 1, "tp", 8), W), [(4, 8), (8, 8)]),
        (Node("y", "comm.all_reduce", (Ref("x"), "sum", "tp"), X), []),
    ],
)
def test_dims_that_are_not_the_first_are_brought_to_the_front(node, shapes):
    assert [m.shape for m in layout_copies(node, X)] == shapes


def test_a_dim_behind_dims_of_one_is_in_front():
    node = Node("y", "comm.all_gather", (Ref("x"), 1, "tp", 8), TensorMeta((1, 8, 8), "float32"))
    assert layout_copies(node, TensorMeta((1, 4, 8), "float32")) == ()


def test_totals_are_for_all_runs_of_a_step_and_seconds_for_one():
    one = evaluate_program(GRAPH, Flat(), {"tp": (0, 1)})
    many = evaluate_program(GRAPH, Flat(), {"tp": (0, 1)}, runs=5)
    assert many.total_s == one.total_s
    assert [t.count for t in many.collectives] == [5 * t.count for t in one.collectives]
    assert [t.time_s for t in many.collectives] == [5 * t.time_s for t in one.collectives]


def test_parts_add_up_with_the_real_prices():
    model = AnalyticCostModel(parse_devices("8:h100-sxm"))
    cost = evaluate_program(GRAPH, model, {"tp": (0, 1), "dp": (0, 2)})
    assert sum(cost.phase_s.values()) == pytest.approx(cost.total_s)
    assert sum(cost.axis_comm_s.values()) == pytest.approx(cost.comm_s)
    assert sum(t.time_s for t in cost.collectives) == pytest.approx(cost.comm_s)
    assert cost.moved_ops == 2


def test_an_axis_without_ranks_is_free_but_counted():
    cost = evaluate_program(GRAPH, AnalyticCostModel(parse_devices("8:h100-sxm")), {})
    assert cost.comm_s == 0
    assert [t.count for t in cost.collectives] == [1, 2, 1]


def test_an_unknown_collective_is_refused():
    graph = Graph(GRAPH.inputs, (Node("q", "comm.scan", (Ref("x"), "tp"), X),), ())
    with pytest.raises(ConfigError, match=r"operator 'q': 'comm.scan' is no collective; known are"):
        evaluate_program(graph, Flat(), {})
    graph = Graph(GRAPH.inputs, (Node("q", "comm.all_reduce", (Ref("x"), "sum", 3), X),), ())
    with pytest.raises(ConfigError, match=r"the axis of comm.all_reduce is 3, not text"):
        evaluate_program(graph, Flat(), {})
