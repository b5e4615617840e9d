"""Four ranks that train a compiled model: what one of them does ends all, and all say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spawn import RankResult, run_ranks

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("ending_cases.py")
LIMIT_S = 15.0
LIMITED = {"AUTOPAR_TIMEOUT_S": "6"}
slow = pytest.mark.slow
WAYS = (
    ("label", 2, "rank 2 failed at step 3:", "index 99 is out of bounds", "stage 1, at action 1F"),
    ("raise", 1, "rank 1 failed at the time after step 2:", "ValueError: the metrics broke"),
    ("compile", 1, "rank 1 failed at the compilation:", "boom in forward"),
    ("stall", 3, "step 3 of rank", "rank 3 is at the time after step 2", "AUTOPAR_TIMEOUT_S"),
    ("leave", 3, "rank 3 ended while rank 0 was at step 3"),
    ("sys.exit", 1, "rank 1 ended while rank 0 was at step 3"),
    ("os._exit", 2, "rank 2 has been silent for"),
    ("kill", 0, "rank 0 is gone: it was killed"),
    ("stop", 1, "rank 1 has been silent for", "killed or stopped"),
)
"""What a rank does, which one, and what the others say."""


def end(how: str, rank: int) -> list[RankResult]:
    env = LIMITED if how == "stall" else None
    return run_ranks(4, SCRIPT, args=(how, str(rank)), env=env, timeout_s=100, settle_s=LIMIT_S)


def check_all_ended(results: list[RankResult]) -> None:
    assert all(r.code is not None for r in results), "a rank had to be killed"
    assert all("trained to the end" not in r.output for r in results)
    times_s = [r.time_s for r in results]
    assert max(times_s) - min(times_s) < LIMIT_S
    assert not any(r.left_behind for r in results), "a loading process lives on"


@pytest.mark.parametrize(
    ("how", "rank", "words"),
    [
        pytest.param(how, rank, words, marks=() if how == "label" else slow, id=f"{how}-{rank}")
        for how, rank, *words in WAYS
    ],
)
def test_what_one_rank_does_ends_all_with_its_cause(how, rank, words):
    results = end(how, rank)
    codes = {"leave": 0, "sys.exit": 3, "kill": -9}
    if how == "stop":
        assert results[rank].time_s > 20
        results[rank] = results[(rank + 1) % 4]  # it was not there to end with the others
    check_all_ended(results)
    for number, result in enumerate(results):
        if number == rank and how in codes:
            assert result.code == codes[how]
            continue
        assert result.code == 1
        if number == rank and how == "os._exit":
            continue
        text = " ".join(result.errors.split())
        own = [piece for piece in words if not piece.startswith("rank ")]
        for piece in own if number == rank else words:
            assert piece in text, (number, text[-2000:])
        if number != rank or how == "stall":
            assert f"rank {number} ends because of rank {rank}." in text


@slow
@pytest.mark.parametrize(
    ("how", "rank", "words"),
    [
        ("shape", 1, "step 3: the ranks are given different calls: input 'input_ids' is int64[2, 6]"
         " on rank 1, int64[4, 6] on rank 0"),
        ("plan", 2, "autopar.compile(plan=) is the plan "),
    ],
)  # fmt: skip
def test_what_every_rank_can_see_is_raised_by_each_itself(how, rank, words):
    results = end(how, rank)
    check_all_ended(results)
    for result in results:
        assert result.code == 1
        assert words in result.errors
        assert f"on rank {rank}" in result.errors


@slow
def test_training_to_the_end_disturbs_nobody():
    results = end("nothing", 0)
    assert [r.code for r in results] == [0] * 4
    assert all(r.output == "trained to the end\n" for r in results), results[0].errors
    assert not any(r.left_behind for r in results)
