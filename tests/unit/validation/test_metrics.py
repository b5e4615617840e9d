"""Metrics on numbers made by hand."""

from __future__ import annotations

import pytest

from autopar.validation.errors import SkipRecord
from autopar.validation.formulas import evaluate
from autopar.validation.metrics import (
    Errors,
    Verdicts,
    groups,
    over_sources,
    ranks,
    regret,
    spearman,
)


def test_errors_of_one_source():
    errors = Errors.of([0.1, -0.2, 0.3])
    assert errors is not None
    assert errors.median_abs == pytest.approx(0.2)
    assert errors.mean_abs == pytest.approx(0.2)
    assert errors.bias == pytest.approx(0.2 / 3)
    assert Errors.of([]) is None


def test_rank_correlation_with_ties_is_that_of_their_mean_ranks():
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [3.5, 1.0, 3.5, 2.0]
    assert spearman([1, 2, 3, 4], [2, 4, 6, 9]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_regret_is_what_the_chosen_plan_loses():
    assert regret([3.0, 1.0, 2.0], [10.0, 11.0, 12.0]) == pytest.approx(0.1)
    assert regret([1.0, 1.5], [5.0, 6.0]) == 0.0


def test_precision_and_recall_of_verdicts():
    verdicts = Verdicts.of([(True, True), (True, False), (False, True), (True, True)])
    assert verdicts.precision == pytest.approx(2 / 3)
    assert verdicts.recall == pytest.approx(2 / 3)
    none = Verdicts.of([(False, False)])
    assert none.precision is None
    assert none.recall is None


def test_groups_need_three_runs():
    runs = [("a", 1.0, 10.0), ("b", 1.0, 1.0), ("a", 2.0, 30.0), ("a", 3.0, 20.0), ("b", 2.0, 3.0)]
    (found,) = groups(runs)
    assert (found.key, found.count, found.regret) == ("a", 3, 0.0)
    assert found.spearman == pytest.approx(0.5)


def test_a_source_counts_once_however_many_records_it_has():
    many, few = Errors.of([0.1] * 100), Errors.of([-0.3])
    figures = over_sources({"many": many, "few": few, "none": None})
    assert figures["macro_median"] == pytest.approx(0.2)
    assert figures["macro_bias"] == pytest.approx(-0.1)
    assert over_sources({"none": None}) == {}


def test_formulas_hold_arithmetic_and_nothing_else():
    assert evaluate("2*s*b", {"s": 3, "b": 4}) == 24
    with pytest.raises(SkipRecord):
        evaluate("__import__('os')", {})
    with pytest.raises(SkipRecord):
        evaluate("s*q", {"s": 1})
    with pytest.raises(SkipRecord, match="can't be read"):
        evaluate("s*", {"s": 1})
