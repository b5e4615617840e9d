"""``autopar.verify`` in a plain process."""

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.errors import ConfigError, EquivalenceError, PlanError
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


def test_a_compiled_model_is_not_verified():
    model = autopar.compile(torch.nn.Linear(4, 2), 1, torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="verify: this Linear is compiled, .* plan=model.plan"):
        autopar.verify(model, 2, torch.zeros(3, 4), dp=2)
    with pytest.raises(ConfigError, match="verify: the model is 3 of type int"):
        autopar.verify(3, 2, torch.zeros(3, 4))


class Casting(torch.nn.Module):
    """Two dtypes; between them a cast to one of them by name."""

    def __init__(self, *, by_weight: bool):
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4).bfloat16()
        self.by_weight = by_weight

    def forward(self, x):
        low = self.b.weight.dtype if self.by_weight else torch.bfloat16
        return self.b(torch.relu(self.a(x)).to(low)).float().square().mean()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_precision_of_a_model_of_two_dtypes_is_verified_or_refused_by_name(precision):
    x = torch.randn(4, 6)
    report = autopar.verify(Casting(by_weight=True), 2, x, dp=2, precision=precision)
    assert report.eager_error <= report.eager_allowed
    with pytest.raises(ConfigError, match=r"Casting does not run .* casts to a dtype by itself"):
        autopar.verify(Casting(by_weight=False), 2, x, dp=2, precision=precision)
