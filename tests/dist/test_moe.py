"""Mixtures of experts trained on two real processes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.spawn import RankResult, run_ranks

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Launch:
    """What one launch of all facts gave: by fact, what went wrong; and how the ranks ended."""

    facts: dict[str, str]
    ranks: list[RankResult]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    file = tmp_path_factory.mktemp("moe") / "facts.json"
    script = Path(__file__).with_name("moe_cases.py")
    ranks = run_ranks(2, script, args=(str(file),), timeout_s=240)
    assert file.exists(), ranks[0].errors[-4000:]
    return Launch(json.loads(file.read_text()), ranks)


@pytest.mark.parametrize("fact", ["experts_over_dp", "experts_over_tp", "biased_experts_over_dp"])
def test_training_with_split_experts_equals_one_device(launch: Launch, fact: str) -> None:
    assert launch.facts[fact] == ""


def test_more_rows_than_the_budget_are_the_same_error_on_all_ranks(launch: Launch) -> None:
    for result in launch.ranks:
        assert result.code == 1
        for part in (
            "moe_route", "moe_models.py", "96 rows were routed to the experts of one rank",
            "room for 48", "raise expert_capacity",
        ):  # fmt: skip
            assert part in result.errors
