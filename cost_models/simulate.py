"""Event simulation of a step: when every action of every pipeline rank starts and ends.

Each pipeline rank runs its list in order on its compute lane. A SEND is free for the rank: the
message enters the lane from its rank to the receiver's, first in, first out, one at a time. A RECV
is posted at once; the forward or backward of its stage and micro-batch waits until the message has
arrived. PROLOGUE, UNSHARD, REDUCE_GRAD and the like take their seconds on the compute lane (nothing
hides them). FETCH_TIED and SYNC_TIED between two ranks start when both have come to them.

There is no clock and no randomness; equal times are ordered by a counter.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from autopar.errors import ConfigError, DeadlockError
from autopar.plan.actions import Action, ActionKind

K = ActionKind
COMPUTE_LANE = "compute"
_COMPUTES = (K.FORWARD, K.BACKWARD)
_SENDS = {K.SEND_F: K.FORWARD, K.SEND_B: K.BACKWARD}
_RECEIVES = {K.RECV_F: K.FORWARD, K.RECV_B: K.BACKWARD}
_TIES = (K.FETCH_TIED, K.SYNC_TIED)

# source stage, target stage, what it was made by, micro-batch
_Message = tuple[int, int, ActionKind, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """What the actions of a stage take.

    Attributes:
        forward_s: One micro-batch's forward, collectives included.
        backward_s: One micro-batch's backward, collectives included.
        once_s: Seconds of the other kinds, each time they occur; 0 for those left out.
    """

    forward_s: float
    backward_s: float
    once_s: Mapping[ActionKind, float] = field(default_factory=dict)

    def of(self, kind: ActionKind) -> float:
        """Seconds of one action on the compute lane."""
        if kind is K.FORWARD:
            return self.forward_s
        if kind is K.BACKWARD:
            return self.backward_s
        return self.once_s.get(kind, 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """When something happened.

    Attributes:
        rank: Pipeline rank (the sender of a message).
        lane: ``"compute"``, or ``"send 0>1"`` for messages between two ranks.
        action: What.
        start_s: Start.
        end_s: End.
    """

    rank: int
    lane: str
    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated step.

    Attributes:
        spans: By start, then in the order they were found.
        makespan_s: Seconds until the last rank and the last message are done.
        num_ranks: Pipeline ranks.
    """

    spans: tuple[Span, ...]
    makespan_s: float
    num_ranks: int

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time that is not forward or backward; 0.0 for an empty step."""
        if self.makespan_s <= 0:
            return 0.0
        return 1.0 - sum(map(self.busy_s, range(self.num_ranks))) / (
            self.num_ranks * self.makespan_s
        )

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank spends in forwards and backwards."""
        return sum(s.duration_s for s in self.compute_spans(rank) if s.action.kind in _COMPUTES)

    def compute_spans(self, rank: int) -> tuple[Span, ...]:
        """What one rank's compute lane does."""
        return tuple(s for s in self.spans if s.rank == rank and s.lane == COMPUTE_LANE)

    def in_flight(self, stage: int) -> tuple[tuple[float, int], ...]:
        """(Second, micro-batches alive in the stage from then on), in order.

        A micro-batch is alive from the start of its forward to the end of its backward.
        """
        changes: dict[float, int] = {}
        for span in self.spans:
            if span.action.stage == stage and span.lane == COMPUTE_LANE:
                if span.action.kind is K.FORWARD:
                    changes[span.start_s] = changes.get(span.start_s, 0) + 1
                elif span.action.kind is K.BACKWARD:
                    changes[span.end_s] = changes.get(span.end_s, 0) - 1
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
        changes: list[tuple[float, int, int]] = []
        for span in self.compute_spans(rank):
            size = saved_bytes[span.action.stage]
            if span.action.kind is K.FORWARD:
                changes.append((span.start_s, 1, size))
            elif span.action.kind is K.BACKWARD:
                changes.append((span.end_s, 0, -size))  # frees come before what starts then
        alive = peak = 0
        for _, _, change in sorted(changes):
            alive += change
            peak = max(peak, alive)
        return peak


def simulate(
    lists: Sequence[Sequence[Action]],
    stages: Sequence[StageSeconds],
    *,
    p2p_s: float | Mapping[tuple[int, int], float] = 0.0,
) -> Simulation:
    """Run the action lists of one step.

    Args:
        lists: Per pipeline rank, its actions in order.
        stages: Seconds by stage.
        p2p_s: Seconds of a message, for all or by (source stage, target stage); 0 for those left
            out.

    Raises:
        DeadlockError: Some rank waits for what never comes; the text says where each rank stands.
        ConfigError: An action names a stage that has no seconds.
    """
    for rank, row in enumerate(lists):
        for action in row:
            if not 0 <= action.stage < len(stages):
                raise ConfigError(
                    f"simulate: rank {rank} has {action}, but seconds are given for "
                    f"{len(stages)} stages"
                )
    return _Simulator(lists, stages, p2p_s).run()


