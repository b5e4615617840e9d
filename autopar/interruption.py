"""Ctrl-C while modules are imported.

An interrupt that arrives inside an import is an exception in whatever runs there: libraries that
try one import after another swallow it, others print pages of their own frames. No work is lost
then, so that the process just ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit code, as shells have it


@contextmanager
def ends_at_once() -> Iterator[None]:
    """End the process, with one line, where Ctrl-C arrives meanwhile.

    Other threads than the first get no signals, and a handler of a caller's own is left alone.
    """
    is_first = threading.current_thread() is threading.main_thread()
    if not is_first or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.stdout.flush()
    os.write(2, b"autopar: interrupted\n")
    os._exit(INTERRUPTED)
