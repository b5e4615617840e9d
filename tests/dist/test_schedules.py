"""Split backwards, the placement in a V and deeper warm-ups on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import run_ranks

CASES = Path(__file__).with_name("schedule_cases.py")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        pytest.param(2, ('schedule="zero_bubble"', "pp=2"), id="zero bubble, 2"),
        pytest.param(2, ('schedule="zbv"', "pp=2", 'recompute="full"'), id="zbv, 2"),
        pytest.param(4, ("warmup=[7,5,3,1]",), id="warm-up, 4", marks=pytest.mark.slow),
        pytest.param(4, ('schedule="zero_bubble"', "pp=2", "dp=2", "zero=2"), id="zero bubble, 4"),
        pytest.param(
            4,
            ('schedule="zbv"', "pp=2", "dp=2", "zero=3"),
            id="zbv, 4",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_under_a_schedule_equals_one_device(
    world_size: int, options: tuple[str, ...]
) -> None:
    args = (str(world_size), *options)
    for rank, result in enumerate(run_ranks(world_size, CASES, args=args, timeout_s=200)):
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-4000:]}"
        assert result.output.endswith("passed\n")
