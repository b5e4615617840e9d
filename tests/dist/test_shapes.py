"""Batches of changing sizes on two real processes: one launch, one test for each fact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.spawn import run_ranks

CASES = Path(__file__).with_name("shape_cases.py")
RANKS = 2

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Per rank, fact -> what went wrong; "" where it held."""
    folder = tmp_path_factory.mktemp("shapes")
    results = run_ranks(RANKS, CASES, args=(str(folder),), timeout_s=240)
    for rank, result in enumerate(results):
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-2000:]}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("plan", ["two_stages", "two_data_ranks"])
@pytest.mark.parametrize(
    "fact",
    [
        pytest.param("other_sizes", id="batches of ten, seven, three and one sample are exact"),
        pytest.param(
            "other_lengths", id="other lengths and a double batch in evaluation are exact"
        ),
        pytest.param("thirteen_samples", id="an epoch whose last batch is of one sample is exact"),
        pytest.param("other_dims", id="a batch of other dims is refused and the next one runs"),
    ],
)
def test_shapes_that_change_equal_one_device(
    plan: str, fact: str, failures: list[dict[str, str]]
) -> None:
    for rank, found in enumerate(failures):
        assert found[f"{plan} {fact}"] == "", f"rank {rank}:\n{found[f'{plan} {fact}']}"
