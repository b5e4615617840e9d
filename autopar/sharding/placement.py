"""Where the elements of a tensor live: one placement per mesh axis.

A :data:`Layout` has one :data:`Placement` per axis, in the order of the mesh's axes. Where several
axes shard the same dim, the first axis is the outer one (torch's order). The size of a shard is
``ceil(size / n)`` at each level, so that every rank's local shape is the same; what lies beyond
the true size is padding and holds arbitrary finite-or-not values unless masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Each micro-batch has a value of its own (only on the axis ``mb``): batch-norm statistics."""

    def __str__(self) -> str:
        """``V``."""
        return "V"


Placement: TypeAlias = Shard | Replicate | Partial | Varying
Layout: TypeAlias = tuple[Placement, ...]

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
    raise ShardingError(f"{text!r} is no placement; write R, V, S(dim) or P(op)")


def format_layout(layout: Sequence[Placement]) -> str:
    """Placements separated by spaces, as in ``S(0) R``."""
    return " ".join(map(str, layout))


def shard_size(size: int, parts: int) -> int:
    """Elements of each block, padding included: ``ceil(size / parts)``."""
    return -(-size // parts)


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
    return tuple(sizes)
