"""The collector of cycles while models are captured and plans are searched."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from autopar.garbage import no_collections


class Ring:
    """An object that only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def test_the_collector_is_as_before_after_searches_that_overlap():
    entered, leave = threading.Event(), threading.Event()

    def search() -> None:
        with no_collections():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=search)
    with no_collections():
        other.start()
        assert entered.wait(10)
    assert not gc.isenabled()  # the other one goes on
    leave.set()
    other.join()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with no_collections(sweep=True):
            ring = weakref.ref(Ring())
        assert not gc.isenabled()
        assert ring() is not None
    finally:
        gc.enable()


def test_the_collector_is_on_again_after_an_error():
    with pytest.raises(ValueError, match="in vain"), no_collections(sweep=True):
        raise ValueError("in vain")
    assert gc.isenabled()


def test_cycles_made_inside_are_freed_at_the_end_if_that_is_asked_for():
    gc.collect()
    with no_collections():
        kept = weakref.ref(Ring())
    assert kept() is not None
    with no_collections(sweep=True):
        rings = [weakref.ref(Ring()) for _ in range(2000)]
        assert all(ring() is not None for ring in rings)
    assert not any(ring() for ring in rings)


def test_the_sweep_is_left_to_the_last_one_that_ends():
    with no_collections(sweep=True):
        with no_collections(sweep=True):
            ring = weakref.ref(Ring())
        assert ring() is not None
    assert ring() is None
