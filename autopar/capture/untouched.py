"""A traced model keeps nothing of the trace, and the buffers that its forward assigns are kept.

A forward may keep values in attributes (``self.last = h``, a table of positions, a list of losses).
While it is traced these are tensors without data, which must not stay in the user's module, nor be
found by the next trace. A buffer that is assigned (``self.count = self.count + 1``) is written in
place instead, which tracing records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from autopar.errors import CaptureError

_TABLES = frozenset(torch.nn.Module().__dict__)  # parameters, buffers, modules and hooks
_HOOKS = tuple(sorted(name for name in _TABLES if "_hooks" in name))
_COPIED = (list, dict, set)


@contextlib.contextmanager
def untouched(model: torch.nn.Module, changed: set[str]) -> Iterator[None]:
    """Give every module of ``model`` its attributes back when the body ends.

    Lists, dicts and sets among them get their entries back too. Hooks that the body registers are
    removed: a model that does so at its first call notes that in an attribute, and would register
    them again.

    Args:
        model: The user's model.
        changed: Gets the names of the attributes that were different at the end.
    """
    kept = [(name, module, dict(module.__dict__)) for name, module in model.named_modules()]
    entries = [
        (f"{path}.{name}".lstrip("."), value, value.copy())
        for path, _, attributes in kept
        for name, value in attributes.items()
        if type(value) in _COPIED and name not in _TABLES
    ]
    hooks = [
        (table, table.copy())
        for _, module, _ in kept
        for table in (module.__dict__.get(name) for name in _HOOKS)
        if isinstance(table, dict)
    ]
    try:
        yield
    finally:
        for table, before_hooks in hooks:
            table.clear()
            table.update(before_hooks)
        for path, module, attributes in kept:
            now = module.__dict__
            names = [n for n in now if n not in attributes or now[n] is not attributes[n]]
            changed.update(f"{path}.{name}".lstrip(".") for name in names)
            now.clear()
            now.update(attributes)
        for path, container, before in entries:
            if len(container) != len(before):
                changed.add(path)
            container.clear()
            if isinstance(container, list):
                container.extend(before)
            else:
                container.update(before)


@contextlib.contextmanager
def written_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Write what the body assigns to buffers into the buffers that were there.

    A new buffer, or one of another shape, is taken for a cache if it is not persistent, and left
    out.

    Raises:
        CaptureError: A persistent buffer is new, or has another shape or dtype than before.
    """
    before = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    after: list[dict[str, torch.Tensor | None]] = []
    try:
        yield
    finally:
        for _, module, buffers in before:
            after.append(dict(module._buffers))
            module._buffers.clear()
            module._buffers.update(buffers)
    for (path, module, buffers), found in zip(before, after, strict=True):
        for name, new in found.items():
            old = buffers.get(name)
            if new is None or new is old:
                continue
            if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
                with torch.no_grad():
                    old.copy_(new.detach())
            elif name not in module._non_persistent_buffers_set:
                raise CaptureError(
                    f"forward gives buffer {f'{path}.{name}'.lstrip('.')!r} the form "
                    f"{new.dtype}{list(new.shape)}, before it had "
                    f"{'none' if old is None else f'{old.dtype}{list(old.shape)}'}; register it "
                    "in __init__ with the form that it keeps"
                )
