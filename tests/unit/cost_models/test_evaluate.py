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
from cost_models.evaluate import evaluate_program

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
    # tp: 128 B reduced twice and 256 B gathered, 2 ranks; dp: 256 B scattered, 3 ranks
    cost = evaluate_program(GRAPH, Flat(), {"tp": (0, 1), "dp": (0, 2, 4)}, where="forward")
    assert cost.compute_s == 2
    assert cost.axis_comm_s == {"tp": 2 * (128 + 256 + 128), "dp": 3 * 256}
    assert cost.comm_s == 1024 + 768
    assert cost.total_s == 1794
    assert cost.phase_s == {Phase.FORWARD: 1 + 256, Phase.BACKWARD: 512 + 768 + 256 + 1}
    assert cost.flops == 2 * 4 * 8 * 8
    assert cost.collectives == (
        CollectiveTotal(
            kind="all_gather", axis="tp", where="forward", count=1, payload_bytes=256, time_s=512
        ),
        CollectiveTotal(
            kind="all_reduce", axis="tp", where="forward", count=2, payload_bytes=256, time_s=512
        ),
        CollectiveTotal(
            kind="reduce_scatter", axis="dp", where="forward", count=1, payload_bytes=256,
            time_s=768,
        ),
    )  # fmt: skip


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