class _Simulator:
    """State of one run: a heap of (second, counter, rank) of ranks that can go on."""

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        stages: Sequence[StageSeconds],
        p2p_s: float | Mapping[tuple[int, int], float],
    ) -> None:
        self.lists = lists
        self.stages = stages
        self.p2p_s = p2p_s
        self.rank_of = {a.stage: rank for rank, row in enumerate(lists) for a in row}
        self.position = [0] * len(lists)
        self.counter = count()
        self.heap = [(0.0, next(self.counter), rank) for rank in range(len(lists))]
        self.spans: list[Span] = []
        self.arrival_s: dict[_Message, float] = {}
        self.lane_free_s: dict[tuple[int, int], float] = {}
        self.awaited: dict[tuple[int, ActionKind, int | None], list[_Message]] = {}
        self.blocked: dict[_Message, tuple[int, float]] = {}  # message -> rank and since when
        self.at_tie: dict[tuple[ActionKind, int, int], tuple[int, float]] = {}

    def run(self) -> Simulation:
        end_s = 0.0
        while self.heap:
            now_s, _, rank = heapq.heappop(self.heap)
            end_s = max(end_s, self.advance(rank, now_s))
        if any(p < len(row) for p, row in zip(self.position, self.lists, strict=True)):
            raise DeadlockError(self.describe())
        end_s = max([end_s, *(s.end_s for s in self.spans)])
        return Simulation(
            spans=tuple(sorted(self.spans, key=lambda s: s.start_s)),
            makespan_s=end_s,
            num_ranks=len(self.lists),
        )

    def advance(self, rank: int, now_s: float) -> float:
        """Run one rank until its next action takes time or has to wait; the second it reached."""
        row = self.lists[rank]
        while self.position[rank] < len(row):
            action = row[self.position[rank]]
            if action.kind in _SENDS:
                self.send(rank, action, now_s)
            elif action.kind in _RECEIVES:
                made_by = _RECEIVES[action.kind]
                message = (self.peer(action), action.stage, made_by, action.microbatch)
                self.awaited.setdefault((action.stage, made_by, action.microbatch), []).append(
                    message
                )
            elif action.kind in _TIES and self.rank_of.get(self.peer(action), rank) != rank:
                return self.meet(rank, action, now_s)
            elif not self.compute(rank, action, now_s):
                return now_s
            else:
                return self.spans[-1].end_s
            self.position[rank] += 1
        return now_s

    def send(self, rank: int, action: Action, now_s: float) -> None:
        target = self.peer(action)
        receiver = self.rank_of.get(target, rank)
        seconds = (
            self.p2p_s
            if isinstance(self.p2p_s, int | float)
            else self.p2p_s.get((action.stage, target), 0.0)
        )
        start_s = max(now_s, self.lane_free_s.get((rank, receiver), 0.0))
        self.lane_free_s[rank, receiver] = start_s + seconds
        self.spans.append(Span(rank, f"send {rank}>{receiver}", action, start_s, start_s + seconds))
        message = (action.stage, target, _SENDS[action.kind], action.microbatch)
        self.arrival_s[message] = start_s + seconds
        if message in self.blocked:
            waiting, since_s = self.blocked.pop(message)
            self.resume(waiting, max(since_s, start_s + seconds))

    def compute(self, rank: int, action: Action, now_s: float) -> bool:
        """Start an action on the compute lane; False if it has to wait for a message."""
        start_s = now_s
        if action.kind in _COMPUTES:
            for message in self.awaited.get((action.stage, action.kind, action.microbatch), ()):
                if message not in self.arrival_s:
                    self.blocked[message] = (rank, now_s)
                    return False
                start_s = max(start_s, self.arrival_s[message])
        end_s = start_s + self.stages[action.stage].of(action.kind)
        self.spans.append(Span(rank, COMPUTE_LANE, action, start_s, end_s))
        self.position[rank] += 1
        self.resume(rank, end_s)
        return True

    def meet(self, rank: int, action: Action, now_s: float) -> float:
        """Wait for the other end of a tie; whoever comes last starts it."""
        peer = self.peer(action)
        other = self.at_tie.pop((action.kind, peer, action.stage), None)
        if other is None:
            self.at_tie[action.kind, action.stage, peer] = (rank, now_s)
            return now_s
        waiting, since_s = other
        start_s = max(now_s, since_s)
        seconds = max(self.stages[s].of(action.kind) for s in (action.stage, peer))
        for who in (waiting, rank):
            what = self.lists[who][self.position[who]]
            self.spans.append(Span(who, COMPUTE_LANE, what, start_s, start_s + seconds))
            self.position[who] += 1
            self.resume(who, start_s + seconds)
        return start_s + seconds

    def resume(self, rank: int, second: float) -> None:
        heapq.heappush(self.heap, (second, next(self.counter), rank))

    def peer(self, action: Action) -> int:
        if action.peer is None:
            raise ConfigError(f"simulate: {action} names no other stage")
        return action.peer

    def describe(self) -> str:
        """How far every rank came and what it waits for."""
        messages = {rank: message for message, (rank, _) in self.blocked.items()}
        lines = []
        for rank, row in enumerate(self.lists):
            position = self.position[rank]
            if position == len(row):
                lines.append(f"rank {rank} has done all of its {position} actions")
                continue
            text = f"rank {rank} has done {position} of {len(row)} actions and waits at "
            text += str(row[position])
            if rank in messages:
                source, target, kind, microbatch = messages[rank]
                what = "" if microbatch is None else microbatch
                text += f" for {source}{kind.value}{what} from stage {source} to stage {target}"
            lines.append(text)
        return "simulate: the schedule can't finish; " + "; ".join(lines)
