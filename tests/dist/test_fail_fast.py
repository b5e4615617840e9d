"""One rank's failure ends all ranks with its own text; a normal end disturbs nobody."""

from __future__ import annotations

import pytest

from tests.spawn import ROOT, RankResult, run_ranks

pytestmark = pytest.mark.dist
SCRIPT = ROOT / "tests" / "dist" / "failing_ranks.py"
LIMIT_S = 15.0
START_S = 20.0
"""What it may take three processes to import torch on a busy machine."""


def fail(how: str, rank: int) -> list[RankResult]:
    wait_for = 2 if how == "stop" else 3  # a stopped process never ends by itself
    return run_ranks(
        3, SCRIPT, args=(how, str(rank)), timeout_s=START_S + LIMIT_S, wait_for=wait_for
    )


def others(results: list[RankResult], failing: int) -> list[RankResult]:
    return [r for rank, r in enumerate(results) if rank != failing]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "failed at step 1:.*ValueError: a wrong number"),
        ("uncaught", "failed at the time after step 0:.*ValueError: the data loader broke"),
        ("exit", "failed at step 1:.*SystemExit: 0"),
    ],
)
def test_an_error_on_one_rank_ends_all_with_its_text(how, cause, rank):
    results = fail(how, rank)
    ended_s = max(r.time_s for r in results)
    began_s = min(r.time_s for r in results)
    assert ended_s - began_s < LIMIT_S
    for result in others(results, rank):
        assert result.code == 1
        text = " ".join(result.errors.split())
        assert f"RankError: rank {results.index(result)} ends because of rank {rank}." in text
        for words in cause.split(".*"):
            assert words in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_noticed(rank):
    results = fail("kill", rank)
    assert results[rank].code == -9
    for result in others(results, rank):
        assert result.code == 1
        assert result.time_s - results[rank].time_s < LIMIT_S
        assert f"ends because of rank {rank}. rank {rank} " in result.errors
        assert "killed" in result.errors


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_noticed(rank):
    results = fail("stop", rank)
    assert results[rank].code is None
    for result in others(results, rank):
        assert result.code == 1
        assert f"ends because of rank {rank}. rank {rank} " in result.errors
        assert "stopped" in result.errors


@pytest.mark.parametrize("last", [0, 1])
def test_ranks_that_end_at_different_times_end_well(last):
    results = fail("normal", last)
    assert [r.code for r in results] == [0, 0, 0]
    assert all("RankError" not in r.errors for r in results)


_THREADS_INSIDE_TORCH = """
import sys, threading, time
import torch
from torch.distributed import TCPStore
from autopar.runtime.distributed import _WaitingThread
from autopar.runtime.failure import FailFast

store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
store.set("a", "1")
entered = threading.Event()

def inside_torch(*_):
    entered.set()
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        store.get("a")  # takes the interpreter's lock again in a native frame
    raise RuntimeError("the connection is lost")

class Slow:
    set = add = compare_set = staticmethod(lambda *_: b"")
    multi_get = staticmethod(inside_torch)

class Work:
    wait = staticmethod(inside_torch)

what = sys.argv[1]
if what == "a send":
    _WaitingThread().hold(Work(), torch.ones(1))
    entered.wait()
else:
    watch = FailFast(Slow(), 1, 2)
    watch.start()
    entered.wait()
    if what == "a report":
        watch._lock = threading.Lock()  # this rank's own calls don't wait for the slow one
        watch.report(ValueError("a wrong number"))
"""


@pytest.mark.parametrize("what", ["the watch", "a report", "a send"])
def test_a_process_ends_in_order_while_a_thread_is_inside_torch(what):
    (result,) = run_ranks(1, _THREADS_INSIDE_TORCH, args=(what,))
    assert (result.code, result.errors) == (0, "")


def test_a_run_that_hangs_is_ended_by_the_time_out():
    results = run_ranks(2, "import time\ntime.sleep(60)\n", timeout_s=1.0)
    assert [r.code for r in results] == [None, None]
