"""Losses and gradients are those of the whole batch, however it is cut: never a mean of means."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own habit

import autopar
from autopar.errors import ConfigError, ConstraintError
from autopar.plan.types import ScheduleKind
from tests.cases.eager_parity import (
    PLANS,
    check,
    check_against_eager,
    eager_step,
    found_in,
    plan_for,
    problem_for,
    step_of,
    verified,
)

VOCAB = 8
VALID = (1, 3, 6, 6)
IDS = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(2))
for _row, _count in enumerate(VALID):
    LABELS[_row, _count:] = -100
FIRST_IGNORED = torch.where(torch.arange(4)[:, None] == 0, -100, LABELS)
MASK = (LABELS != -100).float()
TARGET = torch.randn(4, 6, VOCAB, generator=torch.Generator().manual_seed(3))
WEIGHTS = torch.rand(VOCAB, generator=torch.Generator().manual_seed(4)) + 0.5


class Tagger(nn.Module):
    """A small model of tokens whose loss is made by ``head``."""

    def __init__(self, head: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, VOCAB)
        self.head = head

    def forward(self, ids: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.up(self.embed(ids))))
        return self.head(self.out(hidden), **others)


def entropy(scores: torch.Tensor, labels: torch.Tensor, **options: object) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), **options)


def divergence(scores: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.kl_div(
        F.log_softmax(scores, -1), F.log_softmax(target, -1), reduction=reduction, log_target=True
    )


def masked(each: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (each * mask).sum() / mask.sum()


def focal(h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = entropy(h, labels, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).sum() / (labels != -100).sum().clamp(min=1)


LABELLED = {"labels": LABELS}
TARGETED = {"target": TARGET}
LOSSES = {
    "cross entropy": (entropy, LABELLED),
    "cross entropy with one sample ignored": (entropy, {"labels": FIRST_IGNORED}),
    "label smoothing": (lambda h, labels: entropy(h, labels, label_smoothing=0.1), LABELLED),
    "class weights": (
        lambda h, labels, weights: entropy(h, labels, weight=weights),
        {"labels": LABELS, "weights": WEIGHTS},
    ),
    "class weights and smoothing": (
        lambda h, labels, weights: entropy(h, labels, weight=weights, label_smoothing=0.1),
        {"labels": LABELS, "weights": WEIGHTS},
    ),
    "shifted labels": (lambda h, labels: entropy(h[:, :-1], labels[:, 1:]), LABELLED),
    "soft labels": (
        lambda h, target: F.cross_entropy(h.flatten(0, 1), F.softmax(target, -1).flatten(0, 1)),
        TARGETED,
    ),
    "sum divided by the count": (
        lambda h, labels: entropy(h, labels, reduction="sum") / (labels != -100).sum(),
        LABELLED,
    ),
    "mean of per-sample means": (
        lambda h, labels: (
            entropy(h, labels, reduction="none").view(4, 6).sum(1) / (labels != -100).sum(1)
        ).mean(),
        LABELLED,
    ),
    "z-loss": (
        lambda h, labels: entropy(h, labels) + 1e-2 * (h.logsumexp(-1) ** 2).mean(),
        LABELLED,
    ),
    "z-loss under a mask": (
        lambda h, labels, mask: entropy(h, labels) + 1e-2 * masked(h.logsumexp(-1) ** 2, mask),
        {"labels": LABELS, "mask": MASK},
    ),
    "KL by batch": (lambda h, target: divergence(h, target, "batchmean"), TARGETED),
    "KL under a mask": (
        lambda h, target, mask: masked(divergence(h, target, "none").sum(-1), mask),
        {"target": TARGET, "mask": MASK},
    ),
    "squared": (lambda h, target: F.mse_loss(h, target), TARGETED),
    "absolute": (lambda h, target: F.l1_loss(h, target), TARGETED),
    "Huber": (lambda h, target: F.huber_loss(h, target), TARGETED),
    "binary cross entropy": (
        lambda h, target: F.binary_cross_entropy_with_logits(h, target.sigmoid()),
        TARGETED,
    ),
    "mean under a mask": (
        lambda h, target, mask: masked((h - target).pow(2).mean(-1), mask),
        {"target": TARGET, "mask": MASK},
    ),
    "cosine distance": (
        lambda h, target: 1 - F.cosine_similarity(h, target, dim=-1).mean(),
        TARGETED,
    ),
    "triplet": (
        lambda h, target: F.triplet_margin_loss(h[..., :4], h[..., 4:], target[..., :4]),
        TARGETED,
    ),
    "focal": (focal, LABELLED),
    "several losses": (
        lambda h, labels, target: (
            entropy(h, labels) + 0.5 * F.mse_loss(h, target) + 0.1 * h.pow(2).mean()
        ),
        {"labels": LABELS, "target": TARGET},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_is_over_the_whole_batch_under_every_cut(name):
    head, others = LOSSES[name]
    model, call = Tagger(head), {"ids": IDS, **others}
    captured, problem = problem_for(model, call)
    wanted = eager_step(model, call, loss_name=captured.loss_path or "loss")
    for plan in PLANS if name == "cross entropy" else ("dp2 x mb2", "pp2", "tp2"):
        check(found_in(step_of(problem, **PLANS[plan])), wanted)


def test_a_mean_of_means_would_be_found():
    model = Tagger(entropy)
    right = eager_step(model, {"ids": IDS, "labels": LABELS}, loss_name="output")
    rows = [
        eager_step(model, {"ids": IDS[i : i + 1], "labels": LABELS[i : i + 1]}) for i in range(4)
    ]
    name = "gradient of out.weight"
    wrong = torch.stack([row[name] for row in rows]).mean(0)
    assert float((wrong - right[name]).norm() / right[name].norm()) > 0.3


@pytest.mark.parametrize("degrees", PLANS.values(), ids=PLANS.keys())
def test_all_tokens_ignored_gives_nan_as_eager_does(degrees):
    call = {"ids": IDS, "labels": torch.full_like(LABELS, -100)}
    wanted = eager_step(Tagger(entropy), call, loss_name="output")
    assert wanted["loss output"].isnan()
    check_against_eager(Tagger(entropy), call, **degrees)


MIXING = {
    "contrastive": lambda h: F.cross_entropy(h.mean(1) @ h.mean(1).T, torch.arange(4)),
    "variance over the batch": lambda h: h.mean(1).var(0).mean(),
    "count from activations": lambda h: ((h > 0) * h**2).sum() / (h > 0).sum(),
    "root of a mean": lambda h: h.pow(2).mean().sqrt(),
    "norm of the batch": lambda h: h.norm(),
    "hardest samples": lambda h: h.mean((1, 2)).topk(2).values.mean(),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_loss_that_mixes_samples_is_right_under_dp_and_tp_and_refused_in_micro_batches(name):
    model, call = Tagger(MIXING[name]), {"ids": IDS}
    check_against_eager(model, call, dp=2)
    check_against_eager(model, call, tp=2)
    _, problem = problem_for(model, call)
    text = r"\(test_loss_and_grad_scaling.py:\d+ in <lambda>\) mixes samples of different micro"
    with pytest.raises(ConstraintError, match=text) as caught:
        plan_for(problem.graph, num_microbatches=2)
    assert str(caught.value).endswith("use num_microbatches=1")


# -- losses outside the model ---------------------------------------------------------------------


class Regressor(nn.Module):
    """Outputs, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(6))
