from __future__ import annotations

import pytest

from autopar.errors import ShardingError
from autopar.ir.graph import InputKind, OutputKind
from autopar.sharding.build import signatures_of
from autopar.sharding.placement import Shard
from autopar.sharding.propagate import DataAxes, split_data_axes
from tests.graphs import GraphBuilder, mlp


def test_the_batch_dim_need_not_be_dim_0() -> None:
    b = GraphBuilder()
    x = b.input("x", (4, 8))
    positions = b.input("positions", (3, 4, 8))
    w = b.param("w", (8,))
    total = b.op("s", "aten.sum.dim_IntList", (positions, (0,), False), (4, 8))
    y = b.op("y", "aten.add.Tensor", (x, total), (4, 8))
    z = b.op("z", "aten.mul.Tensor", (y, w), (4, 8))
    wide = b.op("softmax", "aten._softmax.default", (z, 1, False), (4, 8))
    b.output(
        OutputKind.LOSS, "loss", b.op("loss", "aten.sum.dim_IntList", (wide, (0, 1), False), ())
    )
    graph = b.build()
    assert DataAxes(graph, signatures_of(graph)).batch_dims(2) == {"x": 0, "positions": 1}


def test_a_vector_as_long_as_the_batch_is_not_cut() -> None:
    b = GraphBuilder()
    x = b.input("x", (4, 4))
    scale = b.input("scale", (4,))
    y = b.op("y", "aten.mul.Tensor", (x, scale), (4, 4))
    z = b.op("z", "aten._softmax.default", (y, 1, False), (4, 4))
    b.output(OutputKind.LOSS, "loss", b.op("loss", "aten.sum.dim_IntList", (z, (0, 1), False), ()))
    graph = b.build()
    assert DataAxes(graph, signatures_of(graph)).batch_dims(4) == {"x": 0}


def test_a_count_of_the_inputs_is_made_once_per_step() -> None:
    b = GraphBuilder()
    x = b.input("x", (8, 4))
    mask = b.input("mask", (8, 4))
    w = b.param("w", (4,))
    seen = b.op("seen", "aten.mul.Tensor", (x, mask), (8, 4))
    y = b.op("y", "aten.mul.Tensor", (seen, w), (8, 4))
    total = b.op("total", "aten.sum.dim_IntList", (y, (0, 1), False), ())
    count = b.op("count", "aten.sum.dim_IntList", (mask, (0, 1), False), ())
    b.output(OutputKind.LOSS, "loss", b.op("loss", "aten.div.Tensor", (total, count), ()))
    graph = b.build()
    splits = split_data_axes(graph, signatures_of(graph), num_microbatches=4, dp=2)
    assert splits.mb.prologue == {"count"}
    assert str(splits.mb.choices["loss"]) == "P(sum) R -> P(sum)"


def test_mixing_samples_of_micro_batches_is_refused_with_the_line() -> None:
    b = GraphBuilder()
    x = b.input("x", (8, 4))
    w = b.param("w", (4,))
    y = b.op("y", "aten.mul.Tensor", (x, w), (8, 4))
    s = b.op("s", "aten._softmax.default", (y, 0, False), (8, 4), source="model.py:7 in forward")
    b.output(OutputKind.LOSS, "loss", b.op("loss", "aten.sum.dim_IntList", (s, (0, 1), False), ()))
    graph = b.build()
    with pytest.raises(ShardingError, match=r"model\.py:7 in forward.*num_microbatches=1"):
        split_data_axes(graph, signatures_of(graph), num_microbatches=2, dp=1)


def test_a_batch_that_does_not_divide_is_refused_with_both_numbers() -> None:
    graph = mlp(batch=6)
    with pytest.raises(ShardingError, match=r"4 equal parts .*'x' has 6 in dim 0"):
        split_data_axes(graph, signatures_of(graph), num_microbatches=2, dp=2)


def test_gradients_of_replicated_parameters_stay_pending() -> None:
    graph = mlp()
    splits = split_data_axes(graph, signatures_of(graph), num_microbatches=2, dp=2)
    for axis in (splits.mb, splits.dp):
        assert str(axis.choices["gw0a"]).startswith("S(1) S(0) -> P(sum)")
        assert axis.choices["x"] == Shard(0)
        assert axis.moved_bytes == 0


def test_a_tangent_of_an_output_follows_the_batch() -> None:
    b = GraphBuilder()
    x = b.input("x", (8, 4))
    w = b.param("w", (4,))
    t = b.input("t", (8, 4), InputKind.TANGENT)
    y = b.op("y", "aten.mul.Tensor", (x, w), (8, 4))
    b.output(OutputKind.OUTPUT, "y", y)
    g = b.op("g", "aten.mul.Tensor", (t, x), (8, 4), twin="y")
    b.output(
        OutputKind.GRAD, "w", b.op("gw", "aten.sum.dim_IntList", (g, (0,), False), (4,), twin="y")
    )
    graph = b.build()
    assert DataAxes(graph, signatures_of(graph)).batch_dims(2)["t"] == 0


def test_a_batch_of_one_is_named_when_it_can_not_be_cut() -> None:
    b = GraphBuilder()
    x = b.input("x", (1, 8))
    w = b.param("w", (8,))
    y = b.op("y", "aten.mul.Tensor", (x, w), (1, 8))
    z = b.op("z", "aten._softmax.default", (y, 1, False), (1, 8))
    b.output(OutputKind.LOSS, "loss", b.op("loss", "aten.sum.dim_IntList", (z, (0, 1), False), ()))
    graph = b.build()
    with pytest.raises(ShardingError, match=r"a batch of 1 can't be cut into 2 micro-batches: 'x'"):
        split_data_axes(graph, signatures_of(graph), num_microbatches=2, dp=1)


def test_two_inputs_whose_samples_meet_in_pairs_have_a_batch_each() -> None:
    b = GraphBuilder()
    towers = []
    for name in ("texts", "images"):
        h = b.input(name, (8, 64))
        for layer in range(6):
            h = b.op(f"{name}{layer}", "aten.relu.default", (h,), (8, 64))
        total = b.op(f"{name}_total", "aten.sum.dim_IntList", (h, (1,), True), (8, 1))
        towers.append(total)
    other = b.op("other", "aten.permute.default", (towers[1], (1, 0)), (1, 8))
    pairs = b.op("pairs", "aten.mul.Tensor", (towers[0], other), (8, 8))
    probability = b.op("probability", "aten._softmax.default", (pairs, 1, False), (8, 8))
    b.output(
        OutputKind.LOSS,
        "loss",
        b.op("loss", "aten.sum.dim_IntList", (probability, (0, 1), False), ()),
    )
    graph = b.build()
    axes = DataAxes(graph, signatures_of(graph))
    assert axes.batch_dims(2) == {"texts": 0, "images": 0}
    assert axes.split(num_microbatches=1, dp=2).dp.unsplit_bytes < 8 * 64
