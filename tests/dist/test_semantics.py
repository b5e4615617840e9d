"""Training semantics on two and four real processes: one launch each, a test for each fact."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests.dist.semantics_cases import FACTS
from tests.spawn import run_ranks

CASES = Path(__file__).with_name("semantics_cases.py")

pytestmark = pytest.mark.dist


@functools.cache
def found(world_size: int) -> list[tuple[dict[str, str], str]]:
    """By rank, what it found of each fact, and its errors."""
    results = run_ranks(world_size, CASES, timeout_s=240)
    return [
        (dict(json.loads(line) for line in result.output.splitlines()), result.errors[-3000:])
        for result in results
    ]


@pytest.mark.parametrize(
    ("world_size", "fact"),
    [
        pytest.param(world_size, fact.__name__, id=f"{world_size} ranks: {fact.__name__}")
        for world_size, facts in FACTS.items()
        for fact in facts
    ],
)
def test_on_real_ranks(world_size, fact):
    for rank, (facts, errors) in enumerate(found(world_size)):
        assert fact in facts, f"rank {rank} did not get there:\n{errors}"
        assert not facts[fact], f"rank {rank}:\n{facts[fact]}"
