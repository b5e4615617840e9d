"""Batches and shares of them on four real processes, two by two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.data_cases import FACTS
from tests.dist.facts import check, launch

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def told():
    return launch(4, Path(__file__).with_name("data_cases.py"), timeout_s=150)


@pytest.mark.parametrize("fact", [fact.__name__ for fact in FACTS])
def test_data(told, fact):
    check(told, fact)


def test_all_ranks_end_well(told):
    check(told, "ranks end well")
