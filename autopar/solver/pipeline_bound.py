"""A lower bound of the simulated step over all cuts of a chain and all its recomputing.

For a step of T seconds, stage after stage takes as many blocks as a rank can run in T within its
memory; if the blocks do not run out, no cut is that fast. T is found by bisection. Taking as many
blocks as possible is right because a run that fits still fits without its first or last block, also
as a later stage. A rank of stage ``s`` with blocks ``[low, high)`` needs

    ``max(fill, gather) + M t + max(drain, reduce) + update``

where ``t`` is the run's least time within the memory (recomputing divides freely), ``fill`` the
forwards and messages of the stages before (it can't begin earlier), ``drain`` the backwards and
messages that follow. In 1F1B the last L ranks pass micro-batches around in a cycle: F of the first
of them, ..., F and B of the last, ..., B of the first, and only then F of the micro-batch L later.
A path over ``ceil(M / L)`` such cycles pays the messages each time:

    ``fill + drain + ceil(M / L) (time of their blocks + 2 (L - 1) c) + update``.

Where backwards may be run in halves there is no drain, and where warm-ups may be deeper there are
no such cycles. Where a rank has several stages the mean over ranks of work, memory and waiting is
bounded, not each cut.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from autopar.plan.types import ScheduleKind, StagePlacement
from autopar.solver.greedy_stages import exchange_steps
from autopar.solver.stages_problem import BlockMenu, StageProblem

PRECISION = 5e-4  # of the bisection, relative
MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What is known of a chain's least work beyond its blocks' menus.

    Attributes:
        total_s: Seconds per micro-batch of the whole chain, at least; 0.0 if nothing is known.
        unit_of: Per block its place in the unit that repeats along the chain, -1 if it has none;
            empty if nothing is known.
        unit_s: Seconds per micro-batch of one unit, at least; the first and the last one may be
            cheaper, since they have other neighbours.
    """

    total_s: float = 0.0
    unit_of: tuple[int, ...] = ()
    unit_s: float = 0.0


NO_FLOOR = Floor()
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class _States:
    """Sums of the first 0, 1, 2, ... blocks in one form of their states."""

    state: Sequence[int]
    gather: Sequence[float]
    reduce: Sequence[float]
    update: Sequence[float]

    @classmethod
    def of(cls, rows: Sequence[Sequence[BlockMenu]]) -> _States:
        """The least that each part can be where a block has one of several menus."""
        state = [min(b.state_bytes for b in row) for row in rows]
        gather, reduce, update = (
            [min(getattr(b, name) for b in row) for row in rows]
            for name in ("gather_s", "reduce_s", "update_s")
        )
        return cls(_prefix(state), _prefix(gather), _prefix(reduce), _prefix(update))


