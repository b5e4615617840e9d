"""torch's checkpoint API on four real processes; the facts are in ``checkpoint_cases.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import checkpoint_cases
from tests.dist.facts import check, launch

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What failed on any of four ranks, by fact; all facts share one launch."""
    folder = tmp_path_factory.mktemp("checkpoint_cases")
    return launch(4, Path(checkpoint_cases.__file__), args=(str(folder),), timeout_s=300)


@pytest.mark.parametrize("name", list(checkpoint_cases.fact.functions))
def test_on_four_ranks(failures, name):
    check(failures, name)


def test_all_ranks_end_well(failures):
    check(failures, "ranks end well")
