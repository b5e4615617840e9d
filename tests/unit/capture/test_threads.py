"""Models that are captured on several threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from autopar.capture.tracing import capture


def network() -> torch.nn.Sequential:
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(6)]
    return torch.nn.Sequential(*layers)


def captured_hash(_: int) -> str:
    return capture(network(), (torch.zeros(4, 16),), loss=lambda out, _: out.square().sum()).hash


def test_models_are_captured_as_if_alone():
    alone = captured_hash(0)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(captured_hash, range(8))) == {alone}