OUTSIDE = {
    "dp2": {"dp": 2},
    "pp2": {"pp": 2, "num_microbatches": 4},
    "pp2 x dp2": {"pp": 2, "dp": 2, "num_microbatches": 2},
    "tp2": {"tp": 2},
}


@pytest.mark.parametrize("degrees", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_a_sum_divided_outside_the_model_has_the_gradients_of_one_device(degrees):
    model, total = Regressor(), 7.0
    twin = copy.deepcopy(model).double()
    out = twin(X.double()).requires_grad_()
    tangent = torch.autograd.grad((out - Y.double()).pow(2).sum() / total, out, retain_graph=True)
    out.backward(tangent[0])
    wanted = {f"gradient of {n}": p.grad for n, p in twin.named_parameters()}
    captured, problem = problem_for(model, {"x": X}, tangents={"output": tangent[0]})
    assert not captured.has_loss
    plan = plan_for(problem.graph, **degrees)
    assert plan.schedule == "gpipe", "all forwards come before the loss"
    step = verified(problem, plan, gather={"output"})
    check({**found_in(step), "output": step.outputs["output"]}, {**wanted, "output": out.detach()})


def test_a_schedule_that_a_loss_outside_the_model_can_t_have_is_refused():
    _, problem = problem_for(Regressor(), {"x": X})
    with pytest.raises(ConstraintError, match="gives no loss of its own.*pass loss="):
        plan_for(problem.graph, pp=2, schedule=ScheduleKind.ONE_F_ONE_B)
    plan = plan_for(problem.graph, pp=2)
    assert any("loss= of autopar.compile() would allow 1F1B" in a for a in plan.assumptions)


def pair(model: nn.Module, inputs: object, **options: object) -> tuple[nn.Module, nn.Module]:
    """A model compiled for one device, and its eager twin."""
    twin = copy.deepcopy(model)
    return autopar.compile(model, 1, inputs, **options), twin


def same_gradients(model: nn.Module, twin: nn.Module) -> None:
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_gradients_accumulate_over_calls_without_rescaling_old_ones():
    model, twin = pair(Regressor(), {"x": X, "batch": Y}, loss=F.mse_loss, num_microbatches=4)
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(3)]
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad = torch.ones_like(parameter)
    for x in batches:
        model(x=x, batch=Y).backward()
    whole = F.mse_loss(twin(torch.cat(batches)), torch.cat([Y] * 3))
    (3 * whole).backward()
    same_gradients(model, twin)


