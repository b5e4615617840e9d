"""Capturing and planning without the collector of cycles.

Both make millions of small objects that live as long as they do, on top of a graph of as many.
Going through them all for cycles again and again takes a fifth of their time and frees next to
nothing.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside: list[bool] = []  # users under way; for the first one whether the collector was on


@contextmanager
def no_collections(*, sweep: bool = False) -> Iterator[None]:
    """Inside, cycles are not looked for; afterwards as before.

    The collector is the process's: of users on several threads the last one to end turns it on.

    Args:
        sweep: Whether what was made inside is looked through for cycles at the end, once, where
            the collector is turned on again. What is older is not looked at.
    """
    with _lock:
        _inside.append(_inside[0] if _inside else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was_enabled = _inside.pop()
            is_last = was_enabled and not _inside
            if is_last:
                gc.enable()
        if is_last and sweep:
            gc.collect(0)  # all that was made since the collector was turned off is young
