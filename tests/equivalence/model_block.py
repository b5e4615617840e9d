"""What a block of a random model is, and how dims move through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.equivalence.model_generator import Builder, Value


@dataclass(frozen=True)
class Block:
    """A kind of block.

    Attributes:
        grow: Appends its lines; a loss returns its expression.
        fits: Whether it can continue a value.
    """

    grow: Callable[[Builder, Value], object]
    fits: Callable[[Value], bool] = lambda v: v.rank >= 1


def numel(v: Value) -> int:
    total = 1
    for size in v.shape:
        total *= size
    return total


def at_least(rank: int) -> Callable[[Value], bool]:
    return lambda v: v.rank >= rank


def kept_batch(v: Value, dim: int) -> int | None:
    """The batch dim after ``dim`` has been mixed."""
    return None if v.batch == dim else v.batch


def without_dims(v: Value, dims: tuple[int, ...]) -> int | None:
    """The batch dim after ``dims`` have been reduced."""
    if v.batch is None or v.batch in dims:
        return None
    return v.batch - sum(d < v.batch for d in dims)
