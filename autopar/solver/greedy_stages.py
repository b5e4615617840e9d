"""A first choice of cuts and options, and a bound of the slowest stage, in milliseconds.

For a slowest stage of T seconds, stage after stage takes as many blocks as it can run in T within
its memory (the cheapest recomputing that fits, by the best ratio of bytes to seconds). If the
blocks run out, T is possible; T is found by bisection. With *fractional* recomputing the least T is
a lower bound of the slowest stage, since taking more blocks never makes a stage faster or smaller;
with whole blocks it is a choice for CP-SAT to start from.

Source: ours; the exchange is the greedy solution of the linear multiple-choice knapsack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.solver.chain_sums import sums_of
from autopar.solver.stages_problem import (
    StageProblem,
    least_memory_bytes,
    memory_bytes,
)

BISECTIONS = 28
PRECISION = 1e-7  # of the bisection for a bound, relative
CHOICE_PRECISION = 1e-4  # likewise, for a choice
GROWTH = 0.02  # first step of the search for a time that is possible, relative
ROUNDING = 1e-9
NEEDED_PRECISION = 1e-2
FIT_TRIES = 4


class StageFiller:
    """Times of runs of blocks under the memory of a stage.

    Args:
        problem: The chain; where a rank has several stages each is given a share of the memory.
        fractional: Whether a part of a block may be recomputed (for bounds).
        by_leanest: How the stages of a rank share its memory.
        by_turns: Whether the stages of a rank count as at their most in turn, or all at once.
    """

    def __init__(
        self,
        problem: StageProblem,
        *,
        fractional: bool,
        by_leanest: bool = True,
        by_turns: bool = False,
    ) -> None:
        self.problem, self.fractional = problem, fractional
        self.flights = _mean_flights(problem) if by_turns else problem.in_flight
        sums = sums_of(problem.blocks)
        self.kind, self.menus = sums.kind, sums.menus
        self.start, self.steps = sums.start, sums.steps
        self.state, self.counts = sums.state, sums.counts
        self.fastest_s, self.saved = sums.time, sums.saved
        self._exchanges = [(self.counts[s.kind], s.seconds, s.bytes) for s in self.steps]
        pick = min if fractional else max
        self.transients = [pick(o.transient_bytes for o in menu) for menu in self.menus]
        self.limits = _shares(problem, self.flights, by_leanest=by_leanest)
        self._known: dict[tuple[int, int, int], float] = {}

    def time_s(self, low: int, high: int, stage: int) -> float:
        """Least seconds of a run of blocks in a stage, infinite if it doesn't fit."""
        key = (low, high, stage)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._time_s(low, high, stage)
        return found

    def _time_s(self, low: int, high: int, stage: int) -> float:
        time_s, flight = self.fastest_s[high] - self.fastest_s[low], self.flights[stage]
        room = self._room(low, high, stage)
        if room >= 0:
            return time_s
        for row, seconds, size in self._exchanges:
            count = row[high] - row[low]
            if not count:
                continue
            less = flight * size
            if room + count * less < 0:  # all of them, and it is not enough
                time_s += count * seconds
                room += count * less
                continue
            moved = self._moved(room, count, less)
            return time_s + moved * seconds
        return time_s if room >= -1 else math.inf

    def picks(self, low: int, high: int, stage: int) -> list[dict[int, float]]:
        """Per kind how many blocks of a run take each option, for that time."""
        found = [
            {at: float(row[high] - row[low])}
            for at, row in zip(self.start, self.counts, strict=True)
        ]
        room, flight = self._room(low, high, stage), self.flights[stage]
        for step in self.steps:
            count = self.counts[step.kind][high] - self.counts[step.kind][low]
            if room >= 0:
                break
            if count:
                # steps of a kind are taken in order, each one by all its blocks before the next
                moved = self._moved(room, count, flight * step.bytes)
                row = found[step.kind]
                row[step.source] -= moved
                row[step.option] = row.get(step.option, 0.0) + moved
                room += int(moved * flight * step.bytes)
        return found

    def _moved(self, room: int, count: int, less: int) -> float:
        """Blocks of a kind that take a step which gives each ``less`` bytes back."""
        wanted = -room / less
        return min(float(count), wanted if self.fractional else float(math.ceil(wanted)))

    def _room(self, low: int, high: int, stage: int) -> int:
        """Bytes that a run in a stage leaves if every block is as fast as it can be."""
        room = self.limits[stage] - (self.state[high] - self.state[low])
        if self.problem.virtual == 1:
            largest = 0
            for row, transient in zip(self.counts, self.transients, strict=True):
                if transient > largest and row[high] > row[low]:
                    largest = transient
            room -= largest
        return room - self.flights[stage] * (self.saved[high] - self.saved[low])

    def fill(self, slowest_s: float) -> list[int] | None:
        """Starts of stages 1, 2, ... if no stage needs more than ``slowest_s``."""
        n, stages = len(self.problem.blocks), self.problem.num_stages
        most = self.problem.most_blocks
        starts, at, guess = [], 0, n // stages
        for stage in range(stages):
            spare = stages - stage - 1  # the later stages need a block each
            last = min(n - spare, at + most)
            low = self._furthest(at, last, stage, slowest_s, guess)
            if low == at:
                return None
            guess = low - at
            at = low
            starts.append(at)
        return starts[:-1] if at == n else None

    def _furthest(self, at: int, last: int, stage: int, slowest_s: float, guess: int) -> int:
        """End of the longest run from ``at`` on that takes at most ``slowest_s``."""
        low, high = at, min(last, at + max(1, guess))
        step = 1
        while self.time_s(at, high, stage) <= slowest_s:
            low = high
            if high == last:
                return last
            high, step = min(last, high + step), 2 * step
        while high - low > 1:
            middle = max(low + 1, high - step) if high - low > 2 * step else (low + high) // 2
            if self.time_s(at, middle, stage) <= slowest_s:
                low = middle
            else:
                high, step = middle, 2 * step
        return low

    def slowest_s(self, starts: Sequence[int]) -> float:
        """Seconds of the slowest stage under given starts."""
        ends = [*starts, len(self.problem.blocks)]
        return max(self.time_s(a, b, s) for s, (a, b) in enumerate(pairwise((0, *ends))))


