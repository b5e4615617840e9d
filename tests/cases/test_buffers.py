"""Buffers that a step changes, and what micro-batches mean for batch statistics."""

from __future__ import annotations

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
