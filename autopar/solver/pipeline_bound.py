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
bounded, not each cut; where it has few blocks, also the work of the busiest
(:mod:`autopar.solver.whole_blocks`).

Source: ours.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.plan.types import ScheduleKind, StagePlacement
from autopar.solver.chain_sums import ChainSums, Units, sums_of
from autopar.solver.stages_problem import StageProblem
from autopar.solver.state_forms import least_of
from autopar.solver.whole_blocks import whole_blocks

PRECISION = 5e-4  # of the bisection, relative
MAX_DOUBLINGS = 60
MOST_EACH = 32  # blocks of a rank: more of them are hardly less even than parts would be


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
    _sums: ChainSums = field(init=False)
    _forms: list[ChainSums] = field(init=False)
    _least: ChainSums = field(init=False)
    _units: Units | None = field(init=False, default=None)
    _unit_gain_s: float = field(init=False, default=0.0)
    _simple: float | None = field(init=False, default=None)
    _message_s: float = field(init=False)
    _ways: int = field(init=False)
    _fill_ways: int = field(init=False)

    def __post_init__(self) -> None:
        self._sums = sums_of(self.problem.blocks)
        self._forms = [sums_of(menus) for menus in self.problem.menus]
        self._least = sums_of(least_of(self.problem))  # of states, whatever their form
        if self.floor.unit_of:
            self._units = self._sums.units(self.floor.unit_of)
        if self._units is not None:
            self._unit_gain_s = max(0.0, self.floor.unit_s - self._units.least_s)
        is_one_way = self.splits_backward or self.problem.schedule is ScheduleKind.FORWARD
        self._ways = 1 if is_one_way else 2
        self._fill_ways = 1 if self.splits_backward else self._ways
        self._message_s = min(self.problem.boundary_s, default=0.0)

    # -- the answer ----------------------------------------------------------------------------
    def least_s(self) -> float:
        """Seconds of a step, at least; infinite if no cut fits."""
        low = self._simple_s()
        if math.isinf(low) or self.problem.virtual > 1 or self._is_possible(low):
            return low
        if not self._is_possible(sys.float_info.max):  # memory is short, however long it takes
            return math.inf
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
        if self._simple is None:
            self._simple = self._find_simple_s()
        return self._simple

    def _find_simple_s(self) -> float:
        problem, n = self.problem, len(self.problem.blocks)
        p, count = problem.pp, problem.num_microbatches
        extra_s = self._extra_of_all()
        if math.isinf(extra_s):
            return extra_s
        whole_s = self._whole_s() + extra_s
        update_s = self._least.update[n] / p
        path_s = self._sums.forward[n] if self.splits_backward else whole_s
        hops = problem.num_stages - 1
        if problem.placement is StagePlacement.V:
            hops -= problem.virtual - 1  # the last stage of a round hands over on its own rank
        path_s += self._ways * self._message_s * hops
        if problem.virtual > 1:
            found = max(self._in_turns_s(whole_s), path_s) + update_s
            return max(found, self._traded_s()) if len(self._forms) > 1 else found
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
            filled = self._sums.forward if self.splits_backward else self._sums.time
            waits_s += filled[first] + self._fill_ways * rank * self._message_s
        once_s = self._least.gather[n] + self._least.reduce[n]
        mean_s = (count * whole_s + max(waits_s, once_s)) / p
        fastest = [o.total_s for o in self._sums.fastest]
        rows = zip(self._sums.counts, fastest, strict=True)
        most_s = max(-(-row[n] // p) * least_s for row, least_s in rows)
        largest_s = max(fastest)
        return max(mean_s, count * largest_s, count * most_s, count * self._busiest_s())

    def _busiest_s(self) -> float:
        """Seconds per micro-batch of the rank with the most work, if blocks are whole, at least.

        It is worked out late, once the floor is known.
        """
        problem, sums = self.problem, self._sums
        if not self.floor.total_s or len(problem.blocks) > MOST_EACH * problem.pp:
            return 0.0
        key = (problem.pp, problem.virtual, self.floor.unit_of, self._unit_gain_s)
        if key not in sums.busiest:
            fastest = [o.total_s for o in sums.fastest]
            whole = whole_blocks(
                sums.kind, fastest, self.floor.unit_of, problem.virtual, self._unit_gain_s
            )
            sums.busiest[key] = whole.least_busiest_s(problem.pp)
        return sums.busiest[key]

    def _run_s(self, low: int, high: int) -> float:
        """Seconds of a run of blocks with memory to spare."""
        time_s = self._sums.time[high] - self._sums.time[low]
        if self._units is not None and self._unit_gain_s:
            units = min([row[high] - row[low] for row in self._units.counts])
            first, last = self._units.ends
            units -= (low <= first < high) + (low <= last < high)
            if units > 0:
                time_s += self._unit_gain_s * units
        return time_s

    def _extra_s(self, low: int, high: int, room: float, flight: float) -> float:
        """Seconds of recomputing that a run needs to fit into ``room``; infinite if it can't."""
        sums = self._sums
        counts = [row[high] - row[low] for row in sums.counts]
        room -= flight * (sums.saved[high] - sums.saved[low])
        room -= max([t for n, t in zip(counts, sums.least_transient, strict=True) if n], default=0)
        extra_s = 0.0
        for step in sums.steps if flight > 0 else ():
            if room >= 0:
                return extra_s
            if counts[step.kind]:
                less = flight * step.bytes
                moved = min(float(counts[step.kind]), -room / less)
                extra_s += moved * step.seconds
                room += moved * less
        return extra_s if room >= -1.0 else math.inf

    def _extra_of_all(self) -> float:
        """The same for all ranks together, as if they shared their memory."""
        problem, n = self.problem, len(self.problem.blocks)
        room = problem.pp * (problem.limit_bytes - problem.base_bytes) - self._least.state[n]
        flights = [self._flights(device) for device in range(problem.pp)]
        if problem.virtual > 1 and not self._has_room(flights):
            return math.inf
        return self._extra_s(0, n, room, min(map(min, flights)))

    def _traded_s(self) -> float:
        """The mean over ranks of all work, where memory is made by leaner forms or by recomputing.

        Ranks share their memory, and every block has a form of its own.
        """
        problem, sums, n = self.problem, self._sums, len(self.problem.blocks)
        flight = min(min(self._flights(device)) for device in range(problem.pp))
        room = float(problem.pp * (problem.limit_bytes - problem.base_bytes))
        room -= flight * sums.saved[n] + max(sums.least_transient)
        total_s = problem.num_microbatches * self._whole_s()
        steps: list[tuple[float, float, float]] = []  # seconds per byte, bytes, seconds
        for first, row in zip(sums.first, sums.counts, strict=True):
            count = row[n]
            points = sorted((m[first].step_s, m[first].state_bytes) for m in problem.menus)
            total_s += count * points[0][0]
            room -= count * points[0][1]
            for slope, time_s, less in _slopes(points):
                steps.append((slope, float(count * less), count * time_s))
        for step in sums.steps if flight > 0 else ():
            count = sums.counts[step.kind][n]
            time_s, size = problem.num_microbatches * step.seconds, flight * step.bytes
            steps.append((time_s / size, count * size, count * time_s))
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
        counts = [row[-1] for row in self._sums.counts]
        repeated = [k for k, count in enumerate(counts) if count > 1]
        if not repeated:
            return True
        leanest = min(self._sums.least_saved[k] for k in repeated)
        state = self._least.least_state_of_repeats
        wanted = float(sum(counts[k] for k in repeated))
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
        problem, count, sums = self.problem, self.problem.num_microbatches, self._sums
        before_s = sums.forward[low]
        after_s = 0.0 if self.splits_backward else sums.time[low] - before_s
        fill_s = before_s + after_s + self._fill_ways * stage * self._message_s
        body_s = count * self._run_s(low, high)
        least_update_s = self._least.update[-1] / problem.pp
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
        around_s = self._sums.time[at] + self._ways * stage * self._message_s
        return around_s + rounds * cycle_s + self._least.update[n] / problem.pp <= step_s

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