@pytest.mark.parametrize("scale", [1 / 3, 8.0])
def test_a_loss_that_is_scaled_outside_scales_its_own_gradients_alone(scale):
    model, twin = pair(Regressor(), {"x": X, "batch": Y}, loss=F.mse_loss, num_microbatches=2)
    for factor in (1.0, scale, scale):
        (model(x=X, batch=Y) * factor).backward()
        (F.mse_loss(twin(X), Y) * factor).backward()
    same_gradients(model, twin)


def test_forward_alone_then_forward_and_backward_then_two_calls_under_one_backward():
    model, twin = pair(Regressor(), X, num_microbatches=2)
    assert torch.allclose(model(X), twin(X), atol=1e-6)
    for each in (model, twin):
        each(X).sum().backward()
    same_gradients(model, twin)
    for each in (model, twin):
        (each(X).sum() + each(2 * X).pow(2).mean()).backward()
    same_gradients(model, twin)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for optimizer in optimizers:
        optimizer.step()
    assert torch.allclose(model(X), twin(X), atol=1e-5)


class SeveralLosses(nn.Module):
    """Two scalars and an output, none of them called the loss."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.kind = nn.Linear(4, 2), kind

    def forward(self, x: torch.Tensor) -> object:
        y = self.layer(x)
        found = {"first": y.pow(2).mean(), "second": y.abs().mean(), "y": y}
        return found if self.kind is dict else tuple(found.values())


@pytest.mark.parametrize("kind", [dict, tuple])
def test_several_losses_are_summed_by_the_caller(kind):
    model, twin = pair(SeveralLosses(kind), X, num_microbatches=2)
    for each in (model, twin):
        first, second, _ = each(X).values() if kind is dict else each(X)
        (first + 2 * second).backward()
    same_gradients(model, twin)
    model, twin = pair(SeveralLosses(dict), X, loss=lambda out, _: out["first"] + 2 * out["second"])
    model(X).backward()
    out = twin(X)
    (out["first"] + 2 * out["second"]).backward()
    same_gradients(model, twin)


def test_a_second_backward_of_one_call_is_refused_with_the_remedy():
    model, _ = pair(Regressor(), {"x": X, "batch": Y}, loss=F.mse_loss)
    loss = model(x=X, batch=Y)
    loss.backward(retain_graph=True)
    with pytest.raises(ConfigError, match="call the model again for new gradients"):
        loss.backward()


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(ConfigError, match=r"scalar tensor, got shape \(8, 2\); reduce it"):
        autopar.compile(Regressor(), 1, {"x": X, "batch": Y}, loss=lambda out, y: out - y)
