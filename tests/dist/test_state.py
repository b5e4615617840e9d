"""State around the step on four real processes; the facts are in ``state_cases.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import state_cases
from tests.dist.facts import check, launch

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What failed on any of four ranks, by fact; all facts share one launch."""
    folder = tmp_path_factory.mktemp("state_cases")
    return launch(4, Path(state_cases.__file__), args=(str(folder),), timeout_s=300)


@pytest.mark.parametrize("name", list(state_cases.fact.functions))
def test_on_four_ranks(failures, name):
    check(failures, name)


def test_a_tied_vocabulary_of_101_rows_over_three_ranks_is_trained_in_every_row(tmp_path):
    name = "a_vocabulary_split_over_tensor_ranks_has_one_placement_for_both_uses"
    script = Path(state_cases.__file__)
    found = launch(3, script, args=(str(tmp_path), name), timeout_s=150)
    assert set(found) == {name, "ranks end well"}
    check(found, name)


def test_all_ranks_end_well(failures):
    check(failures, "ranks end well")
