"""What every script that runs on several ranks needs: who it is, and how it compares."""

import os
import re

import pytest
import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def whole(tensor):
    """A shard's whole tensor; collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def everywhere(value):
    """The value of every rank."""
    every = [None] * WORLD
    dist.all_gather_object(every, value)
    return every


def close(found, wanted, what):
    """Fail unless two whole tensors agree to float32 training."""
    assert torch.allclose(found, wanted, rtol=2e-4, atol=2e-6), (
        what, float((found - wanted).abs().max()), float(wanted.abs().max()),
    )  # fmt: skip


def refuses(kind, text, call):
    """Fail unless the call raises an error with this text."""
    with pytest.raises(kind, match=re.escape(text)):
        call()
