"""A step as a graph whose longest path is its time, for stages of any seconds.

In which order every rank computes and sends is fixed by the schedule, so whatever the stages take,
a step ends when the longest chain of things that wait for each other has ended: the computes of a
rank one after another, a message after what made it and after those sent before it on the same way,
a compute after the message that it reads. Each thing takes seconds of one *term*: the forward of
stage 3, the message over the boundary before stage 4. A path is then a sum of terms, and no step in
this order is shorter than any of its paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from functools import lru_cache
from math import exp, log1p

from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.step_rows import NONE, StepRows, step_rows

KEPT = 6  # graphs
LEAST_SHARE = 1e-6  # of a mixture: what is on paths of less is left out
COLD = 30.0  # heats apart: what is so much shorter has no part in a mixture


class Term(IntEnum):
    """What a thing on a path takes, each by stage."""

    FORWARD = 0
    BACKWARD = 1
    INPUTS = 2  # the half of a backward that other stages wait for
    WEIGHTS = 3
    GATHER = 4
    REDUCE = 5
    MESSAGE = 6  # over the boundary before the stage
    EACH = 7  # reducing the gradients of one micro-batch after its backward


Path = Mapping[tuple[Term, int], float]
"""How often a path, or a mixture of paths, has each term of each stage."""

_TERMS = (
    Term.FORWARD,
    Term.BACKWARD,
    Term.INPUTS,
    Term.WEIGHTS,
    Term.GATHER,
    Term.REDUCE,
    Term.EACH,
    Term.EACH,  # there is no eighth thing
)
"""By thing of :mod:`autopar.solver.step_rows`."""


@lru_cache(maxsize=KEPT)
def paths_of(
    kind: ScheduleKind,
    mesh: MeshShape,
    count: int,
    warmup: tuple[int, ...] | None = None,
    *,
    reduces_each: bool = False,
) -> StepPaths:
    """The graph of a schedule's order; the last few are kept, since many cuts are run in one.

    Args:
        kind: The schedule.
        mesh: The pipeline alone.
        count: Micro-batches.
        warmup: As for :func:`~autopar.plan.orders.order_of`.
        reduces_each: As of :func:`~autopar.solver.step_rows.step_rows`.
    """
    return StepPaths((step_rows(kind, mesh, count, warmup, reduces_each=reduces_each),))


@lru_cache(maxsize=KEPT)
def joint_paths_of(
    kind: ScheduleKind, mesh: MeshShape, counts: tuple[int, ...], *, reduces_each: bool = False
) -> StepPaths:
    """One graph of the orders of several numbers of micro-batches.

    Steps that begin alike share what they begin with: it is gone through once for all of them.
    """
    return StepPaths(
        tuple(step_rows(kind, mesh, count, reduces_each=reduces_each) for count in counts)
    )


@dataclass(slots=True)
class StepPaths:
    """The graph of one order, or of several.

    Args:
        orders: Who does what when.
    """

    orders: InitVar[tuple[StepRows, ...]]
    num_stages: int = field(init=False)
    _terms: list[int] = field(default_factory=list)
    _before: list[int] = field(default_factory=list)
    _beside: list[int] = field(default_factory=list)
    _last: list[list[int]] = field(default_factory=list)  # by order, the last thing of each rank

    def __post_init__(self, orders: tuple[StepRows, ...]) -> None:
        self.num_stages = orders[0].num_stages
        add = self._append if len(orders) == 1 else self._shared()
        for order in orders:
            self._last.append([at for at in self._add(order, add) if at >= 0])

    @property
    def _ends(self) -> list[int]:
        """Of the first order."""
        return self._last[0]

    def _append(self, term: int, before: int, beside: int) -> int:
        """One more thing; its number."""
        self._terms.append(term)
        self._before.append(before)
        self._beside.append(beside)
        return len(self._terms) - 1

    def _shared(self) -> Callable[[int, int, int], int]:
        """The same, but for a thing that is there already: it ends when that ends."""
        known: dict[tuple[int, int, int], int] = {}

        def add(term: int, before: int, beside: int) -> int:
            key = (term, before, beside)
            found = known.get(key)
            if found is None:
                found = known[key] = self._append(term, before, beside)
            return found

        return add

    def _add(self, order: StepRows, add: Callable[[int, int, int], int]) -> list[int]:
        """All things of an order; the last of each rank."""
        sent, waiting = [NONE] * order.num_places, [NONE] * order.num_places
        ways = [NONE] * order.num_lanes
        # a message over a boundary is that of its later stage, either way
        messages = [self._index(Term.MESSAGE, max(edge)) for edge in order.edge_stages]
        tables = [
            (row, [self._index(term, stage) for stage in row.stages for term in _TERMS])
            for row in order.rows
        ]
        position, last = [0] * len(tables), [NONE] * len(tables)
        ready = list(range(len(tables)))
        while ready:
            rank = ready.pop()
            (row, own), at, latest = tables[rank], position[rank], last[rank]
            things, microbatches, reads, sends = row.things, row.microbatches, row.reads, row.sends
            while at < len(things):
                thing = things[at]
                place, source = reads[thing], NONE
                if place >= 0:
                    place += microbatches[at]
                    source = sent[place]
                    if source < 0:
                        waiting[place] = rank
                        break
                latest = add(own[thing], latest, source)
                place = sends[thing]
                if place >= 0:
                    place += microbatches[at]
                    way = row.lanes[thing]
                    ways[way] = sent[place] = add(messages[row.edges[thing]], latest, ways[way])
                    if waiting[place] >= 0:
                        ready.append(waiting[place])
                at += 1
            position[rank], last[rank] = at, latest
        return last

    def __len__(self) -> int:
        """Computes, messages and once-per-step work."""
        return len(self._terms)

    def _index(self, term: Term, stage: int) -> int:
        return int(term) * self.num_stages + stage

    def longest(
        self, seconds: Sequence[Sequence[float]], *, most: int | None = None
    ) -> tuple[float, tuple[Path, ...]]:
        """Seconds until all ranks are done, and the longest path to the end of every rank.

        Args:
            seconds: By term, by stage.
            most: Of the ranks that end last, how many paths are wanted; all if left out.
        """
        ends = self._ended(seconds)
        last = sorted(self._ends, key=lambda at: -ends[at])
        return ends[last[0]], tuple(self._path(at, ends) for at in last[:most])

    def mixture(self, seconds: Sequence[Sequence[float]], heat_s: float) -> Path:
        """Paths that are nearly as long as the longest, mixed: none of them is much preferred.

        A path counts in proportion to ``exp(length / heat_s)``. No step is shorter than the mean of
        some of its paths; where many are as long as each other, that says more than one of them.

        Args:
            seconds: By term, by stage.
            heat_s: How much shorter a path is that counts a third.
        """
        weights = [row[s] for row in seconds for s in range(self.num_stages)]
        ends: list[float] = []
        shares: list[float] = []  # of what comes by way of ``beside``
        cold = exp(-COLD)
        cold_s, most, least = heat_s * log1p(cold), 1.0 / (1.0 + cold), cold / (1.0 + cold)
        for term, before, beside in zip(self._terms, self._before, self._beside, strict=True):
            end_s, share = ends[before] if before >= 0 else 0.0, 0.0
            if beside >= 0:
                beside_s = ends[beside]
                apart = (beside_s - end_s) / heat_s
                if apart >= COLD:
                    end_s, share = beside_s + cold_s, most
                elif apart <= -COLD:
                    end_s, share = end_s + cold_s, least
                else:
                    less = exp(-abs(apart))
                    end_s = max(end_s, beside_s) + heat_s * log1p(less)
                    share = (1.0 if apart > 0 else less) / (1.0 + less)
            ends.append(end_s + weights[term])
            shares.append(share)
        last_s = max(ends[at] for at in self._ends)
        parts = [exp(max(-COLD, (ends[at] - last_s) / heat_s)) for at in self._ends]
        flow = [0.0] * len(ends)
        for at, part in zip(self._ends, parts, strict=True):
            flow[at] += part / sum(parts)
        counts = [0.0] * len(weights)
        for at in range(len(ends) - 1, -1, -1):
            amount, share = flow[at], shares[at]
            if amount < LEAST_SHARE:
                continue
            counts[self._terms[at]] += amount
            before, beside = self._before[at], self._beside[at]
            if beside >= 0:
                flow[beside] += amount * share
            if before >= 0:
                flow[before] += amount * (1.0 - share)
        return {
            (Term(index // self.num_stages), index % self.num_stages): count
            for index, count in enumerate(counts)
            if count > LEAST_SHARE
        }

    def dearest(self, seconds: Sequence[Sequence[float]]) -> tuple[Path, ...]:
        """The longest path of each order."""
        ends = self._ended(seconds)
        last = (sorted(row, key=lambda at: -ends[at])[0] for row in self._last)
        return tuple(self._path(at, ends) for at in last)

    def end_s(self, seconds: Sequence[Sequence[float]]) -> float:
        """Seconds until all ranks are done."""
        return self.ends_s(seconds)[0]

    def ends_s(self, seconds: Sequence[Sequence[float]]) -> tuple[float, ...]:
        """The same for each order."""
        ends = self._ended(seconds)
        return tuple(max(ends[at] for at in row) for row in self._last)

    def _ended(self, seconds: Sequence[Sequence[float]]) -> list[float]:
        """When each thing has ended."""
        weights = [row[s] for row in seconds for s in range(self.num_stages)]
        ends: list[float] = []
        add = ends.append
        for term, before, beside in zip(self._terms, self._before, self._beside, strict=True):
            end_s = ends[before] if before >= 0 else 0.0
            if beside >= 0 and ends[beside] > end_s:
                end_s = ends[beside]
            add(end_s + weights[term])
        return ends

    def _path(self, at: int, ends: Sequence[float]) -> Path:
        counts: Counter[int] = Counter()
        while at >= 0:
            counts[self._terms[at]] += 1
            before, beside = self._before[at], self._beside[at]
            is_beside = beside >= 0 and (before < 0 or ends[beside] > ends[before])
            at = beside if is_beside else before
        return {
            (Term(index // self.num_stages), index % self.num_stages): count
            for index, count in counts.items()
        }
