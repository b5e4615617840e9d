"""The result of a simulation: when everything happened, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.plan.actions import Action, ActionKind
from cost_models.lanes import COMMUNICATION_LANES, Lane

K = ActionKind
COMPUTES = frozenset({K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT})
_RELEASES = frozenset({K.BACKWARD, K.BACKWARD_WEIGHT})

Interval = tuple[float, float]


class Span(NamedTuple):
    """When something happened.

    Attributes:
        rank: Pipeline rank (the sender of a message).
        lane: A :class:`~cost_models.lanes.Lane`, or ``"send 0>1"`` for messages between two ranks.
        action: What.
        start_s: Start.
        end_s: End.
        label: Which part of the action; "" if it has one part.
        overlaps: Whether the action went on beside it.
        medium: The lane whose link a message uses; the lane itself for all else.
        peer: The rank that a message goes to.
        position: Of the action in its rank's list.
    """

    rank: int
    lane: str
    action: Action
    start_s: float
    end_s: float
    label: str = ""
    overlaps: bool = False
    medium: Lane = Lane.COMPUTE
    peer: int | None = None
    position: int = 0

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated step.

    Attributes:
        spans: By start, then in the order in which they began.
        makespan_s: Seconds until the last rank and the last message are done.
        num_ranks: Pipeline ranks.
    """

    spans: tuple[Span, ...]
    makespan_s: float
    num_ranks: int

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """Spans of each rank, in order; a message is with its sender and with its receiver."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
            if span.peer is not None and span.peer != span.rank:
                rows[span.peer].append(span)
        return tuple(map(tuple, rows))

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time that is not forward or backward; 0.0 for an empty step."""
        if self.makespan_s <= 0:
            return 0.0
        busy_s = sum(
            s.end_s - s.start_s for s in self.spans if s.action.kind in COMPUTES and not s.overlaps
        )
        return 1.0 - busy_s / (self.num_ranks * self.makespan_s)

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank spends in forwards and backwards, collectives that they wait for too.

        Waiting for a lane or for what overlaps is not counted.
        """
        return sum(
            s.duration_s
            for s in self.by_rank[rank]
            if s.rank == rank and s.action.kind in COMPUTES and not s.overlaps
        )

    def compute_spans(self, rank: int) -> tuple[Span, ...]:
        """What one rank's compute lane does."""
        return tuple(s for s in self.by_rank[rank] if s.rank == rank and s.lane == Lane.COMPUTE)

    def lane_s(self, rank: int, lane: Lane) -> float:
        """Seconds in which a lane of a rank is busy; messages it sends or gets count on theirs."""
        return _length(union(self._intervals(rank, (lane,))))

    def communication_s(self, rank: int) -> float:
        """Seconds in which any lane but compute is busy on a rank."""
        return _length(union(self._intervals(rank, COMMUNICATION_LANES)))

    def exposed_s(self, rank: int) -> float:
        """Seconds in which a rank communicates and computes nothing: what overlap did not hide."""
        moving = union(self._intervals(rank, COMMUNICATION_LANES))
        return _length(moving) - _length(overlap(moving, self._intervals(rank, (Lane.COMPUTE,))))

    def _intervals(self, rank: int, lanes: Sequence[Lane]) -> list[Interval]:
        return [
            (s.start_s, s.end_s)
            for s in self.by_rank[rank]
            if s.medium in lanes and s.end_s > s.start_s
        ]

    def in_flight(self, stage: int) -> tuple[tuple[float, int], ...]:
        """(Second, micro-batches alive in the stage from then on), in order.

        A micro-batch is alive from the start of its forward to the end of its backward, of its
        weights' part where that is apart.
        """
        begins: dict[int | None, float] = {}
        ends: dict[int | None, float] = {}
        for span in self.spans:
            if span.action.stage != stage or span.overlaps or span.peer is not None:
                continue
            microbatch = span.action.microbatch
            if span.action.kind is K.FORWARD:
                begins.setdefault(microbatch, span.start_s)
            elif span.action.kind in _RELEASES:
                ends[microbatch] = max(span.end_s, ends.get(microbatch, 0.0))
        changes: dict[float, int] = {}
        for second in begins.values():
            changes[second] = changes.get(second, 0) + 1
        for second in ends.values():
            changes[second] = changes.get(second, 0) - 1
        alive, steps = 0, []
        for second in sorted(changes):
            alive += changes[second]
            steps.append((second, alive))
        return tuple(steps)

    def peak_in_flight(self, stage: int) -> int:
        """Most micro-batches alive in a stage at once."""
        return max((alive for _, alive in self.in_flight(stage)), default=0)

    def peak_saved_bytes(self, rank: int, saved_bytes: Sequence[int]) -> int:
        """Most bytes of saved values on a rank at once, all of its stages together.

        Args:
            rank: Pipeline rank.
            saved_bytes: What one micro-batch saves, by stage.
        """
        own = {s.action.stage for s in self.by_rank[rank] if s.rank == rank}
        changes: list[tuple[float, int]] = []
        for stage in own:
            before = 0
            for second, alive in self.in_flight(stage):
                changes.append((second, (alive - before) * saved_bytes[stage]))
                before = alive
        alive_bytes = peak = 0
        for _, change in sorted(changes):  # frees come before what starts then
            alive_bytes += change
            peak = max(peak, alive_bytes)
        return peak


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same seconds, in order.

    >>> union([(0, 2), (5, 6), (1, 3)])
    [(0, 3), (5, 6)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def overlap(one: Sequence[Interval], other: Iterable[Interval]) -> list[Interval]:
    """Seconds that are in both; ``one`` is a result of :func:`union`."""
    found = []
    facing = union(other)
    at = 0
    for start, end in one:
        while at < len(facing) and facing[at][1] <= start:
            at += 1
        ahead = at  # the last one may reach into the next interval too
        while ahead < len(facing) and facing[ahead][0] < end:
            found.append((max(start, facing[ahead][0]), min(end, facing[ahead][1])))
            ahead += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
