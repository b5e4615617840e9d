"""The least seconds of the busiest rank, where each runs whole blocks.

The mean over ranks deals blocks in parts: 163 blocks to 64 ranks are 2.5 each, though some rank has
three. A rank's *share* is how many blocks of each kind it runs. For T seconds, shares of at most T
are columns of a linear program that covers all blocks with as few ranks as can be; if that takes
more ranks than there are, some rank takes more than T. The largest such T is found by bisection.

A rank has as many runs of neighbouring blocks as it has stages. Kinds that stand in turn along the
chain (attention, feed-forward, attention, ...) differ by at most one in a run. What a whole unit of
them is known to take beyond its blocks counts for every unit that must be in a run: runs of L
blocks in all have ``(L - runs (u - 1)) / u`` units of u blocks or more. Units at the two ends of
the part that repeats may be cheaper.

Source: ours; the covering program is that of Gilmore and Gomory, "A linear programming approach to
the cutting-stock problem", 1961, with all columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]  # has no stubs

PRECISION = 1e-3  # of the bisection, relative
RESOLUTION = 1e-4  # of the largest block's seconds: chains are alike up to this
KEPT = 4_096  # answers
SLACK = 1e-6  # ranks that the solver may be off by
MAX_SHARES = 4_000  # work limit: a chain with more has the mean as its bound
LIGHT = 0.1  # of a mean block's seconds
ENDS = 2  # ranks that may have a cheaper unit, and such units of one of them

Share = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBlocks:
    """Blocks of a chain by kind.

    Attributes:
        counts: Blocks of each kind, one at least.
        seconds: Of a block of each kind per micro-batch, at least.
        unit: So many kinds, the first ones, stand in turn along the chain; 0 if none do.
        runs: Runs of neighbouring blocks that a rank has, at most.
        gain_s: Seconds of a unit beyond those of its blocks, at least.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    unit: int = 0
    runs: int = 1
    gain_s: float = 0.0

    def least_busiest_s(self, ranks: int) -> float:
        """Seconds per micro-batch of the rank that has most, at least.

        Args:
            ranks: How many ranks share the blocks.
        """
        unit_s = max(self.seconds)
        if unit_s <= 0:
            return 0.0
        # shapes of other batches have the same blocks at another scale: such a chain is solved once
        scaled = replace(
            self,
            seconds=tuple(_rounded_down(t / unit_s) for t in self.seconds),
            gain_s=_rounded_down(self.gain_s / unit_s),
        )
        return unit_s * _least_busiest_s(scaled, ranks)

    def _bisected_s(self, ranks: int) -> float:
        mean_s = sum(n * t for n, t in zip(self.counts, self.seconds, strict=True)) / ranks
        low, high = mean_s, 2.0 * mean_s + max(self.seconds)
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            suffices = self._suffices(ranks, middle)
            if suffices is None:
                return mean_s
            if suffices:
                high = middle
            else:
                low = middle
        return low

    def time_s(self, share: Share, cheaper: int = 0) -> float:
        """Seconds of a share, at least.

        Args:
            share: Blocks of each kind.
            cheaper: Units that may be without gain.
        """
        inside = sum(share[: self.unit]) - self.runs * (self.unit - 1)
        units = max(0, -(-inside // self.unit) - cheaper) if self.unit else 0
        return sum(n * t for n, t in zip(share, self.seconds, strict=True)) + units * self.gain_s

    def _suffices(self, ranks: int, limit_s: float) -> bool | None:
        """Whether shares of at most so many seconds may do; None if there are too many to tell."""
        plain = self._shares(limit_s, 0)
        cheap = self._shares(limit_s, ENDS) if self.gain_s else set()
        if plain is None or cheap is None:
            return None
        solver = pywraplp.Solver.CreateSolver("GLOP")
        infinity = solver.infinity()
        rows = [solver.Constraint(float(n), infinity) for n in self.counts]
        ends = solver.Constraint(-infinity, float(ENDS))
        objective = solver.Objective()
        objective.SetMinimization()
        for shares, is_end in ((plain, False), (cheap - plain, True)):
            for share in sorted(self._largest(shares)):
                variable = solver.NumVar(0.0, infinity, "")
                objective.SetCoefficient(variable, 1.0)
                for row, n in zip(rows, share, strict=True):
                    if n:
                        row.SetCoefficient(variable, float(n))
                if is_end:
                    ends.SetCoefficient(variable, 1.0)
        status = solver.Solve()
        if status == pywraplp.Solver.OPTIMAL:
            return bool(objective.Value() <= ranks + SLACK)
        return False if status == pywraplp.Solver.INFEASIBLE else None

    def _shares(self, limit_s: float, cheaper: int) -> set[Share] | None:
        found: set[Share] = set()
        for share in self._within(limit_s, ()):
            if self.time_s(share, cheaper) <= limit_s:
                found.add(share)
            if len(found) > MAX_SHARES:
                return None
        return found

    def _within(self, limit_s: float, begun: Share) -> Iterator[Share]:
        """Shares whose blocks alone take at most so many seconds."""
        at = len(begun)
        if at == len(self.counts):
            yield begun
            return
        most = self.counts[at]
        if self.seconds[at] > 0:
            most = min(most, int(limit_s / self.seconds[at]))
        low, high = 0, most
        if 0 < at < self.unit:
            low = max(low, max(begun) - self.runs)
            high = min(high, min(begun) + self.runs)
        for n in range(low, high + 1):
            yield from self._within(limit_s - n * self.seconds[at], (*begun, n))

    @staticmethod
    def _largest(shares: set[Share]) -> list[Share]:
        """Without those that one more block would still leave a share."""
        return [
            share
            for share in shares
            if not any((*share[:k], n + 1, *share[k + 1 :]) in shares for k, n in enumerate(share))
        ]


def _rounded_down(ratio: float) -> float:
    """To few digits; less work has a lower bound."""
    return math.floor(ratio / RESOLUTION) * RESOLUTION


@lru_cache(maxsize=KEPT)
def _least_busiest_s(whole: WholeBlocks, ranks: int) -> float:
    """See :meth:`WholeBlocks.least_busiest_s`; the last ones are kept."""
    return whole._bisected_s(ranks)


def whole_blocks(
    kinds: Sequence[int], seconds: Sequence[float], unit_of: Sequence[int], runs: int, gain_s: float
) -> WholeBlocks:
    """The blocks of a chain whose blocks at the same place of its repeating unit are taken as one.

    Args:
        kinds: By block.
        seconds: By kind.
        unit_of: By block its place in the repeating unit, -1 outside; empty if there is none.
        runs: Runs of neighbouring blocks that a rank has, at most.
        gain_s: As in :class:`WholeBlocks`.
    """
    unit = max(unit_of, default=-1) + 1
    counts, least = [0] * unit, [float("inf")] * unit
    rest: dict[int, int] = {}
    for at, kind in enumerate(kinds):
        place = unit_of[at] if unit_of else -1
        if place >= 0:
            counts[place] += 1
            least[place] = min(least[place], seconds[kind])
        else:
            rest[kind] = rest.get(kind, 0) + 1
    mean_s = sum(n * t for n, t in zip(counts, least, strict=True)) / max(1, len(kinds))
    heavy = [k for k in rest if seconds[k] > LIGHT * mean_s]  # what is light only blurs
    return WholeBlocks(
        counts=(*counts, *(rest[k] for k in heavy)),
        seconds=(*least, *(seconds[k] for k in heavy)),
        unit=unit,
        runs=runs,
        gain_s=gain_s,
    )
