"""What goes into a model and comes out of it: results without a loss, names, inputs that change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from autopar.capture.tracing import capture
from autopar.errors import CaptureError, ConfigError, InputError
from autopar.ir.verify import verify_names


class Heads(nn.Module):
    """Two heads on one input; ``form`` makes the result of both."""

    def __init__(self, form, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.form = nn.Linear(6, 6), nn.Linear(6, width), form

    def forward(self, x):
        return self.form(self.a(x), self.b(x))


FORMS = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"t": a, "t_1": b},
    "nested": lambda a, b: (a, {"mm": [b.mean()]}),
    "sums": lambda a, b: (a, b.sum(0)),
}


def batch(rows=6):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))


def parts(result):
    if isinstance(result, torch.Tensor):
        return [result]
    children = result.values() if isinstance(result, dict) else result
    return [tensor for child in children for tensor in parts(child)]


def compiled(model, *inputs):
    return autopar.compile(copy.deepcopy(model), devices=1, inputs=inputs)


def gradients(model):
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def assert_same_gradients(model, twin):
    wanted = gradients(twin)
    for name, grad in gradients(model).items():
        assert (grad is None) == (wanted[name] is None), name
        if grad is not None:
            torch.testing.assert_close(grad, wanted[name], msg=name)


@pytest.mark.parametrize("rows", [4, 6])  # 6: a wrong operand would have a fitting shape
@pytest.mark.parametrize("width", [2, 6])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_several_outputs_equal_eager(form, width, rows):
    twin, x = Heads(FORMS[form], width), batch(rows)
    model = compiled(twin, x)
    for net in (model, twin):
        first, second = parts(net(x))
        (first.square().mean() + 3 * second.square().sum()).backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_two_heads_are_the_same_on_two_devices(mesh):
    assert autopar.verify(Heads(FORMS["tuple"]), 2, (batch(),), **mesh).num_tensors


class Named(nn.Module):
    """Parameters, inputs and outputs called like operators and like one another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.a_b = nn.Module(), nn.Module()
        self.a.register_parameter("b_c", nn.Parameter(torch.randn(6, 6)))
        self.a_b.register_parameter("c", nn.Parameter(torch.randn(6, 6)))
        self.register_parameter("a_b_c_3", nn.Parameter(torch.randn(6, 6)))
        self.register_parameter("x", nn.Parameter(torch.randn(6)))

    def forward(self, x, t_1, p_x):
        h = x["a_b"] @ self.a.b_c.t() @ self.a_b.c.t() @ self.a_b_c_3.t() * self.x
        return {"t": h * p_x, "t_1": h + x["a"]["b"], "x-y": t_1 * h, "x.y": h.relu()}


def test_names_that_meet_stay_apart():
    twin = Named()
    torch.manual_seed(1)
    x = {"a_b": torch.randn(6, 6), "a": {"b": torch.randn(6, 6)}}
    others = torch.randn(6, 6), torch.randn(6, 6)
    graph = capture(twin, (x, *others)).graph
    verify_names(graph)
    assert len({(i.kind, i.target) for i in graph.inputs}) == len(graph.inputs) == 12
    model = compiled(twin, x, *others)
    for net in (model, twin):
        sum(i * v.square().mean() for i, v in enumerate(net(x, *others).values(), 1)).backward()
    assert_same_gradients(model, twin)


def test_two_tensors_of_one_path_are_refused():
    class Nested(nn.Linear):
        def forward(self, x):
            return super().forward(x["a.b"] + x["a"]["b"]).mean()

    with pytest.raises(InputError, match=r"two tensors are called 'x\.a\.b'"):
        compiled(Nested(6, 6), {"a.b": batch(), "a": {"b": batch()}})


def weights(model):
    return model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()


@pytest.mark.parametrize("form", ["tuple", "dict"])
@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_output_gives_no_gradient_and_no_weight_decay(form, used):
    twin, x = Heads(FORMS[form]), batch()
    model = compiled(twin, x)
    for net in (model, twin):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            parts(net(x))[used].square().mean().backward()
            optimizer.step()
    assert sum(grad is None for grad in gradients(model).values()) == 2
    assert_same_gradients(model, twin)
    for name, value in weights(model).items():
        torch.testing.assert_close(value, weights(twin)[name], msg=name)


