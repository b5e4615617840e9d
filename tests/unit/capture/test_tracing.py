"""What capture accepts, what it finds and what it leaves alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import transformers
from torch import nn

from autopar.capture.reference import bind_inputs, gradients, mutations, run_graph
from autopar.capture.structure import rebuild
from autopar.capture.tracing import capture
from autopar.errors import ConfigError
from autopar.ir.graph import InputKind, OutputKind, Phase, TensorMeta
from tests.zoo import build, tiny_models


def run(captured, model, args=(), kwargs=None, **options):
    bound = bind_inputs(captured, model, args, kwargs, **options)
    return run_graph(captured.graph, bound)


class Affine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("name", tiny_models())
def test_meta_model_gives_the_same_program(case, name):
    model, batch = build(name, batch=4, device="meta")
    on_meta = capture(model, (), {k: v.to("meta") for k, v in batch.items()})
    assert on_meta.hash == case(name).captured.hash


def test_capture_leaves_the_module_alone():
    model, batch = build("resnet", batch=4)
    before = {n: (id(t), t.clone()) for n, t in model.state_dict(keep_vars=True).items()}
    state = torch.get_rng_state()
    capture(model, (), batch)
    after = model.state_dict(keep_vars=True)
    assert {n: id(t) for n, t in after.items()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(t, before[n][1]) for n, t in after.items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_capture_restores_the_module_after_an_error():
    class Broken(Affine):
        def forward(self, x):
            raise ValueError(self.linear(x).shape)

    model = Broken()
    weight = model.linear.weight
    with pytest.raises(RuntimeError):
        capture(model, (torch.ones(2, 4),))
    assert model.linear.weight is weight


def test_tied_weight_is_one_input_with_several_gradients(case):
    graph = case("gpt2").captured.graph
    (tied,) = (i for i in graph.inputs if i.aliases)
    assert (tied.target, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))
    grads = [o for o in graph.outputs_of(OutputKind.GRAD) if o.target == tied.target]
    assert len(grads) == 2


def test_cache_is_dropped_by_name(case):
    (dropped,) = case("gpt2").captured.dropped_outputs
    assert dropped.endswith("(DynamicCache)")


def test_model_output_can_be_rebuilt(case):
    _, _, captured = case("gpt2")
    output = rebuild(captured.output_spec, lambda path: path)
    assert isinstance(output, transformers.modeling_outputs.CausalLMOutputWithCrossAttentions)
    assert (output.loss, output.logits) == ("loss", "logits")
    assert output.hidden_states is None
    assert output.past_key_values is None


def test_nested_outputs_can_be_rebuilt():
    class Pair(NamedTuple):
        first: torch.Tensor
        second: object

    class Nested(Affine):
        def forward(self, x):
            y = self.linear(x)
            return {"loss": y.sum(), "rest": [Pair(y, 3), None]}

    captured = capture(Nested(), (torch.ones(2, 4),))
    assert captured.loss_path == "loss"
    output = rebuild(captured.output_spec, str.upper)
    assert output == {"loss": "LOSS", "rest": [Pair("REST.0.FIRST", 3), None]}
    assert type(output["rest"][0]) is Pair


def test_nested_inputs_are_named_by_path():
    class Nested(Affine):
        def forward(self, batch, scale, *, mask=None):
            y = self.linear(batch["x"]) * batch["more"][0]["w"] * scale
            return (y if mask is None else y.masked_fill(mask, 0.0)).sum()

    batch = {"x": torch.randn(2, 4), "more": ({"w": torch.randn(2, 3)},)}
    model = Nested()
    kwargs = {"mask": torch.tensor([[True], [False]])}
    captured = capture(model, (batch, 2), kwargs)
    assert captured.input_paths == ("batch.x", "batch.more.0.w", "mask")
    assert captured.static_inputs == {"scale": 2}
    assert captured.input_metas["mask"] == TensorMeta((2, 1), "bool")
    results = run(captured, model, (batch, 2), kwargs)
    torch.testing.assert_close(results["loss:output"], model(batch, 2, **kwargs))


def test_no_gradient_flows_into_other_outputs(case):
    graph = case("bert").captured.graph
    assert [i.target for i in graph.of_kind(InputKind.TANGENT)] == ["loss"]
    assert [o.target for o in graph.outputs_of(OutputKind.OUTPUT)] == ["logits"]


def test_loss_function_gets_output_and_batch():
    model, x, y = Affine(), torch.randn(5, 4), torch.randint(0, 3, (5,))
    loss = lambda out, batch: nn.functional.cross_entropy(out, batch["y"])  # noqa: E731
    captured = capture(model, (x,), loss=loss, batch={"y": y})
    assert captured.has_loss
    assert captured.loss_path is None
    assert captured.input_paths == ("x", "loss_batch.y")
    results = run(captured, model, (x,), batch={"y": y})
    torch.testing.assert_close(results["loss:loss"], loss(model(x), {"y": y}))
    torch.testing.assert_close(results["output:output"], model(x))


@pytest.mark.parametrize(
    ("args", "kwargs", "seen"),
    [((1,), {}, "1"), ((1, 2), {}, "(1, 2)"), ((), {"x": 1}, "{'x': 1}"),
     ((1,), {"y": 2}, "((1,), {'y': 2})")],
)  # fmt: skip
def test_batch_of_the_loss_is_the_call(args, kwargs, seen):
    class Model(Affine):
        def forward(self, x, y=0):
            return self.linear(torch.ones(2, 4))

    batches = []

    def loss(out, batch):
        batches.append(batch)
        return out.sum()

    capture(Model(), args, kwargs, loss=loss)
    assert str(batches[-1]) == seen


def test_without_a_loss_outputs_get_tangents():
    class Two(Affine):
        def forward(self, x):
            y = self.linear(x)
            return {"y": y, "z": y.tanh(), "x": x, "label": y.argmax(-1)}

    model, x = Two(), torch.randn(2, 4)
    captured = capture(model, (x,))
    assert not captured.has_loss
    assert [i.target for i in captured.graph.of_kind(InputKind.TANGENT)] == ["y", "z"]
    tangents = {"y": torch.randn(2, 3), "z": torch.randn(2, 3)}
    results = run(captured, model, (x,), tangents=tangents)
    out = model(x)
    torch.autograd.backward([out["y"], out["z"]], [tangents["y"], tangents["z"]])
    torch.testing.assert_close(gradients(results)["linear.weight"], model.linear.weight.grad)
    assert torch.equal(results["output:label"], out["label"])


def test_inference_has_no_backward():
    model, batch = build("llama", batch=2)
    captured = capture(model.eval(), (), batch, train=False)
    graph = captured.graph
    assert not captured.training
    assert {n.phase for n in graph.nodes} == {Phase.FORWARD}
    assert not list(graph.of_kind(InputKind.TANGENT))
    with torch.no_grad():
        expected = model(**batch)
    results = run(captured, model, (), batch)
    torch.testing.assert_close(results["output:logits"], expected.logits)
    torch.testing.assert_close(results["loss:loss"], expected.loss)


def test_frozen_and_unused_parameters_have_no_gradient():
    class Partly(Affine):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.frozen(self.linear(x)).pow(2).mean()

    model, x = Partly(), torch.randn(2, 4)
    captured = capture(model, (x,))
    results = run(captured, model, (x,))
    assert gradients(results).keys() == {"linear.weight", "linear.bias"}
    assert not captured.graph.input_map()["p_frozen_weight"].requires_grad
    model(x).backward()
    torch.testing.assert_close(gradients(results)["linear.weight"], model.linear.weight.grad)


def test_no_grad_in_the_model_stops_the_gradient():
    class Stopped(Affine):
        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                weight = y.softmax(-1)
            return (y * weight).sum() + self.linear(x).detach().sum()

    model, x = Stopped(), torch.randn(2, 4)
    results = run(capture(model, (x,)), model, (x,))
    model(x).backward()
    torch.testing.assert_close(gradients(results)["linear.weight"], model.linear.weight.grad)


def test_buffer_updates_are_outputs():
    class Counting(Affine):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls += 1
            return self.linear(x).sum()

    model, x = Counting(), torch.randn(2, 4)
    results = run(capture(model, (x,)), model, (x,))
    assert mutations(results)["calls"] == 1
    assert model.calls == 0


def test_scope_twin_and_source_are_known(case):
    nodes = case("gpt2").captured.graph.node_map()
    products = [n for n in nodes.values() if n.op == "aten.mm.default"]
    assert products[0].scope == "transformer.h.0.attn.c_attn"
    assert products[0].source.endswith("in forward")
    backward = [n for n in products if n.phase is Phase.BACKWARD]
    assert backward
    for node in backward:
        twin = nodes[node.twin]
        assert (twin.op, twin.phase, twin.scope) == (node.op, Phase.FORWARD, node.scope)
    layers = [n for n in nodes.values() if n.phase is Phase.BACKWARD and n.op.startswith("aten.n")]
    assert {n.scope for n in layers} == {
        "transformer.ln_f", *(f"transformer.h.{i}.ln_{j}" for i in (0, 1) for j in (1, 2))
    }  # fmt: skip


def test_capture_is_deterministic(case):
    model, batch = build("t5", batch=4)
    assert capture(model, (), batch).hash == case("t5").captured.hash


def test_stacked_layers_of_torch_use_the_neutral_attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    kwargs = {"src_key_padding_mask": padding}
    captured = capture(model, (x,), kwargs, loss=lambda out, _: out.pow(2).mean())
    assert sum(n.op == "autopar.attention" for n in captured.graph.nodes) == 2
    results = run(captured, model, (x,), kwargs)
    torch.testing.assert_close(results["loss:loss"], model(x, **kwargs).pow(2).mean())


def test_no_trainable_parameter_is_refused():
    with pytest.raises(ConfigError, match="ReLU has no trainable parameter"):
        capture(nn.ReLU(), (torch.ones(2),))


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"inputs do not fit Affine.forward\(x\)"):
        capture(Affine(), (torch.ones(2, 4),), {"y": 1})


def test_loss_must_be_a_scalar():
    with pytest.raises(ConfigError, match=r"must return a scalar tensor, got shape \(2, 3\)"):
        capture(Affine(), (torch.ones(2, 4),), loss=lambda out, _: out)
    with pytest.raises(ConfigError, match="depends on no trainable parameter"):
        capture(Affine(), (torch.ones(2, 4),), loss=lambda out, _: out.detach().sum())
