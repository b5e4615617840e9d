"""``autopar.verify`` in a plain process."""

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.errors import EquivalenceError, PlanError
from autopar.plan.types import MeshShape
from tests.plans import hand_made_plan
from tests.zoo import build


def test_a_plan_of_eight_ranks_is_verified_here():
    model, batch = build("gpt2")
    plan = hand_made_plan(
        capture(model, (), batch), MeshShape(pp=2, dp=2, tp=2), num_microbatches=2
    )
    report = autopar.verify(model, plan, batch)
    assert report.num_ranks == 8
    assert report.plan_error <= report.plan_allowed
    assert report.eager_worst
    assert "equal one device on 8 simulated ranks" in str(report)


def test_dropout_leaves_out_the_comparison_with_the_model():
    model, batch = build("gpt2", dropout=0.2)
    plan = hand_made_plan(capture(model, (), batch), MeshShape(dp=2))
    report = autopar.verify(model, plan, batch)
    assert report.eager_worst == ""
    assert "dropout" in report.note


def test_a_model_on_the_meta_device_is_drawn():
    model, batch = build("llama", device="meta")
    plan = hand_made_plan(capture(model, (), batch), MeshShape(tp=2))
    assert autopar.verify(model, plan, batch).num_ranks == 2
    assert all(p.is_meta for p in model.parameters())


def test_a_plan_for_another_batch_is_refused():
    model, batch = build("gpt2")
    plan = hand_made_plan(capture(model, (), batch), MeshShape(dp=2))
    half = {key: value[:4] for key, value in batch.items()}
    with pytest.raises(PlanError):
        autopar.verify(model, plan, half)


def test_wrong_numbers_name_the_worst_tensor(monkeypatch):
    from autopar.api import verifying

    model, batch = build("gpt2")
    captured = capture(model, (), batch)
    plan = hand_made_plan(captured, MeshShape(dp=2))
    eager = verifying._run_eagerly

    def wrong(*args):
        found = eager(*args)
        return {**found, "loss loss": found["loss loss"] + 1}

    monkeypatch.setattr(verifying, "_run_eagerly", wrong)
    with pytest.raises(EquivalenceError, match="the captured program against .* loss loss differs"):
        autopar.verify(model, replace(plan), batch)
    assert torch.is_grad_enabled()
