"""Errors of the user's model while it is traced, as text that names the user's own line."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from types import TracebackType

import torch

from autopar.capture.interception import is_user_file
from autopar.errors import CaptureError
from autopar.torch_compat import data_dependent_errors

_TORCH_MODULES = str(Path(torch.nn.__file__).parent)
_WAYS_OUT = (
    "rewrite it with torch.where or a mask, decide it from sizes or from a Python number in the "
    "config, move it out of the model, or leave it out of training (for example under "
    "`if not torch.compiler.is_compiling()`)"
)


def capture_error(
    error: BaseException, *, entry_function: str, what: str, model: torch.nn.Module
) -> CaptureError:
    """A :class:`CaptureError` for an exception that came out of the trace.

    Args:
        error: The exception.
        entry_function: Name of our function that calls the model; frames above it are the
            caller's, not the model's.
        what: What was called, such as ``"GPT2LMHeadModel.forward"``.
        model: The user's model, for the path of the module that failed.
    """
    frame = _deepest_user_frame(error.__traceback__, entry_function)
    where = _describe(frame) if frame is not None else "inside torch, while its graph was made"
    where += _module_words(error.__traceback__, model)
    if isinstance(error, data_dependent_errors()):
        return CaptureError(
            f"{what} can't be captured: it decides by the value of a tensor\n  at {where}\n"
            f"A plan is made before there are values; {_WAYS_OUT}. ({_first_line(error)})"
        )
    if type(error).__module__.startswith("torch._dynamo"):  # only such operators call it
        return CaptureError(
            f"{what} can't be captured: it calls an operator on functions, such as torch.cond or "
            f"torch.while_loop, or a function under torch.compile\n  at {where}\n"
            "A plan splits tensors, not functions; compute both branches and choose by "
            "torch.where, and leave torch.compile out"
        )
    return CaptureError(
        f"{what} raised {type(error).__name__}: {error}\n  at {where}\n"
        "while it was traced on tensors without data; if the same call works without autopar, "
        "the line needs values or a device that tracing does not have."
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".strip()


def _module_words(trace: TracebackType | None, model: torch.nn.Module) -> str:
    """The path and class of the innermost module of the model that was being called."""
    paths = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(trace):
        module = frame.f_locals.get("self")
        path = paths.get(id(module), "")
        if path:
            found = f"\n  in module {path!r} of class {type(module).__name__}"
    return found


def _deepest_user_frame(
    trace: TracebackType | None, entry_function: str
) -> traceback.FrameSummary | None:
    """The deepest line of the user's code, else of torch's own modules."""
    found, in_torch_modules, entered = None, None, False
    for frame in traceback.extract_tb(trace):
        if frame.name == entry_function and not is_user_file(frame.filename):
            entered = True
        if entered and is_user_file(frame.filename):
            found = frame
        elif entered and frame.filename.startswith(_TORCH_MODULES):
            in_torch_modules = frame
    return found or in_torch_modules


def _describe(frame: traceback.FrameSummary) -> str:
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{Path(frame.filename)}:{frame.lineno} in {frame.name}: `{line}`"
