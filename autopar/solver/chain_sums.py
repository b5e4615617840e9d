"""Sums over a chain of blocks, made once for all problems that have it.

Shapes with the same splits and parameters share their blocks, and a deep model has thousands of
them: sums of the first 0, 1, 2, ... blocks belong to the chain, not to the shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from autopar.solver.stages_problem import BlockMenu, Option

Number = TypeVar("Number", int, float)


class Chain(tuple[BlockMenu, ...]):
    """Blocks in forward order that keep their sums."""

    @cached_property
    def sums(self) -> ChainSums:
        """Their sums."""
        return ChainSums(self)


def sums_of(blocks: Sequence[BlockMenu]) -> ChainSums:
    """The sums of blocks; kept if these are a :class:`Chain`."""
    return blocks.sums if isinstance(blocks, Chain) else ChainSums(blocks)


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """A leaner way to run one block of a kind: ``bytes`` less for ``seconds`` more."""

    kind: int
    source: int
    option: int
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Units:
    """Where the unit that repeats along a chain stands.

    Attributes:
        counts: Per place in the unit, how many of the first blocks stand there.
        ends: First and last block of the part that repeats.
        least_s: Least seconds of the blocks of a unit, each place at its dearest.
    """

    counts: tuple[list[int], ...]
    ends: tuple[int, int]
    least_s: float


class ChainSums:
    """Kinds of blocks, and sums of the first 0, 1, 2, ... blocks; each made when it is asked for.

    Args:
        blocks: In forward order.

    Attributes:
        kind: Per block the number of its kind.
        menus: Per kind its options.
        start: Per kind its fastest option.
        steps: Exchanges to leaner options, cheapest per byte first.
        busiest: What is known of the busiest of some ranks that share the chain, by whoever asks.
    """

    def __init__(self, blocks: Sequence[BlockMenu]) -> None:
        self._blocks = tuple(blocks)  # not the chain itself, which keeps these sums
        kinds: dict[str, int] = {}
        self.kind = [kinds.setdefault(b.key, len(kinds)) for b in blocks]
        self.first = [0] * len(kinds)
        for at in range(len(self.kind) - 1, -1, -1):
            self.first[self.kind[at]] = at
        self.menus = [self._blocks[at].options for at in self.first]
        self.start, self.steps = exchange_steps(self.menus)
        self.busiest: dict[object, float] = {}
        self._units: dict[int, tuple[tuple[int, ...], Units | None]] = {}

    @cached_property
    def counts(self) -> list[list[int]]:
        """Per kind, how many of the first blocks are of it."""
        return [prefix([int(k == at) for k in self.kind]) for at in range(len(self.menus))]

    @cached_property
    def fastest(self) -> list[Option]:
        """Per kind its fastest option."""
        return [menu[at] for menu, at in zip(self.menus, self.start, strict=True)]

    @cached_property
    def least_saved(self) -> list[int]:
        """Per kind the fewest bytes that an option keeps."""
        return [min(o.saved_bytes for o in menu) for menu in self.menus]

    @cached_property
    def least_transient(self) -> list[int]:
        """Per kind the smallest transient of an option."""
        return [min(o.transient_bytes for o in menu) for menu in self.menus]

    @cached_property
    def time(self) -> list[float]:
        """Least seconds."""
        return self._by_kind([o.total_s for o in self.fastest])

    @cached_property
    def forward(self) -> list[float]:
        """Least seconds of forward."""
        return self._by_kind([min(o.forward_s for o in menu) for menu in self.menus])

    @cached_property
    def saved(self) -> list[int]:
        """Bytes that the fastest options keep."""
        return self._by_kind([o.saved_bytes for o in self.fastest])

    @cached_property
    def state(self) -> list[int]:
        """Bytes of parameters, gradients and optimizer state."""
        return prefix([b.state_bytes for b in self._blocks])

    @cached_property
    def gather(self) -> list[float]:
        """Seconds of gathering parameters."""
        return prefix([b.gather_s for b in self._blocks])

    @cached_property
    def reduce(self) -> list[float]:
        """Seconds of reducing gradients."""
        return prefix([b.reduce_s for b in self._blocks])

    @cached_property
    def update(self) -> list[float]:
        """Seconds of the optimizer."""
        return prefix([b.update_s for b in self._blocks])

    @cached_property
    def least_state_of_repeats(self) -> int:
        """Least state of a block whose kind there is more than once; 0 if there is none."""
        repeats = [counts[-1] > 1 for counts in self.counts]
        states = (b.state_bytes for b, k in zip(self._blocks, self.kind, strict=True) if repeats[k])
        return min(states, default=0)

    def units(self, unit_of: tuple[int, ...]) -> Units | None:
        """Where the repeating unit stands; None if no block is in one.

        Args:
            unit_of: Per block its place in the unit, -1 if it has none.
        """
        known = self._units.get(id(unit_of))
        if known is None:
            known = self._units[id(unit_of)] = (unit_of, self._find_units(unit_of))
        return known[1]

    def _find_units(self, unit_of: tuple[int, ...]) -> Units | None:
        inside = [i for i, place in enumerate(unit_of) if place >= 0]
        if not inside:
            return None
        fastest = [o.total_s for o in self.fastest]
        dearest = [0.0] * (max(unit_of) + 1)
        for i in inside:
            place = unit_of[i]
            dearest[place] = max(dearest[place], fastest[self.kind[i]])
        counts = tuple(
            prefix([int(place == at) for place in unit_of]) for at in range(len(dearest))
        )
        return Units(counts, (inside[0], inside[-1]), sum(dearest))

    def _by_kind(self, values: Sequence[Number]) -> list[Number]:
        return prefix([values[k] for k in self.kind])


def prefix(values: Sequence[Number]) -> list[Number]:
    """Sums of the first 0, 1, 2, ... values.

    >>> prefix([2, 3])
    [0, 2, 5]
    """
    return list(accumulate(values, initial=values[0] - values[0]))


def exchange_steps(menus: Iterable[tuple[Option, ...]]) -> tuple[list[int], list[ExchangeStep]]:
    """Per kind its fastest option, and the steps to leaner ones, cheapest per byte first."""
    start: list[int] = []
    steps: list[tuple[float, ExchangeStep]] = []
    for kind, menu in enumerate(menus):
        order = sorted(range(len(menu)), key=lambda o: (menu[o].total_s, menu[o].saved_bytes))
        at = order[0]
        start.append(at)
        while True:
            best: tuple[float, int] | None = None
            for o in order:
                saved = menu[at].saved_bytes - menu[o].saved_bytes
                if saved > 0:
                    ratio = (menu[o].total_s - menu[at].total_s) / saved
                    best = min(best or (ratio, o), (ratio, o))
            if best is None:
                break
            ratio, o = best
            seconds = menu[o].total_s - menu[at].total_s
            less = menu[at].saved_bytes - menu[o].saved_bytes
            steps.append((ratio, ExchangeStep(kind, at, o, seconds, less)))
            at = o
    steps.sort(key=lambda pair: (pair[0], pair[1].kind, pair[1].option))
    return start, [step for _, step in steps]
