"""Refuses random numbers that a forward draws outside torch.

A number from ``random`` or ``numpy.random`` is drawn once, while the model is traced, and would
stand in the program as a constant: the same mask in every step, without a word.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from autopar.capture.interception import is_user_file
from autopar.errors import CaptureError

Result = TypeVar("Result")


def refusing_host_random(call: Callable[[], Result], what: str) -> Result:
    """The result of ``call``, whose random numbers must come from torch.

    The generators are left as they were found.

    Args:
        call: Runs the model; is run a second time to find the line.
        what: What it runs, such as ``"Net.forward"``.

    Raises:
        CaptureError: It has drawn from ``random`` or ``numpy.random``; names the line.
    """
    generators = _Generators()
    result = call()
    drawn = generators.changed()
    if not drawn:
        return result
    generators.restore()
    where = _line_of_draw(call, generators)
    generators.restore()
    raise CaptureError(
        f"{what} draws a number from {drawn}\n  at {where}\nIt would be drawn once, when the plan "
        "is made, and be the same in every step; draw it with torch, pass it in as an input, or "
        "switch it off in the model's configuration"
    )


class _Generators:
    """The states of the process's generators when this was made."""

    def __init__(self) -> None:
        self._numpy: Any = sys.modules.get("numpy.random")
        self._random_state = random.getstate()
        self._numpy_state: Any = self._numpy.get_state() if self._numpy is not None else None
        self._numpy_mark = self._mark()

    def _mark(self) -> object:
        if self._numpy is None:
            return None
        _, words, *rest = self._numpy.get_state()
        return words.tobytes(), rest

    def changed(self) -> str:
        """Name of a generator that has moved on, or ``""``."""
        if random.getstate() != self._random_state:
            return "random"
        return "numpy.random" if self._mark() != self._numpy_mark else ""

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self._random_state)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)


def _is_users(frame: FrameType) -> bool:
    """Whether a frame is of the model's code, not of the generators' modules."""
    name, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    return is_user_file(name) and module != "random" and not str(module).startswith("numpy.")


def _line_of_draw(call: Callable[[], object], generators: _Generators) -> str:
    """The line of the user's code that changes a generator."""
    found: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if found or event not in ("c_return", "return") or not generators.changed():
            return
        at: FrameType | None = frame
        while at is not None and not _is_users(at):
            at = at.f_back
        if at is not None:
            code = at.f_code
            found.append(f"{Path(code.co_filename)}:{at.f_lineno} in {code.co_name}")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found[0] if found else "an unknown line"
