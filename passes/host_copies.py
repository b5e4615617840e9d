"""Copies of values to host memory and back, beside the operators that follow.

On a GPU copies run on a stream of their own, one after another, into pinned memory; what begins a
copy returns at once, and what awaits it makes the computing stream wait for that copy alone. A CPU
copies when it is told to, from one place of its memory to another.

Memory on the device is safe without marking streams: a value that is copied out is read by
:func:`on_host`, behind which it may be freed, and memory that a copy fills is awaited by
:func:`on_device` before anything reads it. Both streams wait for each other at these points.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_COPIES = WeakIdKeyDictionary()  # what a copy fills -> the event at its end


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Begin a copy to host memory; what it returns is whole after :func:`on_host`."""
    if _is_fake(x):
        return torch.empty_like(x)
    made = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")
    _copy(made, x, x.device)
    return made


def on_host(copy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Await the copy of ``x``, which may be freed after that."""
    _await(copy, x.device)
    return copy


def to_device(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin a copy back; what it returns may be read after :func:`on_device`."""
    if _is_fake(copy):
        return torch.empty_like(copy, device=device)
    made = torch.empty_like(copy, device=device)
    _copy(made, copy, made.device)
    return made


def on_device(x: torch.Tensor) -> torch.Tensor:
    """Await a copy that was begun by :func:`to_device`."""
    _await(x, x.device)
    return x


def _is_fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no data, as while a program is emitted."""
    return x.untyped_storage().device.type == "meta"


def _copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
    if device.type != "cuda":
        target.copy_(source)
        return
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = _STREAMS[device]
    # what fills the source, or has used the target's memory before, comes first
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        _COPIES[target] = stream.record_event()


def _await(copied: torch.Tensor, device: torch.device) -> None:
    event = _COPIES.pop(copied, None)  # type: ignore[no-untyped-call]
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
