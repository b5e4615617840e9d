"""The collector of cycles while plans are searched."""

from __future__ import annotations

import gc
import threading

from autopar.solver.garbage import no_collections


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
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
