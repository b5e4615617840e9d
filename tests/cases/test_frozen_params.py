"""Parameters without gradients: frozen ones, adapters beside them, unused ones."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from tests.dist.state_cases import Adapted
from tests.dist.state_models import batch_of, build, optimizer_of, train


def adapted(*, frozen=True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Adapted(64) for _ in range(4)])
    return model if frozen else model.requires_grad_(True)


def planned(model):
    return autopar.compile(
        model, "4:cpu", torch.ones(8, 64), loss=lambda out, _: out.square().mean(), pp=2, dp=2
    )


def test_frozen_weights_cost_no_gradient_and_no_optimizer_bytes():
    model, whole = planned(adapted()), planned(adapted(frozen=False))
    adapters = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    everything = sum(4 * p.numel() for p in model.parameters())
    for plan, trained in ((model.plan, adapters), (whole.plan, everything)):
        grads = [s.memory.grads_bytes for s in plan.stages]
        assert 0 < sum(grads) <= trained
        assert 0 < sum(s.memory.optimizer_bytes for s in plan.stages) <= 2 * trained
    assert adapters * 10 < everything
    assert sum(s.memory.grads_bytes for s in whole.plan.stages) > adapters


def test_frozen_and_unused_parameters_have_no_gradient_and_no_state_as_in_torch():
    plain, batch = build()
    model, _ = build()
    model = autopar.compile(model, 1, batch)
    optimizers = [optimizer_of("adamw", each)[0] for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        each(**batch_of(0))["loss"].backward()
        optimizer.step()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
    assert model.spare.grad is None
    assert model.position.grad is None
    assert "spare" not in optimizers[0].state_dict()["state"]
    assert torch.equal(model.spare, torch.ones(3))


def test_unfreezing_after_compile_is_refused_by_name_and_freezing_stops_training():
    model, batch = build()
    model = autopar.compile(model, 1, batch)
    model.position.requires_grad_(True)
    with pytest.raises(ConfigError, match="'position' was frozen when the model was compiled"):
        model(**batch)
    model.position.requires_grad_(False)
    model.first.weight.requires_grad_(False)
    before = model.first.weight.detach().clone()
    optimizer, scheduler = optimizer_of("sgd", model)
    train(model, optimizer, scheduler, 2)
    assert torch.equal(model.first.weight, before)
    assert not torch.equal(model.second.weight, build()[0].second.weight)
