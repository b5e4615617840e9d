"""Planning without the collector of cycles.

A search makes millions of small objects that live as long as it does, on top of a graph of as many.
Going through them all for cycles again and again takes a fifth of its time and frees next to
nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside: list[bool] = []  # searches under way; for the first one whether the collector was on


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, cycles are not looked for; afterwards as before.

    The collector is the process's: of searches on several threads the last one to end turns it on.
    """
    with _lock:
        _inside.append(_inside[0] if _inside else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was_enabled = _inside.pop()
            if was_enabled and not _inside:
                gc.enable()
