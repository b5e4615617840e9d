"""Which shapes near a plan are worked out, and in which order: by closed forms of their steps.

Shapes near a plan have the same work in a micro-batch. What differs is how even the cuts of its
blocks can be, and how long ranks are idle: a closed form tells that in microseconds. How far it is
from the estimate is learned from the shapes that were worked out: in one order of steps that
differs little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite, log
from operator import sub

from autopar.plan.types import ScheduleKind
from autopar.solver.analysis import Analysis
from autopar.solver.candidates import Shape
from autopar.solver.ranked import Ranked
from autopar.solver.work import Work

NUM_DATA_RANKS = 8  # numbers of data ranks that are looked at
NUM_IN_VAIN = 3  # shapes in an order that is not the best, or does not fit
FAR = 1.03  # times the best estimate: what is likely to take more is not worked out
NUM_HALVED = 24  # times that an interval of seconds is halved


@dataclass(slots=True)
class Tried:
    """What was worked out so far, and what that says of the rest.

    Attributes:
        num: Shapes that were worked out.
        best_s: The best estimate.
        in_vain: Per order of a step, how often a shape was no better than what is known, or did
            not fit.
        rates: Per order, the least share of an estimate by the guess.
    """

    num: int = 0
    best_s: float = inf
    in_vain: Counter[tuple[ScheduleKind, int]] = field(default_factory=Counter)
    rates: dict[tuple[ScheduleKind, int], float] = field(default_factory=dict)

    def is_vain(self, shape: Shape, guess_s: float) -> bool:
        """Whether shapes in this order were in vain, or an estimate in line with them would be."""
        order = order_of_step(shape)
        likely_s = self.rates.get(order, 0.0) * guess_s
        return self.in_vain[order] >= NUM_IN_VAIN or likely_s > FAR * self.best_s

    def learn(
        self, shape: Shape, guess_s: float, found: Ranked | None, fitted: Ranked | None
    ) -> None:
        """Take note of what came out, and of that with all bytes counted."""
        order = order_of_step(shape)
        self.num += 1
        if found is not None:
            rate = found.estimate_s / guess_s
            self.rates[order] = min(rate, self.rates.get(order, inf))
        is_plain = shape.mesh.virtual == 1 and not shape.schedule.splits_backward
        if fitted is not None and fitted.estimate_s < self.best_s:
            self.best_s = fitted.estimate_s
        elif fitted is not None or (isfinite(self.best_s) and not is_plain):
            self.in_vain[order] += 1  # no order holds less than the plain one, which may fit later


def order_of_step(shape: Shape) -> tuple[ScheduleKind, int]:
    """The order of a shape's steps, whatever its mesh."""
    return (shape.schedule, shape.mesh.virtual)


def promising(guesses: Mapping[Shape, float], old_dp: int, alike: float) -> Iterator[Shape]:
    """Shapes that are worth working out, those first that are likely to be good.

    Of each number of data ranks as many pipeline ranks as can be: with blocks as they are, a few
    more change little but the memory that is left. Of those the best few, those most like the old
    plan first: where that fits, they fit.

    Args:
        guesses: Seconds of all shapes.
        old_dp: Data ranks of the old plan.
        alike: Times the least guess: so much more is no harm.
    """
    pairs: dict[int, dict[int, float]] = {}
    for shape, guess_s in guesses.items():
        own = pairs.setdefault(shape.mesh.dp, {})
        own[shape.mesh.pp] = min(guess_s, own.get(shape.mesh.pp, inf))
    least = {dp: min(own.values()) for dp, own in pairs.items()}
    chosen = sorted(least, key=lambda dp: (least[dp], dp))[:NUM_DATA_RANKS]
    for dp in sorted(chosen, key=lambda dp: (abs(log(dp / old_dp)), dp)):
        pp = max(p for p, guess_s in pairs[dp].items() if guess_s <= alike * least[dp])
        found = [s for s in guesses if (s.mesh.pp, s.mesh.dp) == (pp, dp)]
        yield from sorted(found, key=lambda s: (guesses[s], str(s)))


def siblings(best: Shape | None, guesses: Mapping[Shape, float]) -> list[Shape]:
    """Shapes with other numbers of pipeline ranks than the best one alone, most promising first."""
    if best is None:
        return []
    mesh = best.mesh
    found = [
        s
        for s in guesses
        if (s.mesh.dp, order_of_step(s)) == (mesh.dp, order_of_step(best)) and s != best
    ]
    return sorted(found, key=lambda s: (guesses[s], str(s)))


def guesses_s(analysis: Analysis, near: Sequence[Shape]) -> dict[Shape, float]:
    """Seconds that shapes may take, whatever they hold."""
    bodies = Work.of(analysis).bodies
    sums: dict[int, list[float]] = {}
    longest: dict[tuple[int, int], float] = {}
    found: dict[Shape, float] = {}
    for shape in near:
        body, stages = bodies.body(shape.sizes), shape.mesh.num_stages
        key = (id(body), stages)
        if key[0] not in sums:
            times = (min(o.total_s for o in b.options) for b in body.least)
            sums[key[0]] = list(accumulate(times, initial=0.0))
        if key not in longest:
            longest[key] = least_longest_s(sums[key[0]], stages)
        found[shape] = guess_s(shape, sums[key[0]][-1], longest[key])
    return found


def guess_s(shape: Shape, total_s: float, longest_s: float) -> float:
    """Seconds of a step with the idle share of its order, by the closed form.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", 2021, section 2.2; a third of it where backwards are run in halves, since what
    fills it is left.

    Args:
        shape: The shape.
        total_s: Of a micro-batch through all stages.
        longest_s: Of it in the longest stage.
    """
    mesh = shape.mesh
    idle_s = total_s * (mesh.pp - 1) / mesh.num_stages
    if shape.schedule.splits_backward:
        idle_s /= 3
    return shape.num_microbatches * mesh.virtual * longest_s + idle_s


def least_longest_s(sums: Sequence[float], stages: int) -> float:
    """The least seconds of the longest of some runs of blocks, one of each block at least.

    Args:
        sums: Of the first 0, 1, 2, ... blocks.
        stages: Runs, at most.
    """
    low = max(sums[-1] / stages, max(map(sub, sums[1:], sums)))
    high = low + sums[-1] / stages
    for _ in range(NUM_HALVED):
        middle = (low + high) / 2
        low, high = (low, middle) if _are_enough(sums, stages, middle) else (middle, high)
    return float(high)


def _are_enough(sums: Sequence[float], stages: int, most_s: float) -> bool:
    """Whether so many runs of no more seconds hold all blocks."""
    at, last = 0, len(sums) - 1
    for _ in range(stages):
        at = bisect_right(sums, sums[at] + most_s) - 1
        if at == last:
            return True
    return False
