"""Captured tiny models, once per session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from autopar.capture.tracing import Captured, capture
from tests.zoo import build


class Case(NamedTuple):
    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    captured: Captured


@functools.cache
def _case(name: str, dropout: float) -> Case:
    model, batch = build(name, batch=4, dropout=dropout)
    return Case(model, batch, capture(model, (), batch))


@pytest.fixture(scope="session")
def case() -> Callable[..., Case]:
    """``case(name)``: model, batch and capture of a tiny model; treat them as read-only."""
    return lambda name, dropout=0.0: _case(name, dropout)
