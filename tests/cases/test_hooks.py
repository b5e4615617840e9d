"""Hooks of the model itself run once per call, as in eager torch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import autopar
from tests.cases.eager_parity import check

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return self.a(x).pow(2).mean() * factor


# torch's own: a backward hook of a model whose inputs need no gradient
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")

HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda _m, _i, out: out * 2),
    "forward with kwargs": lambda m: m.register_forward_hook(
        lambda _m, _i, _k, out: out * 2, with_kwargs=True
    ),
    "forward always called": lambda m: m.register_forward_hook(
        lambda _m, _i, out: out * 2, always_call=True
    ),
    "before forward": lambda m: m.register_forward_pre_hook(lambda _m, args: (args[0] * 2,)),
    "before forward with kwargs": lambda m: m.register_forward_pre_hook(
        lambda _m, args, named: (args, {**named, "factor": 3.0}), with_kwargs=True
    ),
    "before backward": lambda m: m.register_full_backward_pre_hook(lambda _m, out: (out[0] * 2,)),
}


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(X)
    loss.backward()
    return {
        "loss": loss.detach(),
        **{f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()},
    }


def pair(hook) -> tuple[nn.Module, nn.Module]:
    """A model with the hook, and an equal one."""
    model = Model()
    hook(model)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("inputs", [(X,), None], ids=["planned at once", "planned at the call"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_registered_before_compile_runs_once(kind, inputs):
    model, eager = pair(HOOKS[kind])
    compiled = autopar.compile(model, devices=1, inputs=inputs)
    for _ in range(2):
        check(step(compiled), step(eager))


@pytest.mark.parametrize("kind", ["forward", "before forward"])
def test_a_hook_registered_before_compile_runs_once_with_the_generator_of_torch(kind):
    model, eager = pair(HOOKS[kind])
    check(step(autopar.compile(model, devices=1, inputs=(X,), rng="torch")), step(eager))


@pytest.mark.parametrize("kind", ["forward", "before forward", "before backward"])
def test_a_hook_registered_after_compile_runs_once_around_the_call(kind):
    model = Model()
    eager = copy.deepcopy(model)
    compiled = autopar.compile(model, devices=1, inputs=(X,))
    plain = step(compiled)
    handles = HOOKS[kind](compiled), HOOKS[kind](eager)
    check(step(compiled), step(eager))
    compiled.eval()  # another program is captured, without the hook in it
    check(step(compiled), step(eager))
    for handle in handles:
        handle.remove()
    check(step(compiled.train()), plain)


def test_hooks_before_and_after_compile_both_run_once():
    model, eager = pair(HOOKS["forward"])
    compiled = autopar.compile(model, devices=1, inputs=(X,))
    for one in (compiled, eager):
        HOOKS["before forward"](one)
        one.eval()
    check(step(compiled), step(eager))


def test_a_hook_of_the_result_sees_the_result_before_the_loss_function():
    model, eager = pair(HOOKS["forward"])
    compiled = autopar.compile(
        model, devices=1, inputs=(X,), loss=lambda out, _batch: (out - 1) ** 2
    )
    assert compiled(X).item() == pytest.approx(((eager(X) - 1) ** 2).item())
