"""The verifier names the node that differs, and the pass that made it differ."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import PassError
from autopar.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Ref, TensorMeta
from passes.base import PassContext, PassResult
from passes.emit import emit
from passes.pipeline import PASSES, build, without_outputs
from passes.verify import verify


def context(shape: tuple[int, ...] = (4, 6), dtype: str = "float32") -> PassContext:
    graph = Graph(
        (Input("x", InputKind.USER, "x", TensorMeta((4, 6), "float32")),),
        (
            Node("dead", "aten.neg.default", (Ref("x"),), TensorMeta((4, 6), "float32")),
            Node(
                "gathered", "comm.all_gather", (Ref("x"), 0, "tp", 8), TensorMeta((8, 6), "float32")
            ),
            Node("y", "aten.relu.default", (Ref("x"),), TensorMeta(shape, dtype)),
        ),
        (Output(OutputKind.OUTPUT, "y", Ref("y")), Output(OutputKind.SAVED, "y", Ref("y"))),
    )
    return PassContext(program="stage 1 forward", source=graph, axis_sizes={"tp": 2})


def test_a_wrong_shape_is_named_with_both_shapes():
    expected = (
        r"stage 1 forward: y = aten\.relu\.default yields float32\[4, 6\], "
        r"decided was float32\[4, 5\]"
    )
    with pytest.raises(PassError, match=expected):
        build(context(shape=(4, 5)))


def test_a_wrong_dtype_is_named():
    with pytest.raises(PassError, match=r"decided was float64\[4, 6\]"):
        build(context(dtype="float64"))


def test_dead_operators_go_and_dead_collectives_too():
    module = build(context())
    names = [n.name for n in module.graph.nodes]
    assert names == ["x", "y", "output"]


def test_live_operators_stay_and_the_second_run_finds_nothing():
    ctx = context()
    module = build(ctx)
    result = PASSES[0](module, ctx)
    assert not result.modified
    assert torch.equal(result.graph_module(torch.tensor([-1.0]))[0], torch.tensor([0.0]))


def test_a_pass_that_breaks_a_module_is_named():
    def drop_an_output(module, ctx):
        output = module.graph.output_node()
        output.args = (output.args[0][:1],)
        return PassResult(module, True)

    with pytest.raises(
        PassError, match=r"pass 'drop_an_output' left an invalid module: .* yields 1 values"
    ):
        build(context(), [drop_an_output])


def test_a_pass_that_changes_a_function_is_caught():
    def transpose(module, ctx):
        node = next(n for n in module.graph.nodes if n.name == "y")
        node.target, node.args = torch.ops.aten.permute.default, (node.args[0], [1, 0])
        from passes.emit import propagate

        propagate(module, ctx)
        return PassResult(module, True)

    with pytest.raises(PassError, match=r"pass 'transpose' .*yields float32\[6, 4\]"):
        build(context(), [transpose])


def test_inputs_must_stay_in_order():
    ctx = context()
    module = emit(ctx.source, ctx)
    module.graph.inserting_before(next(iter(module.graph.nodes)))
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("extra").meta.update(autopar_name="extra", val=0)
    with pytest.raises(PassError, match=r"the inputs are \['extra', 'x'\], decided were \['x'\]"):
        verify(module, ctx)


def test_outputs_of_a_kind_can_be_left_out():
    graph = without_outputs(context().source, frozenset({OutputKind.SAVED}))
    assert [o.kind for o in graph.outputs] == [OutputKind.OUTPUT]
