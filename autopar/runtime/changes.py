"""What the user changed in a model's modules since it was captured.

A program holds what the modules said when it was made: a dropout's ``p``, a factor, which hooks
there are. :class:`ModelChanges` finds out before every call whether that still holds, so that the
call can be captured again. The common answer, that nothing changed, compares identities alone.

Entries of dicts and of objects (a ``config``) are not looked into.
"""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from autopar.errors import ConfigError
from autopar.torch_compat import HOOKS_OF_CALLS

_VALUES = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype)
_BY_IDENTITY = (torch.Tensor, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_SEQUENCES = (list, tuple)
_MOST_ENTRIES = 256  # of a list or tuple that are looked at
_MODE = "training"  # a part of the key of a call by itself
_OURS = "_autopar"
_HOOKS = operator.itemgetter(*HOOKS_OF_CALLS)
_ENOUGH = 3  # changes of an attribute that left the program as it was


@dataclass(frozen=True, slots=True)
class Marks:
    """What a program depends on beside the arguments of its call.

    Attributes:
        modes: The model's own mode, and the names of the modules in the other one.
        changes: (name, what it is now) of everything that is not as it was when captured.
    """

    modes: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]


class ModelChanges:
    """Compares a model's modules with those that were captured.

    Args:
        model: As it is captured: with its own class and hooks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._looked_at = _Kinds()
        self._owners: dict[str, tuple[torch.nn.Module, str]] = {}
        self._first = self._described(model)
        self._latest: dict[str, tuple[tuple[object, ...], int]] = {}
        self._harmless: dict[str, set[str]] = {}
        self._ignored: dict[torch.nn.Module, set[str]] = {}
        self._tensors: list[object] = []
        self._versions: list[int] = []
        self._held: list[object] = []
        self._ids: tuple[int, ...] = ()
        self._marks = Marks((), ())

    def of(self, model: torch.nn.Module) -> Marks:
        """The marks of the model as it is now; nothing of it but attributes is touched.

        Raises:
            ConfigError: A module with tensors was replaced or removed.
        """
        found = self._flat(model)
        ids = tuple(map(id, found))
        if ids != self._ids or self._versions != _versions(self._tensors):
            self._marks = Marks(modes_of(model), self._compare(self._described(model)))
            # held: an object that is gone could give its id to another one
            self._held, self._ids = found, ids
            self._tensors = [value for value in found if type(value) is torch.Tensor]
            self._versions = _versions(self._tensors)
        return self._marks

    def note_harmless(
        self, one: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]]
    ) -> None:
        """Two sets of changes gave the same program: what differs is ignored when it recurs."""
        for name, text in set(one) ^ set(other):
            texts = self._harmless.setdefault(name, set())
            texts.add(text)
            if len(texts) >= _ENOUGH and name in self._owners:
                owner, attribute = self._owners[name]
                self._ignored.setdefault(owner, set()).add(attribute)
        self._ids = ()

    def _flat(self, model: torch.nn.Module) -> list[object]:
        """Everything that is compared, in a fixed order."""
        looked_at, ignored = self._looked_at, self._ignored
        found: list[object] = []
        stack, seen = [model], {model}
        while stack:
            module = stack.pop()
            state = module.__dict__
            found.append(module)
            entries = state
            if module in ignored:
                entries = {n: v for n, v in state.items() if n not in ignored[module]}
            values = [value for value in entries.values() if looked_at[type(value)]]
            found += values
            if list in map(type, values):  # a tuple can't change
                for value in values:
                    if type(value) is list:
                        found += value[:_MOST_ENTRIES]
            hooks = _HOOKS(state)
            if any(hooks):
                for table in hooks:
                    found += table.values()
            children = state["_modules"]
            if children:
                for child in reversed(children.values()):
                    if child is not None and child not in seen:
                        seen.add(child)
                        stack.append(child)
        return found

    def _described(self, model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
        """What is compared, by name: ``"path.attribute"``, a module's path, or its hooks."""
        found: dict[str, tuple[object, ...]] = {}
        for path, module in model.named_modules():
            found[f"module {path!r}"] = (module,)
            state = module.__dict__
            hooks = tuple(hook for table in _HOOKS(state) for hook in table.values())
            if hooks:
                found[f"the hooks of {path!r}"] = hooks
            prefix = f"{path}." if path else ""
            for name, value in state.items():
                if name == _MODE or name.startswith(_OURS) or not self._looked_at[type(value)]:
                    continue
                full = prefix + name
                self._owners[full] = module, name
                entries = value[:_MOST_ENTRIES] if isinstance(value, _SEQUENCES) else (value,)
                found[full] = (*entries, *_versions(entries))
        return found

    def _compare(self, now: dict[str, tuple[object, ...]]) -> tuple[tuple[str, str], ...]:
        changes = []
        for name in dict.fromkeys((*self._first, *now)):
            old, new = self._first.get(name, ()), now.get(name, ())
            if len(old) == len(new) and all(map(_is_same, old, new)):
                continue
            _refuse_tensors(name, old, new)
            if len(self._harmless.get(name, ())) < _ENOUGH:
                changes.append((name, self._text(name, new)))
        return tuple(changes)

    def _text(self, name: str, new: tuple[object, ...]) -> str:
        if all(isinstance(value, _VALUES) for value in new):
            return repr(new)
        latest, count = self._latest.get(name, ((), 0))
        if len(latest) != len(new) or not all(map(_is_same, latest, new)):
            self._latest[name] = (new, count := count + 1)
        return f"another one, number {count}"


class _Kinds(dict[type, bool]):
    """Whether values of a type are looked at."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = issubclass(kind, (*_VALUES, *_BY_IDENTITY, *_SEQUENCES))
        return self[kind]


def modes_of(model: torch.nn.Module) -> tuple[str, ...]:
    """The model's mode, and the names of the modules in the other one."""
    odd = (name for name, m in model.named_modules() if m.training != model.training)
    return ("train" if model.training else "eval", *odd)


def _versions(values: Iterable[object]) -> list[int]:
    """How often each plain tensor was written to; parameters are not baked into a program."""
    return [
        value._version
        for value in values
        if type(value) is torch.Tensor and not value.is_inference()
    ]


def _is_same(old: object, new: object) -> bool:
    if old is new:
        return True
    return type(old) is type(new) and isinstance(old, _VALUES) and repr(old) == repr(new)


def _refuse_tensors(name: str, old: tuple[object, ...], new: tuple[object, ...]) -> None:
    """Refuse a module in the place of another one, if one of them has tensors."""
    before = old[0] if old else None
    if isinstance(before, torch.nn.Module) and any(_tensors(m) for m in (before, *new)):
        what = f"replaced by a {type(new[0]).__name__}" if new else "removed"
        raise ConfigError(
            f"{name} ({type(before).__name__}) was {what} after autopar.compile(), whose programs "
            "read the tensors that were there; copy values into it or use load_state_dict(), or "
            "change the model before compile()"
        )


def _tensors(module: object) -> bool:
    def every(owner: torch.nn.Module) -> Iterator[torch.Tensor]:
        yield from owner.parameters()
        yield from owner.buffers()

    return isinstance(module, torch.nn.Module) and any(True for _ in every(module))
