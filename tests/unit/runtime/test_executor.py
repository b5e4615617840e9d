"""The executor frees values at their last use, and asks its driver for collectives."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from autopar.errors import PassError
from autopar.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorMeta
from autopar.runtime.executor import execute, flatten
from autopar.runtime.requests import Collective
from passes.base import PassContext
from passes.pipeline import build


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, "float32")


def load(nodes, outputs, inputs=("x",), shape=(4, 6)):
    graph = Graph(
        tuple(Input(n, InputKind.USER, n, meta(*shape)) for n in inputs),
        tuple(nodes),
        tuple(Output(OutputKind.OUTPUT, n, Ref(n)) for n in outputs),
    )
    ctx = PassContext(program="p", source=graph, axis_sizes={"tp": 2})
    return flatten(build(ctx), graph, "p")


def run(program, *inputs):
    running = execute(program, list(inputs))
    with pytest.raises(StopIteration) as stop:
        next(running)
    return stop.value.value


def relu(name, source):
    return Node(name, "aten.relu.default", (Ref(source),), meta(4, 6))


def test_scalars_lists_and_keywords_reach_the_operator():
    program = load(
        [
            Node("two", "aten.mul.Tensor", (Ref("x"), 2.0), meta(4, 6)),
            Node("both", "aten.cat.default", ((Ref("x"), Ref("two")), 1), meta(4, 12)),
            Node("sum", "aten.sum.dim_IntList", (Ref("both"), (1,), True), meta(4, 1)),
            Node("sub", "aten.sub.Tensor", (Ref("sum"), Ref("sum")), meta(4, 1), (("alpha", 3),)),
        ],
        ["both", "sub"],
    )
    x = torch.ones(4, 6)
    both, sub = run(program, x)
    assert torch.equal(both, torch.cat([x, 2 * x], 1))
    assert torch.equal(sub, torch.full((4, 1), -36.0))  # 18 - 3 * 18


def test_a_value_that_stands_alone_and_in_a_list_reaches_both_places():
    nodes = [
        Node("both", "aten.cat.default", ((Ref("x"), Ref("x")), 1), meta(4, 12)),
        Node("put", "aten.index_put.default", (Ref("ids"), (Ref("ids"),), Ref("ids"), True),
             TensorMeta((4,), "int64")),
    ]  # fmt: skip
    inputs = (
        Input("x", InputKind.USER, "x", meta(4, 6)),
        Input("ids", InputKind.USER, "ids", TensorMeta((4,), "int64")),
    )
    outputs = tuple(Output(OutputKind.OUTPUT, n, Ref(n)) for n in ("both", "put"))
    graph = Graph(inputs, tuple(nodes), outputs)
    ctx = PassContext(program="p", source=graph, axis_sizes={"tp": 2})
    both, put = run(flatten(build(ctx), graph, "p"), torch.ones(4, 6), torch.tensor([3, 2, 1, 0]))
    assert torch.equal(both, torch.ones(4, 12))
    assert torch.equal(put, torch.tensor([3, 3, 3, 3]))


def test_the_list_of_inputs_is_emptied_and_an_input_dies_at_its_last_use():
    program = load(
        [
            relu("a", "x"),
            Node("b", "comm.all_reduce", (Ref("a"), "sum", "tp"), meta(4, 6)),
            relu("c", "b"),
        ],
        ["c"],
    )
    inputs = [torch.ones(4, 6)]
    watched = weakref.ref(inputs[0])
    running = execute(program, inputs)
    request = next(running)
    gc.collect()
    assert inputs == []
    assert watched() is None  # x died after a = relu(x)
    operand = weakref.ref(request.tensor)
    del request
    gc.collect()
    assert operand() is None  # the driver alone held the operand
    with pytest.raises(StopIteration):
        running.send(torch.ones(4, 6))


def test_a_collective_is_waited_for_right_before_its_first_user():
    events = []

    class Pending:
        def wait(self):
            events.append("wait")
            return torch.full((4, 6), 3.0)

    program = load(
        [
            Node("far", "comm.all_reduce", (Ref("x"), "sum", "tp"), meta(4, 6)),
            Node("other", "comm.all_gather", (Ref("x"), -2, "tp", 8), meta(8, 6)),
            relu("near", "far"),
            Node("last", "aten.add.Tensor", (Ref("near"), Ref("far")), meta(4, 6)),
        ],
        ["last", "other"],
    )
    running = execute(program, [torch.ones(4, 6)])
    first = next(running)
    assert (first.kind, first.op, first.axis, first.node) == ("all_reduce", "sum", "tp", "far")
    second = running.send(Pending())
    assert isinstance(second, Collective)
    assert (second.dim, second.out_size) == (0, 8)  # dims are non-negative in requests
    assert events == []
    with pytest.raises(StopIteration) as stop:
        running.send(torch.zeros(8, 6))
    assert events == ["wait"]  # once, though there are two readers
    assert torch.equal(stop.value.value[0], torch.full((4, 6), 6.0))


def test_a_collective_that_only_the_outputs_read_is_waited_for():
    class Pending:
        def wait(self):
            return torch.zeros(4, 6)

    program = load([Node("far", "comm.all_reduce", (Ref("x"), "sum", "tp"), meta(4, 6))], ["far"])
    running = execute(program, [torch.ones(4, 6)])
    next(running)
    with pytest.raises(StopIteration) as stop:
        running.send(Pending())
    assert isinstance(stop.value.value[0], torch.Tensor)


def test_an_error_names_the_operator_and_the_user_s_line():
    node = Node("y", "aten.index_select.default", (Ref("x"), 0, Ref("i")), meta(1, 6),
                source="model.py:12 in forward")  # fmt: skip
    graph = Graph(
        (
            Input("x", InputKind.USER, "x", meta(4, 6)),
            Input("i", InputKind.USER, "i", TensorMeta((1,), "int64")),
        ),
        (node,),
        (Output(OutputKind.OUTPUT, "y", Ref("y")),),
    )
    ctx = PassContext(program="stage 0 forward", source=graph)
    program = flatten(build(ctx), graph, "stage 0 forward")
    with pytest.raises(IndexError) as caught:
        run(program, torch.ones(4, 6), torch.tensor([9]))
    assert caught.value.__notes__ == [
        "while running y of stage 0 forward (aten.index_select.default from model.py:12 in forward)"
    ]


def test_the_number_of_inputs_must_fit():
    program = load([relu("a", "x")], ["a"])
    with pytest.raises(PassError, match="p: 2 inputs, needs 1"):
        run(program, torch.ones(4, 6), torch.ones(4, 6))


def test_inputs_pass_through_and_missing_outputs_are_none():
    graph = Graph(
        (Input("x", InputKind.USER, "x", meta(4, 6)),),
        (),
        (Output(OutputKind.GRAD, "w", None), Output(OutputKind.OUTPUT, "x", Ref("x"))),
    )
    program = flatten(build(PassContext(program="p", source=graph)), graph, "p")
    x = torch.ones(4, 6)
    none, same = run(program, x)
    assert none is None
    assert same is x
