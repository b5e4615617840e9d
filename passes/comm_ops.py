"""Collectives as they stand in a program: placeholders that a driver answers, and their shapes.

An emitted program calls these functions by identity; the executor never runs them but yields a
request. Dims may be negative as in torch. With ``n`` ranks along ``axis``:

* ``all_reduce(x, op, axis)``: same shape;
* ``all_gather(x, dim, axis, out_size)``: the ranks' blocks along ``dim`` in rank order, cut to
  ``out_size``;
* ``reduce_scatter(x, op, dim, axis)``: ``dim`` padded with zeros to ``n * ceil(size / n)``, block
  ``rank`` of the reduction;
* ``all_to_all(x, gather_dim, scatter_dim, axis, out_size)``: block ``rank`` of ``scatter_dim``
  (padded as above) of every rank, concatenated along ``gather_dim``, cut to ``out_size``;
* ``all_to_all_rows(x, splits, axis, out_rows, back)``: rows to the rank of their expert, expert
  ``e`` of ``E`` being rank ``e // (E / n)``'s. ``splits`` (2, E) has how many rows of each expert
  go, and how many of each sender's rows for own experts come; with ``back`` the other way round.
  Rows are sent in their order and arrive in the order of the senders; zeros fill up ``out_rows``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from autopar.errors import PassError
from autopar.sharding.placement import shard_size


def _refuse(name: str) -> NoReturn:
    raise PassError(f"comm.{name} has no meaning outside the executor; run the program with it")


def all_reduce(x: torch.Tensor, op: str, axis: str) -> torch.Tensor:
    """The reduction over the ranks, on all of them."""
    _refuse("all_reduce")


def all_gather(x: torch.Tensor, dim: int, axis: str, out_size: int) -> torch.Tensor:
    """The ranks' blocks, concatenated."""
    _refuse("all_gather")


def reduce_scatter(x: torch.Tensor, op: str, dim: int, axis: str) -> torch.Tensor:
    """This rank's block of the reduction."""
    _refuse("reduce_scatter")


def all_to_all(
    x: torch.Tensor, gather_dim: int, scatter_dim: int, axis: str, out_size: int
) -> torch.Tensor:
    """From blocks of ``gather_dim`` to blocks of ``scatter_dim``."""
    _refuse("all_to_all")


def all_to_all_rows(
    x: torch.Tensor, splits: torch.Tensor, axis: str, out_rows: int, back: bool
) -> torch.Tensor:
    """Rows to the ranks of their experts, or back."""
    _refuse("all_to_all_rows")


COMM_OPS: Mapping[str, Callable[..., torch.Tensor]] = {
    "comm.all_reduce": all_reduce,
    "comm.all_gather": all_gather,
    "comm.reduce_scatter": reduce_scatter,
    "comm.all_to_all": all_to_all,
    "comm.all_to_all_rows": all_to_all_rows,
}
COMM_NAMES: Mapping[Callable[..., torch.Tensor], str] = {
    function: name.removeprefix("comm.") for name, function in COMM_OPS.items()
}


def result_shape(
    kind: str, shape: tuple[int, ...], args: tuple[object, ...], axis_sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Local shape of a collective's result.

    Args:
        kind: Name without the prefix, such as ``"all_gather"``.
        shape: Local shape of the operand.
        args: The arguments after the operand.
        axis_sizes: Ranks along each axis by name.

    >>> result_shape("reduce_scatter", (5, 3), ("sum", 0, "tp"), {"tp": 2})
    (3, 3)
    """
    sizes = list(shape)
    match kind, args:
        case "all_reduce", (str(), str()):
            pass
        case "all_gather", (int(dim), str(), int(out_size)):
            sizes[dim] = out_size
        case "reduce_scatter", (str(), int(dim), str(axis)):
            sizes[dim] = shard_size(sizes[dim], axis_sizes[axis])
        case "all_to_all", (int(gather_dim), int(scatter_dim), str(axis), int(out_size)):
            sizes[scatter_dim] = shard_size(sizes[scatter_dim], axis_sizes[axis])
            sizes[gather_dim] = out_size
        case "all_to_all_rows", (_, str(), int(out_rows), bool()):
            sizes[0] = out_rows
        case _:
            raise PassError(f"comm.{kind} has no form with the arguments {args}")
    return tuple(sizes)
