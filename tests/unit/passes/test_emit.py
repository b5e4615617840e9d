"""Programs become fx modules, with every value's shape and dtype as decided."""

from __future__ import annotations

import operator

import pytest
import torch

from autopar.errors import PassError
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
from passes import emit as emission
from passes.base import NAME_KEY, VALUE_KEY, PassContext
from passes.comm_ops import result_shape
from passes.emit import emit, fx_name
from passes.pipeline import build


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(shape, dtype)


def program(*nodes: Node, inputs: tuple[Input, ...], result: str) -> PassContext:
    outputs = (Output(OutputKind.OUTPUT, "result", Ref(result)),)
    return PassContext(
        program="a test", source=Graph(inputs, nodes, outputs), axis_sizes={"tp": 2, "dp": 3}
    )


X = Input("x", InputKind.USER, "x", meta(4, 6))


def test_one_fx_node_per_operator_with_its_name_and_fake_value():
    ctx = program(
        Node("view.1", "aten.view.default", (Ref("x"), (2, 12)), meta(2, 12)),
        Node("half", "aten._to_copy.default", (Ref("view.1"),), meta(2, 12, dtype="float16"),
             kwargs=(("dtype", Dtype("float16")),)),
        inputs=(X,), result="half",
    )  # fmt: skip
    module = build(ctx)
    calls = list(module.graph.nodes)[1:-1]
    assert [n.meta[NAME_KEY] for n in calls] == ["view.1", "half"]
    assert calls[1].meta[VALUE_KEY].dtype is torch.float16
    assert module(torch.ones(4, 6))[0].shape == (2, 12)


def test_views_run_as_reshape_so_that_any_layout_will_do():
    ctx = program(
        Node("t", "aten.permute.default", (Ref("x"), (1, 0)), meta(6, 4)),
        Node("v", "aten.view.default", (Ref("t"), (24,)), meta(24)),
        inputs=(X,), result="v",
    )  # fmt: skip
    x = torch.arange(24.0).view(4, 6)
    assert torch.equal(build(ctx)(x)[0], x.t().reshape(24))


def test_factories_get_the_device_of_the_context():
    node = Node("z", "aten.full.default", ((2, 3), 1.5), meta(2, 3), (("dtype", Dtype("float32")),))
    graph = Graph((), (node,), (Output(OutputKind.OUTPUT, "z", Ref("z")),))
    module = build(PassContext(program="p", source=graph, device=torch.device("meta")))
    assert module()[0].device.type == "meta"


def test_results_of_several_and_integers_are_values_too():
    coord = Input("coord_tp", InputKind.COORD, "tp", None)
    ctx = program(
        Node("norm", "aten.native_layer_norm.default", (Ref("x"), (6,), None, None, 1e-5),
             (meta(4, 6), meta(4, 1), meta(4, 1))),
        Node("y", "getitem", (Ref("norm"), 0), meta(4, 6)),
        Node("mine", "local.shard", (Ref("y"), 0, Ref("coord_tp"), 2), meta(2, 6)),
        inputs=(X, coord), result="mine",
    )  # fmt: skip
    module = build(ctx)
    x = torch.randn(4, 6)
    assert torch.allclose(module(x, 1)[0], torch.layer_norm(x, (6,))[2:])
    assert any(n.target is operator.getitem for n in module.graph.nodes)


def test_equal_operators_on_equal_operands_are_evaluated_once(monkeypatch):
    calls = []
    evaluate = emission._evaluate
    monkeypatch.setattr(emission, "_evaluate", lambda n, c: calls.append(n) or evaluate(n, c))
    nodes = [Node("n0", "aten.relu.default", (Ref("x"),), meta(4, 6))]
    nodes += [
        Node(f"n{i}", "aten.relu.default", (Ref(f"n{i - 1}"),), meta(4, 6)) for i in range(1, 50)
    ]
    emit(
        program(*nodes, inputs=(X,), result="n49").source,
        program(*nodes, inputs=(X,), result="n49"),
    )
    assert len(calls) == 1


def test_one_and_true_and_one_point_zero_are_different_arguments():
    ctx = program(
        Node("a", "aten.add.Tensor", (Ref("i"), 1), meta(2, dtype="int64")),
        Node("b", "aten.add.Tensor", (Ref("i"), 1.0), meta(2, dtype="float32")),
        inputs=(Input("i", InputKind.USER, "i", meta(2, dtype="int64")),), result="b",
    )  # fmt: skip
    assert build(ctx)(torch.tensor([1, 2]))[0].dtype is torch.float32


def test_an_operator_without_implementation_is_named():
    ctx = program(Node("y", "local.nothing", (Ref("x"),), meta(4, 6)), inputs=(X,), result="y")
    with pytest.raises(PassError, match=r"operator 'local\.nothing' has no torch implementation"):
        build(ctx)


def test_operands_that_do_not_fit_are_named_with_their_shapes():
    ctx = program(
        Node("y", "aten.mm.default", (Ref("x"), Ref("x")), meta(4, 4)), inputs=(X,), result="y"
    )
    with pytest.raises(PassError, match=r"a test: y = aten\.mm\.default refuses .*float32\[4, 6\]"):
        build(ctx)


def test_a_use_before_the_definition_is_refused():
    ctx = program(Node("y", "aten.relu.default", (Ref("z"),), meta(4, 6)), inputs=(X,), result="y")
    with pytest.raises(PassError, match="y reads %z, which is not defined yet"):
        build(ctx)


@pytest.mark.parametrize(
    ("kind", "args", "shape"),
    [
        ("all_reduce", ("sum", "tp"), (5, 6)),
        ("all_gather", (0, "tp", 9), (9, 6)),  # two blocks of 5, cut to 9
        ("all_gather", (-1, "dp", 17), (5, 17)),
        ("reduce_scatter", ("sum", 0, "dp"), (2, 6)),  # ceil(5 / 3)
        ("all_to_all", (1, 0, "dp", 18), (2, 18)),
    ],
)
def test_shapes_of_collectives_by_hand(kind, args, shape):
    assert result_shape(kind, (5, 6), args, {"tp": 2, "dp": 3}) == shape


def test_a_collective_with_wrong_arguments_is_refused():
    with pytest.raises(PassError, match=r"comm\.all_gather has no form with the arguments"):
        result_shape("all_gather", (5, 6), ("tp",), {"tp": 2})


def test_names_become_identifiers():
    assert fx_name("layers.0:mm") == "layers_0_mm"
    assert fx_name("0x") == "v_0x"
