"""Training semantics on two and four real processes: one launch each, a test for each fact."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.dist.facts import check, launch
from tests.dist.semantics_cases import FACTS

CASES = Path(__file__).with_name("semantics_cases.py")

pytestmark = pytest.mark.dist


@functools.cache
def found(world_size: int) -> dict[str, str]:
    """What went wrong with each fact."""
    return launch(world_size, CASES, timeout_s=240)


@pytest.mark.parametrize(
    ("world_size", "fact"),
    [
        pytest.param(world_size, fact.__name__, id=f"{world_size} ranks: {fact.__name__}")
        for world_size, facts in FACTS.items()
        for fact in facts
    ],
)
def test_on_real_ranks(world_size, fact):
    check(found(world_size), fact)


@pytest.mark.parametrize("world_size", FACTS)
def test_all_ranks_end_well(world_size):
    check(found(world_size), "ranks end well")
