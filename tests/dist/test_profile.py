"""The profiler on several processes: ranks agree, rank 0 writes, a run is gone on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cost_models.profile import PointKind, load_profile
from tests.spawn import run_ranks

K = PointKind
COMMAND = """
import sys

from autopar.cli import main

sys.exit(main(["profile", *sys.argv[1:]]))
"""
# every reading of the clock is a tenth of a second, so that the budget is spent at the same point
TICKING = """
import itertools
import sys
from pathlib import Path

from autopar.api.profiling import profile_machine

ticks = itertools.count()
profile_machine(
    Path(sys.argv[1]),
    budget_s=float(sys.argv[2]),
    resume=True,
    clock=lambda: next(ticks) / 10,
)
"""


def succeed(ends) -> None:
    assert [end.code for end in ends] == [0] * len(ends), "".join(end.errors for end in ends)


@pytest.mark.dist
def test_ranks_agree_on_points_and_a_run_is_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    succeed(run_ranks(2, TICKING, args=(str(out), "30")))
    first = load_profile(out)
    assert (first.num_ranks, first.ranks_per_node) == (2, 2)
    assert {p.busy for p in first.of_kind(K.MATMUL)} == {1, 2}
    assert {p.sizes[1] for p in first.of_kind(K.ALL_REDUCE)} == {2}
    assert not first.is_complete

    succeed(run_ranks(2, TICKING, args=(str(out), "35")))
    resumed = load_profile(out)
    assert resumed.points[: len(first.points)] == first.points  # not measured again
    assert len(resumed.points) > len(first.points)
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.dist
def test_a_damaged_profile_is_refused_on_every_rank(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    out.write_text(json.dumps({"format": "autopar-profile", "version": 1}))
    for end in run_ranks(2, COMMAND, args=("--out", str(out), "--resume")):
        assert end.code == 2
        assert "has version 1, expected 2; delete it and profile again" in end.errors
