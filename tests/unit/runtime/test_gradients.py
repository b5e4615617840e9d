"""Gradients are summed in place only into memory that nobody else holds."""

from __future__ import annotations

import pytest
import torch

from autopar.runtime.gradients import Accumulator, own_storages, storage_of


def added_twice(first: torch.Tensor, held=()) -> torch.Tensor:
    total = Accumulator()
    total.add([("w", first)], held)
    total.add([("w", torch.ones_like(first))], ())
    return total["w"]


def test_a_fresh_gradient_is_taken_over_without_a_copy():
    fresh = torch.zeros(3)
    assert added_twice(fresh) is fresh
    assert torch.equal(fresh, torch.ones(3))


def test_a_view_is_copied():
    whole = torch.zeros(6)
    assert torch.equal(added_twice(whole[:3]), torch.ones(3))
    assert torch.equal(whole, torch.zeros(6))


def test_an_expanded_value_is_copied():
    one = torch.zeros(1)
    assert torch.equal(added_twice(one.expand(3)), torch.ones(3))
    assert float(one) == 0.0


def test_a_transposed_value_is_made_contiguous():
    total = added_twice(torch.zeros(2, 3).t())
    assert total.is_contiguous()
    assert torch.equal(total, torch.ones(3, 2))


def test_memory_that_others_hold_is_left_alone():
    activation = torch.zeros(3)
    assert torch.equal(added_twice(activation, [storage_of(activation)]), torch.ones(3))
    assert torch.equal(activation, torch.zeros(3))


def test_two_parameters_with_one_gradient_do_not_share_it():
    shared = torch.zeros(3)
    total = Accumulator()
    total.add([("a", shared), ("b", shared)], ())
    total.add([("a", torch.ones(3))], ())
    assert torch.equal(total["a"], torch.ones(3))
    assert torch.equal(total["b"], torch.zeros(3))


def test_a_tied_parameter_s_gradients_add_up():
    total = Accumulator()
    value = torch.ones(3)
    total.add([("w", value), ("w", value), ("w", torch.ones(3))], ())
    assert torch.equal(total["w"], torch.full((3,), 3.0))
    assert torch.equal(value, torch.ones(3))


def test_a_gradient_taken_out_is_gone():
    total = Accumulator()
    total.add([("w", torch.ones(2))], ())
    assert torch.equal(total.pop("w"), torch.ones(2))
    assert "w" not in total
    assert total.names() == ()


def test_empty_gradients_are_fine():
    empty = torch.zeros(0, 3)
    assert added_twice(empty).shape == (0, 3)
    assert own_storages([torch.zeros(2)], ())


def test_gradients_that_fill_a_bucket_side_by_side_are_taken_over():
    bucket = torch.arange(7.0)
    total = Accumulator()
    total.add([("b", bucket[3:].view(2, 2)), ("a", bucket[:3])], ())
    assert total["a"].data_ptr() == bucket.data_ptr()
    total.add([("a", torch.ones(3))], ())
    assert torch.equal(total["b"].flatten(), torch.arange(3.0, 7.0))


@pytest.mark.parametrize("cuts", [((0, 4), (3, 7)), ((0, 3), (4, 7)), ((0, 3), (3, 6))])
def test_gradients_that_overlap_or_leave_a_gap_in_their_storage_are_copied(cuts):
    bucket = torch.arange(7.0)
    total = Accumulator()
    total.add([(str(cut), bucket[slice(*cut)]) for cut in cuts], ())
    for cut in cuts:
        total.add([(str(cut), torch.ones(cut[1] - cut[0]))], ())
    assert torch.equal(bucket, torch.arange(7.0))
    for begin, end in cuts:
        assert torch.equal(total[str((begin, end))], torch.arange(7.0)[begin:end] + 1)
