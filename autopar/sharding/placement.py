"""Where the elements of a tensor live: one placement per mesh axis.

A :data:`Layout` has one :data:`Placement` per axis, in the order of the mesh's axes. Where several
axes shard the same dim, the first axis is the outer one (torch's order). The size of a shard is
``ceil(size / n)`` at each level, so that every rank's local shape is the same; what lies beyond
the true size is padding and holds arbitrary finite-or-not values unless masked.

:class:`Routed` is for rows that were sorted by expert (:mod:`autopar.sharding.routing`): which rows
a rank holds, and in which order, is its own affair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from autopar.errors import ShardingError


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Each rank along the axis holds one block of dim ``dim``."""

    dim: int

    def __str__(self) -> str:
        """Such as ``S(0)``."""
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """Each rank along the axis holds all of it."""

    def __str__(self) -> str:
        """``R``."""
        return "R"


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """The value is the reduction (``"sum"``, ``"max"``, ``"min"``) of the ranks' tensors."""

    op: str = "sum"

    def __str__(self) -> str:
        """Such as ``P(sum)``."""
        return f"P({self.op})"


@dataclass(frozen=True, slots=True, order=True)
class Varying:
    """Each block has a value of its own and there is no common one.

    Batch-norm statistics per micro-batch (axis ``mb``); row counts of a rank's own routing.
    """

    def __str__(self) -> str:
        """``V``."""
        return "V"


class RoutedForm(StrEnum):
    """Whose rows a rank holds; the letter is the one that is printed.

    Attributes:
        TOKENS: The rows of its own tokens, sorted by expert. As many as it has tokens.
        EXPERTS: All ranks have the same tokens; a rank holds the rows of its own experts.
        EXCHANGED: Each rank has tokens of its own; a rank holds the rows of its own experts from
            the tokens of all ranks, which are sent to it.

    Of the last two, a rank has room for a budget of rows; what lies behind its rows is to be
    ignored.
    """

    TOKENS = "T"
    EXPERTS = "E"
    EXCHANGED = "X"


@dataclass(frozen=True, slots=True, order=True)
class Routed:
    """Rows sorted by expert, along dim ``dim``; no layout but its own can be made from it.

    Attributes:
        dim: The dim of the rows.
        form: Whose rows a rank holds.
        capacity_percent: Row budget in percent of the rows that a rank gets if all experts are
            equally popular; 0 for room for all rows, which is always enough.
    """

    dim: int
    form: RoutedForm
    capacity_percent: int = 0

    def __str__(self) -> str:
        """Such as ``T(0)``, ``E(0)``, ``X(0,200)``."""
        budget = f",{self.capacity_percent}" if self.capacity_percent else ""
        return f"{self.form.value}({self.dim}{budget})"


Placement: TypeAlias = Shard | Replicate | Partial | Varying | Routed
Layout: TypeAlias = tuple[Placement, ...]

_ROUTED = re.compile(r"([TEX])\((\d+)(?:,(\d+))?\)")

R = Replicate()
P = Partial("sum")
V = Varying()


def parse_placement(text: str) -> Placement:
    """The placement that prints as ``text``.

    >>> parse_placement("S(1)")
    Shard(dim=1)
    """
    if text == "R":
        return R
    if text == "V":
        return V
    if text.startswith("S(") and text.endswith(")"):
        return Shard(int(text[2:-1]))
    if text.startswith("P(") and text.endswith(")"):
        return Partial(text[2:-1])
    routed = _ROUTED.fullmatch(text)
    if routed is not None:
        form, dim, budget = routed.groups()
        return Routed(int(dim), RoutedForm(form), int(budget or 0))
    raise ShardingError(f"{text!r} is no placement; write R, V, S(dim) or P(op)")


def format_layout(layout: Sequence[Placement]) -> str:
    """Placements separated by spaces, as in ``S(0) R``."""
    return " ".join(map(str, layout))


def shard_size(size: int, parts: int) -> int:
    """Elements of each block, padding included: ``ceil(size / parts)``."""
    return -(-size // parts)


def routed_size(size: int, placement: Routed, parts: int) -> int:
    """Rows that a rank makes room for, of ``size`` that the ranks have together.

    >>> routed_size(256, Routed(0, RoutedForm.EXCHANGED, 150), 4)
    96
    """
    match placement.form:
        case RoutedForm.TOKENS:
            return shard_size(size, parts)
        case RoutedForm.EXPERTS | RoutedForm.EXCHANGED if placement.capacity_percent:
            return min(size, shard_size(size * placement.capacity_percent, 100 * parts))
    return size


def local_shape(
    shape: Sequence[int], layout: Sequence[Placement], axis_sizes: Sequence[int]
) -> tuple[int, ...]:
    """Shape of a rank's block, padding included.

    >>> local_shape((8, 10), (Shard(0), Shard(1)), (2, 4))
    (4, 3)
    """
    sizes = list(shape)
    for placement, parts in zip(layout, axis_sizes, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = shard_size(sizes[placement.dim], parts)
        elif isinstance(placement, Routed):
            sizes[placement.dim] = routed_size(sizes[placement.dim], placement, parts)
    return tuple(sizes)
