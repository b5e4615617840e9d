"""What an operator does to the dims of its tensors, as data; and the splits that follow from it.

An :class:`OpSignature` names the *factors* of an operator; ``mm`` is ``(m, k), (k, n) -> (m, n)``.
Each dim of each operand and result is a tuple of factors, outermost first: ``("b", "s")`` for a dim
that a view merged, ``()`` for a dim of size one or one that is broadcast. From that follow the
legal splits over one mesh axis (:func:`axis_strategies`):

* everything replicated;
* a factor split: each operand and result that has it is sharded on the dim whose *outermost*
  factor it is; a result that lost it by reduction is ``Partial``; a tensor without it is
  replicated;
* a pending sum passed through, for operators that are linear in some operands (``linear``);
* special splits that need a lowering of their own (vocabulary-parallel embedding).

Source: factors after Shardy's op sharding rules; per-axis enumeration is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias, TypeGuard

from autopar.sharding.placement import (
    Partial,
    Placement,
    R,
    Replicate,
    Routed,
    RoutedForm,
    Shard,
    parse_placement,
)

Dims: TypeAlias = tuple[tuple[str, ...], ...]
"""Per dim of a tensor, its factors, outermost first."""


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """One legal split of one operator over one mesh axis.

    Attributes:
        inputs: Placement of each operand, in the order of ``Node.refs()``.
        outputs: Placement of each result, in the order of ``Node.metas()``.
        factor: The factor that is split, or "" (replicated, or a pending sum passed through).
        lowering: Name of the special local form; "" for the operator itself on local shapes.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str = ""
    lowering: str = ""

    def __str__(self) -> str:
        """Such as ``S(0) R -> S(0)``; a lowering follows in brackets, a factor after ``|``."""
        text = f"{' '.join(map(str, self.inputs))} -> {' '.join(map(str, self.outputs))}"
        text += f" | {self.factor}" if self.factor else ""
        return text + (f" [{self.lowering}]" if self.lowering else "")

    @staticmethod
    def parse(text: str) -> AxisStrategy:
        """The inverse of ``str``."""
        lowering = factor = ""
        if text.endswith("]"):
            text, _, lowering = text[:-1].rpartition(" [")
        if " | " in text:
            text, _, factor = text.partition(" | ")
        left, _, right = text.partition("->")
        return AxisStrategy(
            tuple(map(parse_placement, left.split())),
            tuple(map(parse_placement, right.split())),
            factor,
            lowering,
        )

    @property
    def is_replicated(self) -> bool:
        """Whether every operand and result is whole on every rank."""
        return all(isinstance(p, Replicate) for p in (*self.inputs, *self.outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSignature:
    """Named dims of one operator instance.

    Attributes:
        sizes: Size of every factor.
        inputs: Dims of each operand in the order of ``Node.refs()``.
        outputs: Dims of each result in the order of ``Node.metas()``; None for no tensor.
        reductions: Factors that results lose, with the reduction that completes them. A factor
            that is in an operand, absent from some result and listed here gives that result
            ``Partial(op)``.
        whole: Factors that must not be split.
        linear: Groups of operand positions: with these operands ``Partial("sum")`` and the others
            replicated, every result is ``Partial("sum")``.
        extra: Special splits; they must be legal as they are (the divisibility of their factor is
            checked against ``sizes`` when ``factor`` is set, unless it is in ``padded``).
        merged: A factor that stands for several, outermost first, and only names splits in
            ``extra``: the query heads are key heads times their group. It is cut where they are,
            and its splits are offered where the outermost of them can't be split.
        padded: Factors whose blocks may be uneven: the operator is right on padded blocks where
            the padding of *reduced* factors has been masked with ``pad_fill``.
        pad_fill: Value that neutralises padding of a reduced factor (0.0 for sums).
        shape_arg: Position of the argument that holds the result's sizes (views, expand); it is
            replaced by the local sizes. None if there is none.
        shape_result: The result whose sizes ``shape_arg`` holds.
        free: True for an operator that moves no data (a view).
    """

    sizes: dict[str, int]
    inputs: tuple[Dims | None, ...]
    outputs: tuple[Dims | None, ...]
    reductions: dict[str, str] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    extra: tuple[AxisStrategy, ...] = ()
    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)
    padded: frozenset[str] = frozenset()
    pad_fill: float = 0.0
    shape_arg: int | None = None
    shape_result: int = 0
    free: bool = False


def replicated_strategy(signature: OpSignature) -> AxisStrategy:
    """The split that keeps everything whole."""
    return AxisStrategy((R,) * len(signature.inputs), (R,) * len(signature.outputs))


def factor_strategy(signature: OpSignature, factor: str) -> AxisStrategy | None:
    """The split of ``factor``, or None if some tensor has it in a place that can't be sharded."""
    inputs: list[Placement] = []
    outputs: list[Placement] = []
    found = False
    for dims in signature.inputs:
        dim = _dim_of(dims, factor)
        if dim == -2:
            return None
        found |= dim >= 0
        inputs.append(Shard(dim) if dim >= 0 else R)
    for dims in signature.outputs:
        dim = _dim_of(dims, factor)
        if dim == -2:
            return None
        found |= dim >= 0
        if dim >= 0:
            outputs.append(Shard(dim))
        elif dims is None or factor not in signature.reductions:
            outputs.append(R)
        else:
            outputs.append(Partial(signature.reductions[factor]))
    return AxisStrategy(tuple(inputs), tuple(outputs), factor) if found else None


def _dim_of(dims: Dims | None, factor: str) -> int:
    """Dim whose outermost factor is ``factor``; -1 if absent, -2 if not outermost."""
    for dim, factors in enumerate(dims or ()):
        if factor in factors:
            return dim if factors[0] == factor else -2
    return -1


def axis_strategies(
    signature: OpSignature, axis_size: int, *, divide: dict[str, int] | None = None
) -> tuple[AxisStrategy, ...]:
    """Every legal split of an operator over one mesh axis, the replicated one first.

    Args:
        signature: The operator's dims.
        axis_size: Ranks along the axis.
        divide: Parts that other axes already cut each factor into.

    A factor is offered if the parts divide its size, or if it is in ``padded`` and no block would
    be empty.
    """
    result = [replicated_strategy(signature)]
    for factor, size in signature.sizes.items():
        if factor in signature.whole:
            continue
        already = (divide or {}).get(factor, 1)
        if not _may_split(size, already, axis_size, padded=factor in signature.padded):
            continue
        strategy = factor_strategy(signature, factor)
        if strategy is not None:
            result.append(strategy)
    for group in signature.linear:
        inputs = tuple(Partial() if i in group else R for i in range(len(signature.inputs)))
        outputs = tuple(R if dims is None else Partial() for dims in signature.outputs)
        result.append(AxisStrategy(inputs, outputs))

    def may_split(factor: str) -> bool:
        already = (divide or {}).get(factor, 1)
        padded = factor in signature.padded
        return _may_split(signature.sizes[factor], already, axis_size, padded=padded)

    for strategy in signature.extra:
        outermost = signature.merged.get(strategy.factor, ("",))[0]
        if strategy.factor and not may_split(strategy.factor):
            continue
        if outermost and may_split(outermost):
            continue
        if _blocks_are_even(signature, strategy, axis_size, divide or {}):
            result.append(strategy)
    return tuple(dict.fromkeys(result))


def _blocks_are_even(
    signature: OpSignature, strategy: AxisStrategy, parts: int, divide: dict[str, int]
) -> bool:
    """Whether tokens and experts divide, for a split that makes rows a rank's own."""
    tensors = (*zip(signature.inputs, strategy.inputs, strict=True),
               *zip(signature.outputs, strategy.outputs, strict=True))  # fmt: skip
    if not any(isinstance(p, Routed) for _, p in tensors):
        return True
    for dims, placement in tensors:
        if isinstance(placement, Shard) and dims is not None:
            factors = dims[placement.dim]
            if not factors or signature.sizes[factors[0]] % (divide.get(factors[0], 1) * parts):
                return False
    return True


def _may_split(size: int, already: int, parts: int, *, padded: bool) -> bool:
    if size % (already * parts) == 0:
        return True
    return padded and already == 1 and size > (parts - 1) * (-(-size // parts))


def parts_by_factor(
    signature: OpSignature, strategies: Iterable[tuple[AxisStrategy, int]]
) -> dict[str, int]:
    """Parts that strategies on other axes already cut each factor into.

    Read off the placements, because a special split need not name the factor that it cuts.

    Args:
        signature: The operator's dims.
        strategies: (strategy, axis size) of the other axes.
    """
    parts: dict[str, int] = {}
    for strategy, size in strategies:
        cut = {
            dims[placement.dim][0]
            for tensors, placements in (
                (signature.inputs, strategy.inputs),
                (signature.outputs, strategy.outputs),
            )
            for dims, placement in zip(tensors, placements, strict=True)
            if _cuts(placement) and dims is not None and dims[placement.dim]
        }
        for factor in cut:
            parts[factor] = parts.get(factor, 1) * size
    for factor, members in signature.merged.items():
        if any(member in parts for member in members):
            parts[factor] = prod(parts.get(member, 1) for member in members)
    return parts


def _cuts(placement: Placement) -> TypeGuard[Shard | Routed]:
    """Whether a rank holds a share of the dim; rows of all tokens are no share."""
    if isinstance(placement, Routed):
        return placement.form is not RoutedForm.EXPERTS
    return isinstance(placement, Shard)