class Trunk(nn.Module):
    """A shared layer, two heads, a tied weight, and an output that needs no gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.qkv, self.b = nn.Linear(6, 6), nn.Linear(6, 18), nn.Linear(6, 6)
        self.tied, self.unused = nn.Linear(6, 6, bias=False), nn.Linear(2, 2)
        self.tied.weight = self.b.weight

    def forward(self, x):
        h = self.trunk(x).tanh()
        q, k, v = self.qkv(h).split(6, -1)
        return {"q": q * k, "v": v, "b": self.b(x), "tied": self.tied(h), "x": x * 2}


@pytest.mark.parametrize("used", [("q",), ("v",), ("b",), ("tied",), ("b", "v"), ("q", "tied")])
def test_a_gradient_reaches_what_eager_says_it_reaches(used):
    twin, x = Trunk(), batch()
    model = compiled(twin, x)
    for net in (model, twin):
        result = net(x)
        assert not result["x"].requires_grad
        sum(result[key].square().mean() for key in used).backward()
    assert_same_gradients(model, twin)


def test_a_gradient_that_no_output_reaches_any_more_is_left_as_it_was():
    twin, x = Heads(FORMS["tuple"]), batch()
    model = compiled(twin, x)
    for net in (model, twin):
        sum(out.mean() for out in net(x)).backward()
        net(x)[0].square().mean().backward()
    assert_same_gradients(model, twin)


class Complex(nn.Module):
    """One complex output, and a real one of another layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.re, self.im, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return {"z": torch.complex(self.re(x), self.im(x)), "c": self.c(x)}


def test_a_complex_output_is_differentiated_like_eager():
    twin, x = Complex(), batch()
    model = compiled(twin, x)
    for net in (model, twin):
        (net(x)["z"] * (1 + 2j)).abs().sum().backward()
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_a_complex_output_is_the_same_on_two_devices(mesh):
    assert autopar.verify(Complex(), 2, (batch(),), **mesh).num_tensors


# -- what comes in --------------------------------------------------------------------------------


@pytest.mark.parametrize("made_by", ["", "AddmmBackward0", "SplitBackward0"])
def test_an_input_that_requires_a_gradient_is_refused_by_name(made_by):
    model = compiled(Heads(FORMS["sums"]), batch())
    given = {
        "": lambda: batch().requires_grad_(),
        "AddmmBackward0": lambda: nn.Linear(3, 6)(torch.ones(6, 3)),
        "SplitBackward0": lambda: nn.Linear(3, 12)(torch.ones(6, 3)).split(6, -1)[0],
    }[made_by]()
    by = f", made by {made_by}" if made_by else ""
    with pytest.raises(InputError, match=f"input 'x' requires a gradient{by}, and a compiled"):
        model(given)
    with torch.no_grad():  # nothing is lost
        outside = model(given)
    model(given.detach())[0].sum().backward()
    torch.testing.assert_close(outside, Heads(FORMS["sums"])(given), check_stride=False)


def test_an_inference_plan_takes_an_input_that_requires_a_gradient():
    twin = Heads(FORMS["tuple"])
    model = autopar.compile(copy.deepcopy(twin), devices=1, inputs=(batch(),), mode="inference")
    given = batch().requires_grad_()
    torch.testing.assert_close(model(given)[0].detach(), twin(given)[0].detach())
    with pytest.raises(ConfigError, match="compiled with mode='inference'"):
        model(given)[0].sum().backward()


def _doubled(x):
    return x.mul_(2)


def _masked(x):
    x[x < 0] = 0
    return x


def _through_a_view(x):
    x.detach().view(-1)[3:].zero_()
    return x


def _reshaped(x):
    return x.unsqueeze_(0)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("change", [_doubled, _masked, _through_a_view, _reshaped])
def test_a_forward_that_changes_its_input_in_place_is_refused_with_its_line(change, train):
    class Changing(nn.Linear):
        def forward(self, first, batch):
            return super().forward(change(batch["x"]) + first).mean()

    inputs = batch(), {"x": batch()}
    mode = "train" if train else "inference"
    text = rf"changes its input 'batch\.x' in place at test_inputs.*py:\d+ in {change.__name__};"
    with pytest.raises(CaptureError, match=text):
        autopar.compile(Changing(6, 6), devices=1, inputs=inputs, mode=mode)
    torch.testing.assert_close(inputs[1]["x"], batch(), rtol=0, atol=0)


def test_a_forward_that_changes_a_copy_of_its_input_in_place_is_taken():
    class Copying(nn.Linear):
        def forward(self, x):
            return super().forward(x.clone().mul_(2)).square().mean()

    twin, x = Copying(6, 6), batch()
    model = compiled(twin, x)
    for net in (model, twin):
        for _ in range(2):
            net(x).backward()
    assert_same_gradients(model, twin)
    torch.testing.assert_close(x, batch(), rtol=0, atol=0)
