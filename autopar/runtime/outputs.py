"""The result of a call in the model's own classes.

In training only the loss and the outputs that the user names are gathered. The other fields hold
a :class:`NotGathered`, which raises whenever it is used; fields of a model output class raise when
they are read. So do objects that hold tensors where nobody sees them, such as caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NoReturn

import torch

from autopar.capture.structure import Structure, rebuild
from autopar.errors import ConfigError


class OutputError(ConfigError, AttributeError):
    """An output was used that the plan does not gather."""


class NotGathered:
    """Stands in for an output that training does not gather, or that is no tensor.

    Args:
        path: Path in the model's result.
        type_name: Class of an object that can't be taken apart; "" for a tensor.
    """

    __slots__ = ("path", "type_name")

    def __init__(self, path: str, type_name: str = "") -> None:
        self.path = path
        self.type_name = type_name

    def refuse(self) -> NoReturn:
        """Say what to do about it."""
        if self.type_name:
            raise OutputError(
                f"output {self.path!r} is a {self.type_name}, which can't be taken apart into "
                "tensors and is left out; return its tensors in a tuple, list, dict or dataclass, "
                "or call the model without it (a cache: use_cache=False)"
            )
        raise OutputError(
            f"output {self.path!r} is not gathered in training; pass outputs=[{self.path!r}] to "
            "autopar.compile(), or call the model under torch.no_grad()"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols that are looked up, such as copying
            raise AttributeError(name)
        self.refuse()

    def __getitem__(self, key: object) -> NoReturn:
        self.refuse()

    def __iter__(self) -> NoReturn:
        self.refuse()

    def __len__(self) -> NoReturn:
        self.refuse()

    def __bool__(self) -> NoReturn:
        self.refuse()

    def __float__(self) -> NoReturn:
        self.refuse()

    def __add__(self, other: object) -> NoReturn:
        self.refuse()

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __add__

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> NoReturn:
        """Refuse to be an operand of a torch function."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                value.refuse()
        raise OutputError("an output that is not gathered in training was given to torch")

    def __repr__(self) -> str:
        if self.type_name:
            return f"<{self.path}, a {self.type_name}, is left out>"
        return f"<{self.path} is not gathered in training>"


def build_result(spec: Structure, values: Mapping[str, torch.Tensor]) -> object:
    """The model's result.

    Args:
        spec: Its structure, from capture.
        values: Tensors by path; what is missing becomes :class:`NotGathered`.
    """
    result = rebuild(
        spec,
        lambda path: values[path] if path in values else NotGathered(path),
        lambda leaf: NotGathered(leaf.path, leaf.type_name),
    )
    kind = type(result)
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields and isinstance(result, Mapping) and _has_missing(result):
        result.__class__ = _guarded_class(kind)  # type: ignore[arg-type]
    return result


def _has_missing(result: Mapping[object, object]) -> bool:
    found = [value for value in result.values() if isinstance(value, NotGathered)]
    return any(not value.type_name for value in found)  # what is left out raises by itself


@cache
def _guarded_class(kind: type[Mapping[object, object]]) -> type:
    """``kind`` whose fields raise on access when they hold a :class:`NotGathered`."""
    base_attribute: Callable[[object, str], object] = kind.__getattribute__
    base_item = kind.__getitem__

    def read_attribute(self: object, name: str) -> object:
        return _given(base_attribute(self, name))

    def read_item(self: Mapping[object, object], key: object) -> object:
        if isinstance(key, int | slice):  # model outputs are also tuples of what they hold
            return _given(to_tuple(self)[key])
        return _given(base_item(self, key))

    def to_tuple(self: Mapping[object, object]) -> tuple[object, ...]:
        return tuple(self.values())

    return type(
        kind.__name__,
        (kind,),
        {
            "__getattribute__": read_attribute,
            "__getitem__": read_item,
            "to_tuple": to_tuple,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        },
    )


def _given(value: object) -> object:
    if isinstance(value, NotGathered):
        value.refuse()
    return value
