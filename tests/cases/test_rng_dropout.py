"""Random numbers are a function of the global tensor: no plan changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own habit

import autopar
from autopar.capture.tracing import capture
from autopar.errors import CaptureError, ConfigError
from autopar.plan.types import MeshShape
from tests.cases.eager_parity import (
    check,
    found_in,
    has_randomness,
    problem_for,
    reference_of,
    step_of,
)
from tests.equivalence.harness import fuzz_decisions, simulate
from tests.plans import hand_made_plan
from tests.zoo import build

X = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(1))


class Noisy(nn.Module):
    """Three layers with the same random operation after each."""

    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((8, 16), (16, 16), (16, 8)))
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.noise(torch.tanh(layer(x)))
        return x.pow(2).mean()


def drop_path(h: torch.Tensor) -> torch.Tensor:
    kept = h.new_empty((h.shape[0], 1, 1)).bernoulli_(0.7)
    return h * kept.div_(0.7)


def heads(h: torch.Tensor) -> torch.Tensor:
    return h.unflatten(-1, (2, -1)).transpose(1, 2)


def fused_attention(h: torch.Tensor) -> torch.Tensor:
    q = heads(h)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).transpose(1, 2).flatten(2)


def plain_attention(h: torch.Tensor) -> torch.Tensor:
    q = heads(h)
    p = F.dropout((q @ q.transpose(-1, -2)).softmax(-1), 0.3)
    return (p @ q).transpose(1, 2).flatten(2)


NOISES = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout in place": lambda h: F.dropout(h.clone(), 0.3, inplace=True),
    "feature dropout": lambda h: F.dropout1d(h, 0.3),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "drop path": drop_path,
    "fused attention": fused_attention,
    "plain attention": plain_attention,
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn_like": lambda h: h + 0.1 * torch.randn_like(h),
    "rand by the input's size": lambda h: h * torch.rand(h.shape[0], 1, h.shape[2]),
    "normal": lambda h: torch.normal(h, 0.1) + torch.normal(0.0, 0.1, h.shape),
    "randint": lambda h: h * torch.randint(0, 3, h.shape) + torch.randint_like(h, 3),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid().detach()),
    "exponential": lambda h: h * torch.empty_like(h).exponential_(2.0),
    "gumbel softmax": lambda h: F.gumbel_softmax(h, tau=0.5),
    "multinomial": lambda h: h * torch.multinomial(h[:, 0].softmax(-1), 2).sum(1)[:, None, None],
    "distributions": lambda h: (
        h * torch.distributions.Normal(h.detach(), 1.0).rsample()
        + torch.distributions.Categorical(logits=h.detach()).sample()[..., None]
    ),
}


@pytest.mark.parametrize("name", NOISES)
def test_random_numbers_do_not_depend_on_the_plan(name):
    _, problem = problem_for(Noisy(NOISES[name]), {"x": X})
    assert has_randomness(problem)
    wanted = reference_of(problem)
    for degrees in (
        {"dp": 2, "tp": 2},
        {"pp": 2, "num_microbatches": 4, "recompute": 0.5},
        {"dp": 2, "num_microbatches": 2, "tp": 2},
    ):
        check(found_in(step_of(problem, **degrees)), wanted)
    _, other = problem_for(Noisy(NOISES[name]), {"x": X}, rng_key=8)
    assert not torch.equal(reference_of(other)["loss output"], wanted["loss output"])


@pytest.mark.parametrize(
    "noise",
    [lambda h: F.dropout(h, 0.3, training=False), lambda h: F.dropout(h, 0.0)],
    ids=["not in training", "with probability 0"],
)
def test_a_dropout_that_drops_nothing_draws_nothing(noise):
    assert not has_randomness(problem_for(Noisy(noise), {"x": X})[1])


class Places(nn.Module):
    """Dropout on ones where the batch, the features, or nothing is split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(64, 64)
        self.replicated = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        batch = F.dropout(torch.ones_like(x), 0.5)
        features = F.dropout(torch.ones_like(self.up(x)), 0.5)
        whole = F.dropout(torch.ones_like(self.replicated), 0.5)
        loss = (self.up(x) * features * batch).mean() + (whole * self.replicated).mean()
        return {"loss": loss, "batch": batch, "features": features, "whole": whole}


OUTPUTS = ("batch", "features", "whole")


def masks(key: int, mesh: MeshShape) -> dict[str, torch.Tensor]:
    """The masks of a step; replicas that differ by a bit raise."""
    x = torch.ones(64, 64)
    _, problem = problem_for(Places(), {"x": x}, rng_key=key)
    decisions = fuzz_decisions(problem, microbatches=1, dp=mesh.dp, tp=mesh.tp, stages=1, seed=3)
    decisions = replace(decisions, gather_outputs=frozenset(OUTPUTS))
    return dict(simulate(problem, decisions, mesh)[1].outputs)


