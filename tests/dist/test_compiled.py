"""Compiled models on two and four real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import run_ranks

CASES = Path(__file__).with_name("compiled_cases.py")

pytestmark = pytest.mark.dist


def run_case(world_size: int, *args: str) -> None:
    results = run_ranks(world_size, CASES, args=args, timeout_s=150)
    for rank, result in enumerate(results):
        assert result.output.endswith("passed\n"), f"rank {rank}:\n{result.errors[-4000:]}"
        assert result.code == 0, f"rank {rank} ended with {result.code}:\n{result.errors[-2000:]}"


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(("4", "gpt2", 2, 1, 2, 1, 2, 0), id="gpt2-pp2-tp2"),
        pytest.param(("4", "llama", 2, 2, 1, 1, 2, 2, 1), id="llama-pp2-dp2-zero2-and-1"),
        pytest.param(
            ("4", "gpt2", 2, 2, 1, 1, 2, 2, 0),
            id="gpt2-pp2-dp2-zero2-and-0",
            marks=pytest.mark.slow,
        ),
        pytest.param(("2", "t5", 1, 2, 1, 1, 2, 1), id="t5-dp2-zero1"),
        pytest.param(("2", "bert", 1, 1, 2, 1, 1, 0), id="bert-tp2"),
        pytest.param(("2", "resnet", 1, 2, 1, 1, 1, 3), id="resnet-dp2-zero3"),
        pytest.param(("2", "vit", 2, 1, 1, 2, 2, 0), id="vit-pp2-interleaved"),
    ],
)
def test_training_equals_one_device(numbers):
    world, *rest = map(str, numbers)
    run_case(int(world), "parity", *rest)


@pytest.mark.parametrize(
    "case",
    [
        "surface",
        "closing",
        "state",
        "checkpoint",
        "early_optimizer",
        "refusals",
        "weights",
        "criterion",
        "half",
        "host_state",
    ],
)
def test_two_ranks(case):
    run_case(2, case)


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
