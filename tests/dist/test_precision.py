"""Low precision on two real processes: one launch, one test for each fact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.precision_cases import FACTS
from tests.spawn import run_ranks

CASES = Path(__file__).with_name("precision_cases.py")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each rank found, fact by fact."""
    folder = tmp_path_factory.mktemp("precision")
    results = run_ranks(2, CASES, args=(str(folder),), timeout_s=240)
    for rank, result in enumerate(results):
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-4000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("fact", FACTS)
def test_on_two_ranks(outcomes, fact):
    assert [outcome[fact] for outcome in outcomes] == ["", ""]
