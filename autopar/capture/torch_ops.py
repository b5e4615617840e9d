"""Operator names of the program and torch: the one place where they meet.

``torch_callable(op)`` gives the function that computes an operator, called with the node's
arguments after :func:`to_torch` (dtypes) and, for operators that make a tensor from nothing, with
the device bound.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from autopar.capture import moe, neutral
from autopar.ir.graph import Arg, Dtype, Ref, TensorMeta
from autopar.torch_compat import operator_schema

NEUTRAL: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "autopar.attention": neutral.attention,
        "autopar.attention_backward": neutral.attention_backward,
        "autopar.dropout": neutral.dropout,
        "autopar.dropout_backward": neutral.dropout_backward,
        "autopar.uniform": neutral.uniform_numbers,
        "autopar.normal": neutral.normal_numbers,
        "autopar.batch_norm": neutral.batch_norm,
        "autopar.batch_norm_backward": neutral.batch_norm_backward,
        "autopar.nll_loss_sum": neutral.nll_loss_sum,
        "autopar.nll_count": neutral.nll_count,
        "autopar.nll_loss_backward": neutral.nll_loss_backward,
        "autopar.constant": neutral.constant,
        "autopar.moe_route": moe.moe_route,
        "autopar.moe_dispatch": moe.moe_dispatch,
        "autopar.moe_combine": moe.moe_combine,
        "autopar.moe_spread": moe.moe_spread,
        "autopar.moe_run_sums": moe.moe_run_sums,
        "autopar.check_rows": torch.ops.autopar.check_rows.default,
        # through the dispatcher: they read counts, which a fake tensor does not have
        "autopar.grouped_mm": torch.ops.autopar.grouped_mm.default,
        "autopar.grouped_mm_weight": torch.ops.autopar.grouped_mm_weight.default,
        "autopar.grouped_mm_ends": torch.ops.autopar.grouped_mm_ends.default,
        "autopar.grouped_mm_ends_backward": torch.ops.autopar.grouped_mm_ends_backward.default,
    }
)
FACTORIES = frozenset({"aten.full.default", "aten.arange.start_step", "autopar.constant"})


def dtype_name(dtype: torch.dtype) -> str:
    """Name without the prefix, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Shape and dtype."""
    return TensorMeta(tuple(int(size) for size in tensor.shape), dtype_name(tensor.dtype))


def torch_callable(op: str, *, device: torch.device | None = None) -> Callable[..., object]:
    """The function that computes ``op``.

    Args:
        op: ``"aten.<name>.<overload>"``, ``"autopar.<name>"``, ``"getitem"`` or another
            registered operator ``"<namespace>.<name>.<overload>"``.
        device: Where operators without tensor arguments make their result.

    Raises:
        KeyError: There is no such operator.
    """
    if op == "getitem":
        return operator.getitem
    if op == "aten.view.default":  # layouts change after collectives, and strides are not kept
        return torch.reshape
    function = NEUTRAL.get(op)
    if function is None:
        namespace, name, overload = _split(op)
        try:
            function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        except AttributeError:
            raise KeyError(f"torch has no operator {op!r}") from None
    if op in FACTORIES and device is not None:
        bound = function
        return lambda *args, **kwargs: bound(*args, device=device, **kwargs)
    return function


@functools.cache
def is_random(op: str) -> bool:
    """Whether an operator draws from torch's random state (the neutral ones do not)."""
    if op == "getitem" or op in NEUTRAL:
        return False
    schema = operator_schema(torch_callable(op))
    return schema is not None and schema.random


def _split(op: str) -> tuple[str, str, str]:
    parts = op.split(".")
    if len(parts) != 3:
        raise KeyError(f"{op!r} names no operator: expected '<namespace>.<name>.<overload>'")
    return parts[0], parts[1], parts[2]


def to_torch(arg: Arg, value_of: Callable[[str], object]) -> object:
    """An argument with references, dtypes and tuples in torch's form."""
    match arg:
        case Ref():
            return value_of(arg.name)
        case Dtype():
            return torch_dtype(arg.name)
        case tuple():
            return [to_torch(item, value_of) for item in arg]
    return arg
