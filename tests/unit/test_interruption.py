"""Ctrl-C while modules are imported ends the process, whatever the import makes of it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from autopar.interruption import INTERRUPTED, ends_at_once

_SWALLOWED = """
import os, signal
from autopar.interruption import ends_at_once
{before}
with ends_at_once():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10_000_000): pass
    except BaseException:
        pass
print("went on")
"""


def run(before: str) -> subprocess.CompletedProcess[str]:
    code = _SWALLOWED.format(before=before)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_an_import_that_swallows_ctrl_c_does_not_go_on():
    found = run("")
    assert found.returncode == INTERRUPTED
    assert (found.stdout, found.stderr) == ("", "autopar: interrupted\n")


def test_a_handler_of_a_callers_own_is_left_alone():
    found = run("signal.signal(signal.SIGINT, lambda *_: print('own'))")
    assert (found.returncode, found.stdout) == (0, "own\nwent on\n")


def test_afterwards_ctrl_c_is_an_exception_again():
    with ends_at_once():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
