"""Buffers that a step changes, and what micro-batches mean for batch statistics."""

from __future__ import annotations

import pytest
import torch

import autopar
from tests.dist.state_models import batch_of, build


def test_statistics_and_counters_move_once_per_step_as_in_torch():
    plain, batch = build()
    model, _ = build()
    model = autopar.compile(model, 1, batch)
    for step in range(3):
        for each in (model, plain):
            each(**batch_of(step))["loss"].backward()
    for name, value in plain.named_buffers():
        assert torch.allclose(dict(model.named_buffers())[name], value, rtol=1e-5), name
    assert int(model.norm.num_batches_tracked) == 3
    model.eval()
    with torch.no_grad():
        model(**batch)
    assert int(model.norm.num_batches_tracked) == 3


def test_buffers_keep_their_object_dtype_and_persistence():
    model, batch = build()
    model.register_buffer("hidden", torch.ones(1), persistent=False)
    held = dict(model.named_buffers())
    model = autopar.compile(model, 1, batch)
    model(**batch)["loss"].backward()
    assert all(buffer is held[name] for name, buffer in model.named_buffers())
    assert "hidden" not in model.state_dict()
    assert "hidden" not in model.full_state_dict()
    assert model.norm.num_batches_tracked.dtype is torch.int64


def conv_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )  # fmt: skip


def mean_square(out, _):
    return out.square().mean()


def test_statistics_of_micro_batches_are_refused_unless_they_are_asked_for():
    images = torch.randn(16, 3, 6, 6)
    with pytest.raises(autopar.ConstraintError, match="mixes samples of different micro-batches"):
        autopar.compile(conv_net(), "2:cpu", images, loss=mean_square, pp=2, num_microbatches=4)


@pytest.mark.parametrize(("microbatches", "calls"), [(1, 1), (4, 4)])
def test_running_statistics_are_those_of_the_batch_or_if_asked_of_each_micro_batch(
    microbatches, calls
):
    torch.manual_seed(1)
    images = torch.randn(16, 3, 6, 6)
    plain = conv_net()
    for part in images.chunk(calls):
        plain(part)
    asked = {"num_microbatches": 4, "microbatch_statistics": True} if microbatches > 1 else {}
    model = autopar.compile(conv_net(), 1, images, loss=mean_square, **asked)
    model(images).backward()
    assert model.plan.num_microbatches == microbatches
    for name, value in plain.named_buffers():
        found = dict(model.named_buffers())[name]
        assert torch.allclose(found, value, rtol=1e-5, atol=1e-7), (name, found, value)
