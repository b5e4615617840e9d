"""Weights under several names: one tensor, one state, all names kept."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.plan.types import MeshShape
from autopar.report.text import render_plan
from tests.dist.state_models import VOCAB, batch_of, build
from tests.plans import hand_made_plan


def test_all_names_of_parameters_and_buffers_stay_and_are_one_tensor():
    model, batch = build()
    model.register_buffer("rope", torch.ones(2))
    model.first.register_buffer("freqs", model.rope)
    names = list(model.state_dict())
    model = autopar.compile(model, 1, batch)
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embed.weight
    assert model.first.freqs is model.rope
    with torch.no_grad():
        model.rope.add_(1)
        model.head.weight.zero_()
    assert float(model.first.freqs[0]) == 2.0
    assert not model.state_dict()["embed.weight"].any()


def test_a_save_with_all_names_and_one_with_unique_names_load_strictly_both_ways():
    model, batch = build()
    plain, _ = build(seed=3)
    model = autopar.compile(model, 1, batch)
    plain.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(plain.head.weight, model.head.weight)
    other, _ = build(seed=4)
    model.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(model.embed.weight, other.embed.weight)
    unique = {n: p.detach() + 1 for n, p in other.named_parameters()} | dict(other.named_buffers())
    assert "head.weight" not in unique
    result = model.load_state_dict(unique, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(model.head.weight, other.head.weight + 1)


def test_of_two_different_values_for_one_weight_the_last_name_wins_as_in_torch():
    plain, batch = build()
    model, _ = build()
    model = autopar.compile(model, 1, batch)
    state = {n: v.clone() for n, v in plain.state_dict().items()}
    state["head.weight"] = state["embed.weight"] + 1
    for each in (plain, model):
        each.load_state_dict(state)
    assert torch.equal(plain.embed.weight, model.embed.weight)
    assert torch.equal(model.embed.weight, state["head.weight"])


@pytest.mark.parametrize("mesh", [MeshShape(pp=2), MeshShape(tp=2), MeshShape(pp=2, dp=2)])
def test_the_tied_weight_counts_once_in_parameters_and_bytes(mesh):
    model, batch = build()
    captured = capture(model, (), batch)
    plan = hand_made_plan(captured, mesh, num_devices=4)
    assert len(list(model.parameters())) == len(set(map(id, model.parameters())))
    tied = [i for i in captured.graph.inputs if i.target == "embed.weight"]
    assert len(tied) == 1
    assert not [i for i in captured.graph.inputs if i.target == "head.weight"]
    assert render_plan(plan, graph=captured.graph)
    assert autopar.verify(model, plan, batch)


def test_a_tied_weight_gets_the_gradient_of_both_uses():
    plain, batch = build()
    model, _ = build()
    model = autopar.compile(model, 1, batch)
    for each in (plain, model):
        each(**batch_of(1))["loss"].backward()
    assert torch.allclose(model.embed.weight.grad, plain.embed.weight.grad, rtol=1e-4, atol=1e-7)
    assert model.embed.weight.grad.shape[0] == VOCAB
