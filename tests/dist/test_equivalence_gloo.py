"""The equivalence of the simulated ranks again on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import run_ranks

SCRIPT = Path(__file__).with_name("gloo_equivalence.py")


@pytest.mark.dist
@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param((2, 2, 1), id="dp2 x tp2"),
        pytest.param((1, 2, 2), id="tp2 x pp2"),
        pytest.param((1, 1, 4), id="pp4"),
    ],
)
def test_equivalence_over_three_optimizer_steps_on_gloo(degrees: tuple[int, int, int]) -> None:
    results = run_ranks(4, SCRIPT, args=tuple(map(str, degrees)), timeout_s=400)
    for rank, result in enumerate(results):
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-4000:]}"
        assert result.output.endswith("passed\n")
