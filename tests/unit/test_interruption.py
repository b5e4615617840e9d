"""Ctrl-C while modules are imported ends the process, whatever the import makes of it."""

from __future__ import annotations

import subprocess
import sys

from autopar.interruption import INTERRUPTED

_SWALLOWED = """
import os, signal
from autopar.interruption import ends_at_once
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells' background jobs ignore it
{before}
with ends_at_once():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10_000_000): pass
    except BaseException:
        pass
print("went on")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a signal that is not caught ends it."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_an_import_that_swallows_ctrl_c_does_not_go_on():
    found = run(_SWALLOWED.format(before=""))
    assert found.returncode == INTERRUPTED
    assert (found.stdout, found.stderr) == ("", "autopar: interrupted\n")


def test_a_handler_of_a_callers_own_is_left_alone():
    own = "signal.signal(signal.SIGINT, lambda *_: print('own'))"
    found = run(_SWALLOWED.format(before=own))
    assert (found.returncode, found.stdout) == (0, "own\nwent on\n")


_AFTERWARDS = """
import signal
from autopar.interruption import ends_at_once
signal.signal(signal.SIGINT, signal.default_int_handler)
with ends_at_once():
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("raised")
"""


def test_afterwards_ctrl_c_is_an_exception_again():
    found = run(_AFTERWARDS)
    assert (found.returncode, found.stdout, found.stderr) == (0, "raised\n", "")
