"""The arguments of a model call as named tensors, and the loss in its result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autopar.capture.structure import (
    DroppedLeaf,
    StaticLeaf,
    TensorLeaf,
    children_of,
    flatten,
    leaves,
    map_tensors,
)
from autopar.errors import ConfigError

LossFunction = Callable[[object, object], torch.Tensor]


_BATCH = "loss_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """The arguments of one call, by the names of the parameters of ``forward``.

    Attributes:
        positional: Names of the positional arguments, in order.
        values: Every argument by its name, positional ones first; under ``"loss_batch"`` what
            the loss function is given, where that is not the call itself.
    """

    positional: tuple[str, ...]
    values: Mapping[str, object]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by path, such as ``"labels"`` or ``"batch.ids"``."""
        return flatten(dict(self.values))[1]

    def statics(self) -> dict[str, object]:
        """Numbers, strings and None by path; a plan is valid only for these values."""
        structure, _ = flatten(dict(self.values))
        paths = _leaf_paths(dict(self.values), "")
        return {
            path: leaf.value
            for path, leaf in zip(paths, leaves(structure), strict=True)
            if isinstance(leaf, StaticLeaf)
        }

    def with_tensors(self, change: Callable[[str, torch.Tensor], object]) -> ModelCall:
        """The call with ``change(path, tensor)`` in the place of every tensor."""
        values = map_tensors(dict(self.values), change, "")
        assert isinstance(values, dict)
        return ModelCall(positional=self.positional, values=values)

    def args(self) -> tuple[object, ...]:
        """Positional arguments."""
        return tuple(self.values[name] for name in self.positional)

    def kwargs(self) -> dict[str, object]:
        """Keyword arguments."""
        skipped = {*self.positional, _BATCH}
        return {name: value for name, value in self.values.items() if name not in skipped}

    def batch(self) -> object:
        """What a loss function gets as its second argument.

        The batch that was given for it, else the only argument of the call if it is positional,
        the tuple of arguments if all are, the dict if none is, and else the pair of both.
        """
        args, kwargs = self.args(), self.kwargs()
        if _BATCH in self.values:
            return self.values[_BATCH]
        if args and kwargs:
            return args, kwargs
        if kwargs:
            return kwargs
        return args[0] if len(args) == 1 else args


def bind_call(
    model: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    batch: object = None,
) -> ModelCall:
    """The call ``model(*args, **kwargs)`` with its positional arguments named.

    Args:
        model: Its ``forward`` gives the names.
        args: Positional arguments.
        kwargs: Keyword arguments.
        batch: What the loss function is given instead of the call's own arguments.

    Raises:
        ConfigError: The arguments do not fit ``forward``.
    """
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"the inputs do not fit {type(model).__name__}.forward{signature}: {error}; "
            "give one batch exactly as the model is called; what only loss= needs goes into the "
            "entry 'batch'"
        ) from None
    names = _positional_names(signature, len(args))
    values: dict[str, object] = dict(zip(names, args, strict=True))
    values.update(kwargs)
    if batch is not None:
        values[_BATCH] = batch
    _refuse_unknown(values, signature)
    return ModelCall(positional=names, values=values)


def _refuse_unknown(values: Mapping[str, object], signature: inspect.Signature) -> None:
    """Refuse objects that may hold tensors where they are not seen: a plan would bake them in."""
    for leaf in leaves(flatten(dict(values))[0]):
        if isinstance(leaf, DroppedLeaf):
            cache = ", or pass use_cache=False" if "use_cache" in signature.parameters else ""
            raise ConfigError(
                f"argument {leaf.path!r} is a {leaf.type_name}, which can't be taken apart into "
                "tensors; pass its tensors in a tuple, list, dict or dataclass, leave the argument "
                f"out{cache}"
            )


def _positional_names(signature: inspect.Signature, count: int) -> tuple[str, ...]:
    kinds = inspect.Parameter
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is kinds.VAR_POSITIONAL:
            names.extend(f"{parameter.name}{i}" for i in range(count - len(names)))
    return tuple(names[:count])


def _leaf_paths(value: object, path: str) -> list[str]:
    entries = children_of(value)
    if entries is None:
        return [path]
    paths: list[str] = []
    for key, child in entries.items():
        paths += _leaf_paths(child, f"{path}.{key}" if path else str(key))
    return paths


def find_loss(output: object, *, training: bool) -> tuple[str, torch.Tensor] | None:
    """Path and tensor of the loss in a model's result, or None.

    It is the field ``loss`` if there is one, else the result itself, else the only entry of a
    tuple, list or mapping, each time only if it is a floating-point scalar (that needs a
    gradient, in training). Of several scalars none is the loss: what is made of them is known when
    ``backward`` is called.
    """

    def fits(value: object) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dim() == 0
            and value.is_floating_point()
            and (value.requires_grad or not training)
        )

    if isinstance(output, torch.Tensor):
        return ("output", output) if fits(output) else None
    structure, tensors = flatten(output, root="output")
    if "loss" in tensors and fits(tensors["loss"]):
        return "loss", tensors["loss"]
    scalars = [
        leaf.path
        for leaf in leaves(structure)
        if isinstance(leaf, TensorLeaf) and "." not in leaf.path and fits(tensors[leaf.path])
    ]
    return (scalars[0], tensors[scalars[0]]) if len(scalars) == 1 else None
