"""The peak over recorded allocations and frees."""

from tests.bench.live_bytes import _peak


def test_memory_that_is_given_out_again_was_freed():
    # the free of the first block was in another thread
    assert _peak([(0.0, 100, 50), (1.0, 100, 50)]) == 50
    assert _peak([(0.0, 100, 50), (1.0, 140, 20), (2.0, 60, 90)]) == 90
    assert _peak([(0.0, 100, 50), (1.0, 150, 20), (2.0, 100, -50), (3.0, 90, 60)]) == 80


def test_frees_of_what_was_there_before_are_left_out():
    assert _peak([(0.0, 500, -50), (1.0, 100, 50), (2.0, 100, -50), (3.0, 7, 8)]) == 50
