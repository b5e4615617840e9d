"""The criterion of equality, by hand."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import EquivalenceError
from autopar.runtime.equivalence import check_equal, compare, largest_gradient

NAN, INF = float("nan"), float("inf")


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_limit_is_relative_to_the_largest_element():
    # max|b| = 4: 4e-10 allowed
    assert compare({"w": t(4.0 + 3e-10)}, {"w": t(4.0)}, largest_gradient=0.0)[0].ratio < 1
    gap = compare({"w": t(4.0 + 5e-10)}, {"w": t(4.0)}, largest_gradient=0.0)[0]
    assert gap.ratio == pytest.approx(1.25, rel=1e-3)


def test_a_gradient_that_is_zero_is_judged_by_the_largest_one():
    # G = 100: a tensor of zeros may be off by 1e-10 * 1e-3 * 100 = 1e-11
    assert compare({"b": t(0.9e-11)}, {"b": t(0.0)}, largest_gradient=100.0)[0].ratio < 1
    assert compare({"b": t(1.1e-11)}, {"b": t(0.0)}, largest_gradient=100.0)[0].ratio > 1


def test_zero_against_zero_is_equal_without_any_gradient():
    assert compare({"b": t(0.0)}, {"b": t(0.0)}, largest_gradient=0.0)[0].ratio == 0.0


def test_nan_and_infinities_must_be_the_same():
    same = compare({"x": t(NAN, INF, 1.0)}, {"x": t(NAN, INF, 1.0)}, largest_gradient=1.0)
    check_equal(same)
    for bad in (t(1.0, INF, 1.0), t(NAN, -INF, 1.0), t(NAN, INF, NAN)):
        with pytest.raises(EquivalenceError, match="x differs from one device by inf"):
            check_equal(compare({"x": bad}, {"x": t(NAN, INF, 1.0)}, largest_gradient=1.0))


def test_the_worst_tensor_is_named_with_both_numbers():
    found = {"a": t(1.0), "b": t(1.5), "c": t(1.1)}
    expected = {"a": t(1.0), "b": t(1.0), "c": t(1.0)}
    message = (
        r"b differs from one device by 0\.5, allowed is 1e-10 "
        r"\(2 of 3 tensors differ; also c\)"
    )
    with pytest.raises(EquivalenceError, match=message):
        check_equal(compare(found, expected, largest_gradient=0.0))


def test_a_missing_tensor_and_another_shape_are_named():
    with pytest.raises(EquivalenceError, match=r"the plan yields no w; one device yields \(1,\)"):
        compare({}, {"w": t(1.0)}, largest_gradient=0.0)
    with pytest.raises(EquivalenceError, match=r"w has shape \(2,\) under the plan, \(1,\) on one"):
        compare({"w": t(1.0, 2.0)}, {"w": t(1.0)}, largest_gradient=0.0)


def test_the_largest_gradient_ignores_what_is_not_finite():
    assert largest_gradient({"a": t(1.0, -3.0), "b": t(INF, NAN)}) == 3.0
    assert largest_gradient({}) == 0.0
