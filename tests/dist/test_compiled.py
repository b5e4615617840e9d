"""Compiled models on two and four real processes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.dist.compiled_cases import TRAINED, USED
from tests.dist.facts import check, launch
from tests.spawn import run_ranks

CASES = Path(__file__).with_name("compiled_cases.py")

pytestmark = pytest.mark.dist


def run_case(world_size: int, *args: str) -> None:
    results = run_ranks(world_size, CASES, args=args, timeout_s=150)
    for rank, result in enumerate(results):
        assert result.output.endswith("passed\n"), f"rank {rank}:\n{result.errors[-4000:]}"
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-2000:]}"


@pytest.fixture(scope="module")
def launched():
    """What facts of a case were told, by ranks and case; each launched once."""
    return cache(lambda ranks, case: launch(ranks, CASES, args=(case,), timeout_s=240))


@pytest.mark.parametrize(
    ("ranks", "fact"),
    [(ranks, name) for ranks in TRAINED for name in (*TRAINED[ranks], "ranks end well")],
)
def test_training_equals_one_device(launched, ranks, fact):
    check(launched(ranks, "trained"), fact)


@pytest.mark.parametrize("fact", [*USED, "ranks end well"])
def test_two_ranks(launched, fact):
    check(launched(2, "used"), fact)


@pytest.mark.slow
def test_training_under_levels_2_and_0_equals_one_device():
    run_case(4, "parity", *map(str, ("gpt2", 2, 2, 1, 1, 2, 2, 0)))


def test_groups_end_with_the_last_model_that_uses_them():
    run_case(2, "closing")


@pytest.mark.parametrize("what", ["content", "shape", "mode"])
def test_ranks_that_are_given_different_calls_are_told_in_what_they_differ(what):
    run_case(2, "different_calls", what)


def test_a_wrong_batch_on_one_rank_ends_all_with_its_error():
    results = run_ranks(4, CASES, args=("wrong_rank",), timeout_s=90)
    assert all(r.code not in (0, None) for r in results)
    for result in results:
        assert "input 'labels' is int32[8, 16] on rank 1, int64[8, 16] on rank 0" in result.errors
    first = min(r.time_s for r in results)
    assert max(r.time_s for r in results) - first < 15
