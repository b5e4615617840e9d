"""Nested call arguments and results as named leaves, and back.

A leaf is named by its path: ``"labels"``, ``"batch.ids"``, ``"hidden_states.0"``. Dicts and
mappings (model outputs of ``transformers`` are both mapping and dataclass), lists, tuples, named
tuples and dataclasses are looked into; tensors are leaves; numbers, strings, None, enumerations,
slices and functions are kept as they are; anything else is an unknown object.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TypeAlias

import torch

from autopar.errors import InputError

_STATIC_TYPES = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, enum.Enum, slice, range, type, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor that is found under ``path``."""

    path: str


@dataclass(frozen=True, slots=True)
class StaticLeaf:
    """A value that is no tensor and is kept as it is."""

    value: object


@dataclass(frozen=True, slots=True)
class DroppedLeaf:
    """An object that can't be taken apart, such as a cache.

    Attributes:
        path: Where it was.
        type_name: Its class.
    """

    path: str
    type_name: str


@dataclass(frozen=True, slots=True)
class Branch:
    """A container.

    Attributes:
        kind: Its class.
        keys: Keys of a mapping, field names of a dataclass, else positions.
        children: One per key.
    """

    kind: type
    keys: tuple[object, ...]
    children: tuple[Structure, ...]


Structure: TypeAlias = TensorLeaf | StaticLeaf | DroppedLeaf | Branch


def children_of(value: object) -> dict[object, object] | None:
    """Entries of a container by key, or None if ``value`` is none."""
    if isinstance(value, torch.Tensor | str | bytes | type):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)  # of a named tuple
        return dict(zip(names, value, strict=True)) if names else dict(enumerate(value))
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return None


def join(prefix: str, key: object) -> str:
    """Path of the entry ``key`` of the container at ``prefix``."""
    return f"{prefix}.{key}" if prefix else str(key)


def flatten(value: object, *, root: str = "") -> tuple[Structure, dict[str, torch.Tensor]]:
    """Structure of ``value`` and its tensors by path.

    Args:
        value: Any nesting of containers.
        root: Path of ``value`` itself if it is no container; not part of other paths.

    Raises:
        InputError: Two tensors have the same path, such as those of ``{"a.b": x, "a": {"b": y}}``.
    """
    tensors: dict[str, torch.Tensor] = {}
    path = root if children_of(value) is None else ""
    return _flatten(value, path, tensors), tensors


def _flatten(value: object, path: str, tensors: dict[str, torch.Tensor]) -> Structure:
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise InputError(
                f"two tensors are called {path!r}: a key with a dot reads like a dict in a dict, "
                "and 1 like '1'; give one of the keys another name"
            )
        tensors[path] = value
        return TensorLeaf(path)
    if isinstance(value, _STATIC_TYPES):
        return StaticLeaf(value)
    entries = children_of(value)
    if entries is None:
        return DroppedLeaf(path, type(value).__name__)
    built = tuple(_flatten(child, join(path, key), tensors) for key, child in entries.items())
    return Branch(type(value), tuple(entries), built)


def rebuild(
    structure: Structure,
    tensor_at: Callable[[str], object],
    dropped_at: Callable[[DroppedLeaf], object] = lambda _: None,
) -> object:
    """The value of ``structure`` with ``tensor_at(path)`` for every tensor.

    Args:
        structure: Of a call's arguments or result.
        tensor_at: Gives the value that stands under a path.
        dropped_at: Gives what stands for an object that could not be taken apart; None if left out.
    """
    match structure:
        case TensorLeaf():
            return tensor_at(structure.path)
        case StaticLeaf():
            return structure.value
        case DroppedLeaf():
            return dropped_at(structure)
    values = [rebuild(child, tensor_at, dropped_at) for child in structure.children]
    make: Callable[..., object] = structure.kind
    if issubclass(structure.kind, tuple | list):
        return make(*values) if hasattr(structure.kind, "_fields") else make(values)
    named = dict(zip(structure.keys, values, strict=True))
    if is_dataclass(structure.kind):  # before mappings: model outputs are both
        known = {f.name for f in fields(structure.kind)}
        return make(**{str(key): value for key, value in named.items() if key in known})
    try:
        return make(named)
    except TypeError:  # a mapping class with a constructor of its own
        return named


def map_tensors(value: object, change: Callable[[str, torch.Tensor], object], root: str) -> object:
    """``value`` with ``change(path, tensor)`` for every tensor; other objects stay themselves."""
    if isinstance(value, torch.Tensor):
        return change(root, value)
    entries = children_of(value)
    if entries is None:
        return value
    structure = Branch(
        type(value), tuple(entries), tuple(TensorLeaf(join(root, key)) for key in entries)
    )
    by_path = {
        join(root, key): map_tensors(child, change, join(root, key))
        for key, child in entries.items()
    }
    return rebuild(structure, by_path.__getitem__)


def leaves(structure: Structure) -> Iterator[TensorLeaf | StaticLeaf | DroppedLeaf]:
    """Leaves from left to right."""
    if isinstance(structure, Branch):
        for child in structure.children:
            yield from leaves(child)
    else:
        yield structure


def fill_in(value: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """``value`` with its tensors replaced by those of the same path."""
    return map_tensors(value, lambda path, _: tensors[path], "")