def test_shards_are_parts_of_one_mask_and_replicas_agree_bit_for_bit():
    one, four = masks(7, MeshShape()), masks(7, MeshShape(dp=2, tp=2))
    for name in OUTPUTS:
        assert torch.equal(one[name], four[name]), name
        quarters = [half for row in four[name].chunk(2) for half in row.chunk(2, 1)]
        for i, left in enumerate(quarters):
            assert not any(torch.equal(left, right) for right in quarters[:i]), name
        kept = float((four[name] != 0).float().mean())
        assert abs(kept - 0.5) < 3 * 0.5 / 64, name  # three standard deviations of 64 x 64 draws
    for first, second in (("batch", "features"), ("features", "whole")):
        assert not torch.equal(one[first], one[second]), "each operator draws its own"


def test_another_step_draws_another_mask_and_the_same_seed_the_same():
    first, again, later = (masks(key, MeshShape(dp=2)) for key in (7, 7, 8))
    for name in OUTPUTS:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], later[name])


def losses(seed: int, torch_seed: int) -> list[float]:
    model, batch = build("gpt2", dropout=0.3)
    plan = hand_made_plan(capture(model, (), batch), MeshShape())
    model = autopar.compile(model, 1, batch, plan=plan, seed=seed)
    torch.manual_seed(torch_seed)
    return [model(**batch).loss.item() for _ in range(2)]


def test_the_run_is_seeded_by_seed_and_not_by_torch():
    first = losses(0, 0)
    assert losses(0, 1) == first
    assert losses(1, 0) != first
    assert first[0] != first[1]


# -- torch's own generator ------------------------------------------------------------------------


def test_with_torch_s_generator_a_step_equals_eager_bit_for_bit():
    model, batch = build("gpt2", dropout=0.3)
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, batch, rng="torch")
    found = []
    for each in (model, twin):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        for _ in range(2):
            out = each(**batch)
            out.loss.backward()
            optimizer.step()
        found.append((out, list(each.parameters()), torch.get_rng_state()))
    (out, parameters, state), (wanted, references, expected) = found
    assert torch.equal(out.loss, wanted.loss)
    assert torch.equal(out.logits, wanted.logits)
    assert torch.equal(state, expected)
    for parameter, reference in zip(parameters, references, strict=True):
        assert torch.equal(parameter, reference)
        assert torch.equal(parameter.grad, reference.grad)


def test_torch_s_generator_takes_a_loss_function_and_evaluation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    twin = copy.deepcopy(model)
    x, y = torch.randn(4, 8), torch.randn(4, 2)
    model = autopar.compile(model, 1, {"input": x, "batch": y}, loss=F.mse_loss, rng="torch")
    torch.manual_seed(3)
    found = model(input=x, batch=y)
    torch.manual_seed(3)
    assert torch.equal(found, F.mse_loss(twin(x), y))
    model.eval(), twin.eval()
    assert torch.equal(model(input=x), twin(x))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": "2:cpu"}, "rng='torch' on 2 devices.*use devices=1, or leave rng out"),
        ({"num_microbatches": 2}, "rng='torch' with 2 micro-batches"),
        ({"recompute": "full"}, "rng='torch' with recompute"),
        ({"rng": "philox"}, "rng='philox': must be one of 'counter', 'torch'"),
    ],
)
def test_what_torch_s_generator_can_t_do_is_refused_by_name(options, text):
    given = {"devices": 1, "rng": "torch", **options}
    with pytest.raises(ConfigError, match=text):
        autopar.compile(nn.Linear(8, 8), inputs=X, **given)


# -- refused --------------------------------------------------------------------------------------


def seeded(h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return h * torch.rand(h.shape)


REFUSED = {
    "randperm": (lambda h: h[:, torch.randperm(6)], "aten.randperm.default at test_rng_dropout"),
    "rrelu": (lambda h: F.rrelu(h, training=True), "aten.rrelu_with_noise.* no counter-based form"),
    "poisson": (lambda h: torch.poisson(h.abs()), "aten.poisson.default at test_rng_dropout"),
    "random_": (lambda h: h * torch.empty_like(h).random_(0, 3), "random_ at .*use torch.randint"),
    "a generator": (
        lambda h: h * torch.rand(h.shape, generator=torch.Generator()),
        "generator of the model's own is used at test_rng_dropout.py.*leave generator= out",
    ),
    "a seed": (seeded, r"Noisy.forward sets torch's random seed.*by seed= of autopar.compile\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_random_numbers_that_would_depend_on_the_plan_are_refused(name):
    noise, text = REFUSED[name]
    model, state = Noisy(noise), torch.get_rng_state()
    with pytest.raises(CaptureError, match=text):
        capture(model, (X,))
    assert torch.equal(torch.get_rng_state(), state)