def _mean_flights(problem: StageProblem) -> tuple[int, ...]:
    """Micro-batches in flight by stage, lowered so that a rank's add up to its worst moment."""
    found = list(problem.in_flight)
    for device in range(problem.pp):
        stages = problem.stages_of(device)
        most = max(sum(n.before for n in moment.values()) for moment in problem.moments(device))
        total = sum(problem.in_flight[s] for s in stages)
        for s in stages:
            found[s] = -(-problem.in_flight[s] * most // total)
    return tuple(found)


def _shares(problem: StageProblem, flights: Sequence[int], *, by_leanest: bool) -> list[int]:
    """Memory of each stage: a rank's stages share it by what an average block of them holds.

    Args:
        problem: The chain.
        flights: Micro-batches in flight by stage.
        by_leanest: Whether saved values count as the leanest option has them, or the fastest.
    """
    sums = sums_of(problem.blocks)
    room = problem.limit_bytes - problem.base_bytes
    if problem.virtual > 1:  # stages of a rank run in turn: one transient serves them all
        room -= max(o.transient_bytes for menu in sums.menus for o in menu)
    state = sums.state[-1]
    pick = min if by_leanest else max
    counts = [row[-1] for row in sums.counts]
    rows = zip(counts, sums.menus, strict=True)
    saved = sum(count * pick(o.saved_bytes for o in menu) for count, menu in rows)
    weights = [state + flight * saved + 1 for flight in flights]
    return [
        room * weights[s] // sum(weights[other] for other in rank_stages)
        for s in range(problem.num_stages)
        for rank_stages in (problem.stages_of(problem.mesh.pipeline_rank(s)),)
    ]


def slowest_stage_bound_s(problem: StageProblem) -> float:
    """A lower bound of the slowest stage's seconds per micro-batch; infinite if nothing fits.

    For one stage per rank only; 0.0 otherwise.
    """
    if problem.virtual > 1:
        return 0.0
    filler = StageFiller(problem, fractional=True)
    return _bisect(filler)[0]


def first_choice(problem: StageProblem) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Starts and options of a feasible choice, or None if the greedy finds none."""
    if problem.virtual == 1 and not problem.together:
        return _filled(StageFiller(problem, fractional=False))
    for by_turns in (True, False):
        for by_leanest in (True, False):
            found = _fitted(problem, by_leanest=by_leanest, by_turns=by_turns)
            if found is not None:
                return found
    return None


def _fitted(
    problem: StageProblem, *, by_leanest: bool, by_turns: bool
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A choice whose ranks fit, under limits that are lowered by what they exceed.

    A rank's stages may hold unequal amounts at their worst moment, and values that are kept between
    the halves of a backward are not in the fillers' books.
    """
    limit = problem.limit_bytes
    for _ in range(FIT_TRIES):
        filler = StageFiller(
            replace(problem, limit_bytes=limit),
            fractional=False,
            by_leanest=by_leanest,
            by_turns=by_turns,
        )
        found = _filled(filler)
        if found is None:
            return None
        excess = max(memory_bytes(problem, *found)) - problem.limit_bytes
        if excess <= 0:
            return found
        limit -= excess
        if limit <= 0:
            return None
    return None


def _filled(filler: StageFiller) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Starts and options by the least slowest stage."""
    problem = filler.problem
    starts = _bisect(filler)[1]
    if starts is None:
        return None
    options = [0] * len(problem.blocks)
    ends = [*starts, len(problem.blocks)]
    low = 0
    for stage, high in enumerate(ends):
        picks = filler.picks(low, high, stage)
        left = [{o: round(c) for o, c in row.items()} for row in picks]
        for i in range(low, high):
            row = left[filler.kind[i]]
            option = max(o for o, c in row.items() if c > 0)
            row[option] -= 1
            options[i] = option
        low = high
    return tuple(starts), tuple(options)


def needed_bytes(problem: StageProblem) -> int:
    """What the fullest device needs in the leanest choice that the greedy finds."""
    sizes = [[o.saved_bytes for o in b.options] for b in problem.blocks]
    lean = tuple(row.index(min(row)) for row in sizes)
    if problem.fixed_starts is not None:
        return max(memory_bytes(problem, problem.fixed_starts, lean))
    low = high = least_memory_bytes(problem)
    if len(problem.blocks) < problem.num_stages:
        return high
    while first_choice(replace(problem, limit_bytes=high)) is None:
        low, high = high, 2 * high + 1
    while high - low > high * NEEDED_PRECISION:
        middle = (low + high) // 2
        if first_choice(replace(problem, limit_bytes=middle)) is None:
            low = middle
        else:
            high = middle
    return high


def _bisect(filler: StageFiller) -> tuple[float, list[int] | None]:
    problem = filler.problem
    high = sum(max(o.total_s for o in b.options) for b in problem.blocks)
    high *= 1 + ROUNDING  # sums in another order differ in the last digits
    best = filler.fill(high)
    if best is None:
        return math.inf, None
    low = sum(min(o.total_s for o in b.options) for b in problem.blocks) / problem.num_stages
    found = filler.fill(low)
    if found is not None:
        return low, found
    step_s = GROWTH * low
    precision = PRECISION if filler.fractional else CHOICE_PRECISION
    while low + step_s < high:  # the answer is near the mean as a rule
        found = filler.fill(low + step_s)
        if found is not None:
            high, best = low + step_s, found
            break
        low, step_s = low + step_s, 2 * step_s
    for _ in range(BISECTIONS):
        if high - low <= precision * high:
            break
        middle = (low + high) / 2
        found = filler.fill(middle)
        if found is None:
            low = middle
        else:
            high, best = min(middle, filler.slowest_s(found)), found
            if high <= low:
                break
    return (low if filler.fractional else high), best