@dataclass(slots=True)
class PipelineBound:
    """Lower bounds of one chain on one pipeline.

    Args:
        problem: The chain; its menus may be relaxed ones, that are no real choice.
        floor: What is known beyond the menus.
        splits_backward: Whether backwards may be run in halves: ranks need not idle while the
            pipeline drains.
        has_cycles: Whether the order is plain 1F1B, with no other warm-up.
    """

    problem: StageProblem
    floor: Floor = NO_FLOOR
    splits_backward: bool = False
    has_cycles: bool = False
    _kind: list[int] = field(init=False)
    _counts: list[list[int]] = field(init=False)
    _least: list[float] = field(init=False)
    _forward: list[float] = field(init=False)
    _time: list[float] = field(init=False)
    _least_states: _States = field(init=False)
    _forms: list[_States] = field(init=False)
    _saved: list[int] = field(init=False)
    _unit: list[list[int]] = field(default_factory=list)
    _unit_ends: tuple[int, int] = (0, 0)
    _unit_gain_s: float = 0.0
    _steps: list[tuple[int, float, int]] = field(init=False)
    _transient: list[int] = field(init=False)
    _leanest: list[int] = field(init=False)
    _message_s: float = field(init=False)
    _ways: int = field(init=False)
    _fill_ways: int = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.problem.blocks
        kinds: dict[str, int] = {}
        self._kind = [kinds.setdefault(b.key, len(kinds)) for b in blocks]
        menus = [next(b.options for b in blocks if b.key == key) for key in kinds]
        start, steps = exchange_steps(menus)
        self._steps = [(s.kind, s.seconds, s.bytes) for s in steps]
        first = [menu[at] for menu, at in zip(menus, start, strict=True)]
        self._saved = [o.saved_bytes for o in first]
        self._leanest = [min(o.saved_bytes for o in menu) for menu in menus]
        self._transient = [min(o.transient_bytes for o in menu) for menu in menus]
        least = [o.total_s for o in first]
        ahead = [min(o.forward_s for o in menu) for menu in menus]
        self._least = least
        self._forward = _prefix([ahead[k] for k in self._kind])
        self._time = _prefix([least[k] for k in self._kind])
        self._forms = [_States.of([(b,) for b in menu]) for menu in self.problem.menus]
        self._least_states = self._forms[0]
        if len(self._forms) > 1:
            self._least_states = _States.of(list(zip(*self.problem.menus, strict=True)))
        self._counts = [_prefix([int(k == at) for k in self._kind]) for at in range(len(kinds))]
        self._set_unit([least[k] for k in self._kind])
        is_one_way = self.splits_backward or self.problem.schedule is ScheduleKind.FORWARD
        self._ways = 1 if is_one_way else 2
        self._fill_ways = 1 if self.splits_backward else self._ways
        self._message_s = min(self.problem.boundary_s, default=0.0)

    def _set_unit(self, least: Sequence[float]) -> None:
        places = self.floor.unit_of
        inside = [i for i, place in enumerate(places) if place >= 0]
        if not inside:
            return
        size = max(places) + 1
        known_s = sum(max(least[i] for i in inside if places[i] == at) for at in range(size))
        self._unit_gain_s = max(0.0, self.floor.unit_s - known_s)
        self._unit = [_prefix([int(place == at) for place in places]) for at in range(size)]
        self._unit_ends = (inside[0], inside[-1])

    # -- the answer ----------------------------------------------------------------------------
    def least_s(self) -> float:
        """Seconds of a step, at least; infinite if no cut fits."""
        low = self._simple_s()
        if math.isinf(low) or self.problem.virtual > 1 or self._is_possible(low):
            return low
        high = low
        for _ in range(MAX_DOUBLINGS):
            high *= 1.125
            if self._is_possible(high):
                break
            low = high
        else:
            return math.inf
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            if self._is_possible(middle):
                high = middle
            else:
                low = middle
        return low

    def may_beat(self, step_s: float) -> bool:
        """Whether a step of ``step_s`` is not excluded; cheaper than :meth:`least_s`."""
        return self._simple_s() <= step_s and (
            self.problem.virtual > 1 or self._is_possible(step_s)
        )

    # -- parts ---------------------------------------------------------------------------------
    def _whole_s(self) -> float:
        """Seconds of one micro-batch through the whole chain."""
        return max(self.floor.total_s, self._run_s(0, len(self.problem.blocks)))

    def _simple_s(self) -> float:
        """Bounds that know nothing of cuts."""
        problem, n = self.problem, len(self.problem.blocks)
        p, count = problem.pp, problem.num_microbatches
        extra_s = self._extra_of_all()
        if math.isinf(extra_s):
            return extra_s
        whole_s = self._whole_s() + extra_s
        update_s = self._least_states.update[n] / p
        path_s = self._forward[n] if self.splits_backward else whole_s
        hops = problem.num_stages - 1
        if problem.placement is StagePlacement.V:
            hops -= problem.virtual - 1  # the last stage of a round hands over on its own rank
        path_s += self._ways * self._message_s * hops
        if problem.virtual > 1:
            found = max(self._in_turns_s(whole_s), path_s) + update_s
            if len(self._forms) > 1:
                found = max(found, self._traded_s())
            return found
        if self.splits_backward:
            return max(count * whole_s / p, path_s) + update_s
        found = max(whole_s / (1.0 - (1.0 - 1.0 / count) ** p), path_s)
        if self.has_cycles:
            found = max(found, -(-count // p) * path_s)
        return found + update_s

    def _in_turns_s(self, whole_s: float) -> float:
        """The mean over ranks that have several stages each, and the rank with the most blocks.

        The first stages of the ranks before, which no rank can begin without, have the blocks that
        the other stages can't take.
        """
        problem, n = self.problem, len(self.problem.blocks)
        p, count, stages = problem.pp, problem.num_microbatches, problem.num_stages
        waits_s = 0.0
        for rank in range(1, p):
            first = max(rank, n - problem.most_blocks * (stages - rank))
            filled = self._forward if self.splits_backward else self._time
            waits_s += filled[first] + self._fill_ways * rank * self._message_s
        once_s = self._least_states.gather[n] + self._least_states.reduce[n]
        mean_s = (count * whole_s + max(waits_s, once_s)) / p
        largest_s = max(high - low for low, high in zip(self._time, self._time[1:], strict=False))
        most_s = max(
            -(-row[n] // p) * least for row, least in zip(self._counts, self._least, strict=True)
        )
        return max(mean_s, count * largest_s, count * most_s)

    def _run_s(self, low: int, high: int) -> float:
        """Seconds of a run of blocks with memory to spare."""
        time_s = self._time[high] - self._time[low]
        if self._unit_gain_s:
            units = min([row[high] - row[low] for row in self._unit])
            first, last = self._unit_ends
            units -= (low <= first < high) + (low <= last < high)
            if units > 0:
                time_s += self._unit_gain_s * units
        return time_s

    def _extra_s(self, low: int, high: int, room: float, flight: float) -> float:
        """Seconds of recomputing that a run needs to fit into ``room``; infinite if it can't."""
        counts = [row[high] - row[low] for row in self._counts]
        largest = 0
        for count, saved, transient in zip(counts, self._saved, self._transient, strict=True):
            if count:
                room -= flight * count * saved
                largest = max(largest, transient)
        room -= largest
        extra_s = 0.0
        for kind, seconds, less in self._steps:
            if room >= 0:
                return extra_s
            if counts[kind] and flight > 0:
                moved = min(float(counts[kind]), -room / (flight * less))
                extra_s += moved * seconds
                room += moved * flight * less
        return extra_s if room >= -1.0 else math.inf

    def _extra_of_all(self) -> float:
        """The same for all ranks together, as if they shared their memory."""
        problem, n = self.problem, len(self.problem.blocks)
        room = problem.pp * (problem.limit_bytes - problem.base_bytes)
        room -= self._least_states.state[n]
        flights = [self._flights(device) for device in range(problem.pp)]
        if problem.virtual > 1 and not self._has_room(flights):
            return math.inf
        return self._extra_s(0, n, room, min(map(min, flights)))

    def _traded_s(self) -> float:
        """The mean over ranks of all work, where memory is made by leaner forms or by recomputing.

        Ranks share their memory, and every block has a form of its own.
        """
        problem, n = self.problem, len(self.problem.blocks)
        flight = min(min(self._flights(device)) for device in range(problem.pp))
        room = float(problem.pp * (problem.limit_bytes - problem.base_bytes))
        room -= max(self._transient)
        total_s = problem.num_microbatches * self._whole_s()
        steps: list[tuple[float, float, float]] = []  # seconds per byte, bytes, seconds
        for kind, row in enumerate(self._counts):
            count = row[n]
            room -= count * flight * self._saved[kind]
            first = self._kind.index(kind)
            points = sorted((m[first].step_s, m[first].state_bytes) for m in problem.menus)
            once_s, state = points[0]
            total_s += count * once_s
            room -= float(count * state)
            for slope, time_s, less in _slopes(points):
                steps.append((slope, float(count * less), count * time_s))
        for kind, seconds, less in self._steps if flight > 0 else ():
            count = self._counts[kind][n]
            time_s = problem.num_microbatches * seconds
            steps.append((time_s / (flight * less), count * flight * less, count * time_s))
        for _, size, time_s in sorted(steps):
            if room >= 0:
                break
            total_s += time_s * min(1.0, -room / size)
            room += size
        return total_s / problem.pp if room >= -1.0 else math.inf

    def _flights(self, device: int) -> list[float]:
        """Micro-batches in flight in each stage of a rank, on average over its worst moments.

        One of the moments holds at least the mean of them.
        """
        moments = self.problem.moments(device)
        return [
            sum(moment[s].before for moment in moments if s in moment) / len(moments)
            for s in self.problem.stages_of(device)
        ]

    def _flight(self, stage: int) -> int:
        """Micro-batches before their backward in the only stage of a rank, at its worst moment."""
        return max(moment[stage].before for moment in self.problem.moments(stage))

    def _has_room(self, flights: Sequence[Sequence[float]]) -> bool:
        """Whether the ranks can hold all blocks of repeated kinds at their leanest.

        Every block counts as the leanest of them; a rank takes as many as it can where the fewest
        micro-batches are in flight.
        """
        problem = self.problem
        repeated = {k for k, row in enumerate(self._counts) if row[-1] > 1}
        if not repeated:
            return True
        leanest = min(self._leanest[k] for k in repeated)
        state = min(b.state_bytes for menu in problem.menus
                    for b, k in zip(menu, self._kind, strict=True) if k in repeated)  # fmt: skip
        wanted = float(sum(self._counts[k][-1] for k in repeated))
        for row in flights:
            room = float(problem.limit_bytes - problem.base_bytes)
            for flight in sorted(row):
                each = flight * leanest + state
                taken = min(float(problem.most_blocks), room / each if each > 0 else math.inf)
                wanted -= taken
                room -= taken * each
        return wanted <= 0

    def _fits(self, low: int, high: int, stage: int, step_s: float) -> bool:
        """Whether a rank can run ``[low, high)`` as this stage in a step of ``step_s``."""
        problem, count = self.problem, self.problem.num_microbatches
        before_s = self._forward[low]
        after_s = 0.0 if self.splits_backward else self._time[low] - before_s
        fill_s = before_s + after_s + self._fill_ways * stage * self._message_s
        body_s = count * self._run_s(low, high)
        least_update_s = self._least_states.update[-1] / problem.pp
        if fill_s + least_update_s + body_s > step_s:
            return False
        flight = self._flight(stage)
        for form in self._forms:
            gather_s = form.gather[high] - form.gather[low]
            reduce_s = form.reduce[high] - form.reduce[low]
            around_s = max(fill_s, max(gather_s, before_s) + max(reduce_s, after_s))
            update_s = max(form.update[high] - form.update[low], least_update_s)
            time_s = around_s + update_s + body_s
            if time_s > step_s:
                continue
            room = problem.limit_bytes - problem.base_bytes - (form.state[high] - form.state[low])
            if time_s + count * self._extra_s(low, high, room, flight) <= step_s:
                return True
        return False

    def _is_possible(self, step_s: float) -> bool:
        """Whether stages that take as many blocks as they can take them all."""
        problem, n = self.problem, len(self.problem.blocks)
        p = problem.pp
        at, length = 0, max(1, n // p)
        for stage in range(p):
            if self.has_cycles and not self._passes_around(at, stage, step_s):
                return False
            high = self._furthest(at, stage, step_s, length)
            length = max(1, high - at)
            at = high
            if at >= n:
                return True
        return False

    def _passes_around(self, at: int, stage: int, step_s: float) -> bool:
        """Whether the ranks from ``stage`` on can pass what is left around in time."""
        problem, n = self.problem, len(self.problem.blocks)
        ranks = problem.pp - stage
        rounds = -(-problem.num_microbatches // ranks)
        cycle_s = self._run_s(at, n) + self._ways * (ranks - 1) * self._message_s
        around_s = self._time[at] + self._ways * stage * self._message_s
        return around_s + rounds * cycle_s + self._least_states.update[n] / problem.pp <= step_s

    def _furthest(self, at: int, stage: int, step_s: float, guess: int) -> int:
        """End of the longest run from ``at`` on that fits."""
        n = len(self.problem.blocks)
        low, high = at, min(n, at + guess)
        while high > low and self._fits(at, high, stage, step_s):
            low, high = high, min(n, high + max(1, (high - at) // 4))
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(at, middle, stage, step_s):
                low = middle
            else:
                high = middle
        return low


def _slopes(points: Sequence[tuple[float, int]]) -> Iterator[tuple[float, float, int]]:
    """From the fastest of some forms to leaner ones along their hull.

    Args:
        points: Seconds and bytes, the fastest first.

    Yields:
        Seconds per byte, seconds and bytes of each step.
    """
    at_s, at = points[0]
    while True:
        steps = [(s - at_s, at - size) for s, size in points if size < at]
        leaner = [(time_s / less, time_s, less) for time_s, less in steps]
        if not leaner:
            return
        step = min(leaner, key=lambda row: (row[0], -row[2]))
        yield step
        at_s, at = at_s + step[1], at - step[2]


def _prefix(values: Sequence[Number]) -> list[Number]:
    """Sums of the first 0, 1, 2, ... values."""
    return list(accumulate(values, initial=values[0] - values[0]))
