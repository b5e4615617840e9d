"""Collectives in buckets on two and four real processes give what single ones give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spawn import run_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_and_weights_are_those_of_single_collectives(
    world_size: int, tmp_path: Path
) -> None:
    script, file = Path(__file__).with_name("bucket_cases.py"), tmp_path / "facts.json"
    results = run_ranks(world_size, script, args=(str(file),), timeout_s=240)
    for rank, result in enumerate(results):
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-4000:]}"
    facts = json.loads(file.read_text())
    assert len(facts) >= 3
    assert not any(facts.values()), "\n".join(facts.values())
