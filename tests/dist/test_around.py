"""Bad batches on two real processes, odd pipelines on four: the same answer on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.around_cases import FACTS
from tests.dist.facts import check, launch

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).with_name("around_cases.py")


@pytest.fixture(scope="module")
def two():
    return launch(2, SCRIPT, timeout_s=150)


@pytest.fixture(scope="module")
def four():
    return launch(4, SCRIPT, timeout_s=150)


@pytest.mark.parametrize("fact", [fact.__name__ for fact in FACTS[2]])
def test_two_ranks(two, fact):
    check(two, fact)


@pytest.mark.slow
@pytest.mark.parametrize("fact", [fact.__name__ for fact in FACTS[4]])
def test_four_ranks(four, fact):
    check(four, fact)


def test_two_ranks_end_well(two):
    check(two, "ranks end well")


@pytest.mark.slow
def test_four_ranks_end_well(four):
    check(four, "ranks end well")
