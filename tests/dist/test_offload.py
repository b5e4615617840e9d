"""Saved values in host memory on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import run_ranks

CASES = Path(__file__).with_name("offload_cases.py")


@pytest.mark.dist
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("pp=2", 'recompute="selective"'), id="1f1b"),
        pytest.param(('schedule="zero_bubble"', "pp=2"), id="zero bubble", marks=pytest.mark.slow),
    ],
)
def test_training_with_saved_values_in_host_memory_equals_one_device(
    options: tuple[str, ...],
) -> None:
    for rank, result in enumerate(run_ranks(2, CASES, args=("2", *options), timeout_s=200)):
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-4000:]}"
        assert result.output.endswith("passed\n")
