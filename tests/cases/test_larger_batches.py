"""A batch larger than planned is cut into blocks of the planned size where it can be cut."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import autopar
from tests.cases.small_models import SmallGPT, tokens


def joined(batch: dict[str, torch.Tensor], times: int) -> dict[str, torch.Tensor]:
    """A batch ``times`` as large whose samples differ."""
    return {k: torch.cat([v.roll(n, 1) for n in range(times)]) for k, v in batch.items()}


@pytest.fixture(scope="module")
def whole_batch_plan() -> tuple[nn.Module, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    twin, batch = SmallGPT(), tokens(4)
    model = autopar.compile(copy.deepcopy(twin), 1, batch, num_microbatches=1, outputs=["logits"])
    return model, twin, batch


@pytest.mark.parametrize("times", [2, 3])
def test_a_larger_batch_is_cut_where_the_plan_has_one_micro_batch(
    whole_batch_plan, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    model, twin, batch = whole_batch_plan
    large = joined(batch, times)
    model.zero_grad(), twin.zero_grad()
    with caplog.at_level(logging.WARNING, logger="autopar"):
        found = model(**large)
    assert f"it runs in {times} micro-batches instead of 1" in caplog.text
    assert "larger than planned" not in caplog.text
    wanted = twin(**large)
    found["loss"].backward(), wanted["loss"].backward()
    assert torch.allclose(found["loss"], wanted["loss"], rtol=1e-5)
    assert torch.allclose(found["logits"], wanted["logits"], rtol=1e-4, atol=1e-5)
    grads = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        assert torch.allclose(grads[name].grad, parameter.grad, rtol=1e-4, atol=1e-6), name


def test_a_larger_batch_of_an_evaluation_is_cut_too(
    whole_batch_plan, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin, batch = whole_batch_plan
    large = joined(batch, 2)
    model.eval()
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="autopar"):
        found = model(**large)["logits"]
    model.train()
    assert "it runs in 2 micro-batches instead of 1" in caplog.text
    assert torch.allclose(found, twin(**large)["logits"], rtol=1e-4, atol=1e-5)


def test_a_smaller_batch_stays_in_one_piece(
    whole_batch_plan, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin, batch = whole_batch_plan
    small = {k: v[:3] for k, v in batch.items()}
    with caplog.at_level(logging.WARNING, logger="autopar"):
        assert torch.allclose(model(**small)["loss"], twin(**small)["loss"], rtol=1e-5)
    assert caplog.text == ""


def test_a_larger_batch_whose_samples_mix_stays_whole_and_memory_is_not_promised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.randn(4, 6)
    model = autopar.compile(
        copy.deepcopy(twin), 1, x, loss=lambda out, x: (out**2).mean(), num_microbatches=1
    )
    large = torch.randn(8, 6)
    with caplog.at_level(logging.WARNING, logger="autopar"):
        found = model(large)
    assert torch.allclose(found, (twin(large) ** 2).mean(), rtol=1e-5)
    assert "is larger than planned, memory is not promised" in caplog.text
    assert "micro-batches" not in caplog.text
