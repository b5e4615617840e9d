"""Event simulation of a step: when every action of every pipeline rank starts and ends.

Each pipeline rank runs its list in order on its compute lane. A SEND is free for the rank: the
message enters the queue from its rank to the receiver's, first in, first out, one at a time. A RECV
is posted at once; the forward or backward of its stage and micro-batch waits until the message has
arrived. What an action does beside computing is told in segments (:mod:`cost_models.lanes`); an
action of which only seconds are known takes them on the compute lane, and nothing hides them.
FETCH_TIED and SYNC_TIED between two ranks start when both have come to them.

There is no clock and no randomness. Without interference and shared links times follow from the
order alone and no events are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from autopar.errors import ConfigError, DeadlockError
from autopar.plan.actions import Action, ActionKind
from cost_models.lanes import Interference, Lane, Segment, SharedLink
from cost_models.spans import Simulation, Span
from cost_models.tasks import FixedClock, RateClock, Task

__all__ = ["COMPUTE_LANE", "Simulation", "Span", "StageSeconds", "simulate"]

K = ActionKind
COMPUTE_LANE = Lane.COMPUTE
_SENDS = {K.SEND_F: K.FORWARD, K.SEND_B: K.BACKWARD}
_RECEIVES = {K.RECV_F: K.FORWARD, K.RECV_B: K.BACKWARD}
_TIES = (K.FETCH_TIED, K.SYNC_TIED)
# what a compute reads of other stages; the weights' half of a backward reads only its own stage
_READS = {K.FORWARD: K.FORWARD, K.BACKWARD: K.BACKWARD, K.BACKWARD_INPUT: K.BACKWARD}

# source stage, target stage, what it was made by, micro-batch
_Message = tuple[int, int, ActionKind, int | None]
_Edge = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """What the actions of a stage take.

    Attributes:
        forward_s: One micro-batch's forward, collectives included.
        backward_s: One micro-batch's backward, collectives included.
        once_s: Seconds of the other kinds, each time they occur; 0 for those left out.
        weight_s: The part of ``backward_s`` that makes the weights' gradients; the two halves take
            ``backward_s - weight_s`` and ``weight_s`` where a schedule runs them apart.
        segments: What an action of a kind does on which lane; in the place of the seconds.
        segments_at: The same for one micro-batch, in the place of ``segments``: gradients that are
            reduced once per step go beside the backward of the last one.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    once_s: Mapping[ActionKind, float] = field(default_factory=dict)
    weight_s: float = 0.0
    segments: Mapping[ActionKind, Sequence[Segment]] = field(default_factory=dict)
    segments_at: Mapping[tuple[ActionKind, int], Sequence[Segment]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.weight_s <= self.backward_s:
            raise ConfigError(
                f"StageSeconds: weight_s is {self.weight_s}, must be between 0 and backward_s, "
                f"which is {self.backward_s}: it is a part of it"
            )

    def of(self, kind: ActionKind) -> float:
        """Seconds for which one action holds its rank back, nothing slowing it."""
        if kind in self.segments:
            return sum(s.seconds for s in self.segments[kind] if not s.overlaps)
        if kind is K.FORWARD:
            return self.forward_s
        if kind is K.BACKWARD:
            return self.backward_s
        if kind is K.BACKWARD_INPUT:
            return self.backward_s - self.weight_s
        if kind is K.BACKWARD_WEIGHT:
            return self.weight_s
        return self.once_s.get(kind, 0.0)

    def parts(self, kind: ActionKind, microbatch: int | None = None) -> tuple[Segment, ...]:
        """What one action does, in order."""
        given = self.segments.get(kind)
        if microbatch is not None:
            given = self.segments_at.get((kind, microbatch), given)
        if given is None:
            return (Segment(lane=Lane.COMPUTE, seconds=self.of(kind)),)
        return tuple(given) or (Segment(lane=Lane.COMPUTE, seconds=0.0),)


def _check_names(
    num_ranks: int, num_stages: int, tables: Sequence[object], links: Sequence[SharedLink]
) -> None:
    for table in tables:
        for edge in table if isinstance(table, Mapping) else ():
            if not all(0 <= stage < num_stages for stage in edge):
                raise ConfigError(
                    f"simulate: a message is given from stage {edge[0]} to {edge[1]}, but seconds "
                    f"for {num_stages} stages"
                )
    lanes = tables[1].values() if isinstance(tables[1], Mapping) else [tables[1]]
    if Lane.COMPUTE in lanes:
        raise ConfigError(f"simulate: p2p_lane is {Lane.COMPUTE}, must be one of communication")
    for link in links:
        if not all(0 <= rank < num_ranks for rank in link.ranks):
            raise ConfigError(
                f"simulate: a shared link has ranks {link.ranks}, but there are actions for "
                f"{num_ranks} ranks"
            )


def simulate(
    lists: Sequence[Sequence[Action]],
    stages: Sequence[StageSeconds],
    *,
    p2p_s: float | Mapping[_Edge, float] = 0.0,
    p2p_lane: Lane | Mapping[_Edge, Lane] = Lane.INTER,
    interference: Interference | None = None,
    links: Sequence[SharedLink] = (),
) -> Simulation:
    """Run the action lists of one step.

    Args:
        lists: Per pipeline rank, its actions in order.
        stages: Seconds by stage.
        p2p_s: Seconds of a message alone, for all or by (source stage, target stage); 0 for those
            left out.
        p2p_lane: Whether messages go inside a node or between nodes, for all or by (source stage,
            target stage); between nodes for those left out.
        interference: What slows what on one device; nothing if left out.
        links: Links that several ranks share; none if left out.

    Raises:
        DeadlockError: Some rank waits for what never comes; the text says where each rank stands.
        ConfigError: An action or a message names a stage that has no seconds, a link a rank that
            has no actions, seconds are negative or no number, or a segment joins a label that was
            not issued.
    """
    for rank, row in enumerate(lists):
        for action in row:
            if not 0 <= action.stage < len(stages):
                raise ConfigError(
                    f"simulate: rank {rank} has {action}, but seconds are given for "
                    f"{len(stages)} stages"
                )
    for edge, seconds in p2p_s.items() if isinstance(p2p_s, Mapping) else [("all", p2p_s)]:
        if not (isfinite(seconds) and seconds >= 0):
            raise ConfigError(
                f"simulate: a message of {edge} takes {seconds} seconds, must be a number of at "
                "least 0"
            )
    _check_names(len(lists), len(stages), (p2p_s, p2p_lane), links)
    clock = RateClock(interference, links) if interference or links else FixedClock()
    return _Simulator(lists, stages, p2p_s, p2p_lane, clock).run()


@dataclass(slots=True, eq=False)
class _Rank:
    """How far a pipeline rank has come."""

    index: int
    row: Sequence[Action]
    position: int = 0
    part: int = 0
    now_s: float = 0.0
    running: Task | None = None


class _Simulator:
    """State of one run; ``ready`` holds the ranks that can go on at the present moment."""

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        stages: Sequence[StageSeconds],
        p2p_s: float | Mapping[_Edge, float],
        p2p_lane: Lane | Mapping[_Edge, Lane],
        clock: FixedClock | RateClock,
    ) -> None:
        self.stages = stages
        self.p2p_s = p2p_s
        self.p2p_lane = p2p_lane
        self.clock = clock
        self.ranks = [_Rank(rank, row) for rank, row in enumerate(lists)]
        self.ready = deque(self.ranks)
        self.rank_of = {a.stage: rank for rank, row in enumerate(lists) for a in row}
        self.parts: dict[tuple[int, ActionKind, int | None], tuple[Segment, ...]] = {}
        self.names: dict[_Edge, str] = {}
        self.tasks: list[Task] = []
        self.messages: dict[_Message, Task] = {}
        self.awaited: dict[tuple[int, ActionKind, int | None], list[_Message]] = {}
        self.blocked: dict[_Message, _Rank] = {}
        self.overlapping: dict[tuple[int, str, int | None], Task] = {}
        self.at_tie: dict[tuple[ActionKind, int, int], _Rank] = {}

    def run(self) -> Simulation:
        while True:
            while self.ready:
                self.advance(self.ready.popleft())
            ended = self.clock.next_end()
            if ended is None:
                break
            self.wake(ended)
        if any(rank.position < len(rank.row) for rank in self.ranks):
            raise DeadlockError(self.describe())
        spans = [
            Span(
                t.rank, t.lane, t.action, t.start_s, t.end_s, t.label, t.overlaps, t.medium,
                t.peer, t.position,
            )
            for t in self.tasks
            if t.start_s is not None and t.end_s is not None
        ]  # fmt: skip
        spans.sort(key=lambda s: s.start_s)
        return Simulation(
            spans=tuple(spans),
            makespan_s=max((s.end_s for s in spans), default=0.0),
            num_ranks=len(self.ranks),
        )

    def wake(self, ended: Task) -> None:
        for index in ended.waiters or ():
            rank = self.ranks[index]
            rank.now_s = max(rank.now_s, ended.end_s or 0.0)
            self.ready.append(rank)

    def advance(self, rank: _Rank) -> None:
        """Run one rank until it has to wait for what has no end yet."""
        while rank.position < len(rank.row):
            action = rank.row[rank.position]
            kind = action.kind
            if kind in _SENDS:
                self.send(rank, action)
            elif kind in _RECEIVES:
                made_by = _RECEIVES[kind]
                message = (self.peer(action), action.stage, made_by, action.microbatch)
                reader = (action.stage, made_by, action.microbatch)
                self.awaited.setdefault(reader, []).append(message)
            elif kind in _TIES and self.rank_of.get(self.peer(action), rank.index) != rank.index:
                if not self.meet(rank, action):
                    return
            elif not self.work(rank, action):
                return
            rank.position += 1

    def send(self, rank: _Rank, action: Action) -> None:
        edge = (action.stage, self.peer(action))
        receiver = self.rank_of.get(edge[1], rank.index)
        ends = (rank.index, receiver)
        lane = self.names.get(ends) or self.names.setdefault(ends, f"send {ends[0]}>{receiver}")
        p2p_s, medium = self.p2p_s, self.p2p_lane
        task = Task(
            rank.index,
            lane,
            medium if isinstance(medium, Lane) else medium.get(edge, Lane.INTER),
            action,
            p2p_s.get(edge, 0.0) if isinstance(p2p_s, Mapping) else p2p_s,
            peer=receiver,
            position=rank.position,
        )
        self.issue(task, rank.now_s)
        message = (*edge, _SENDS[action.kind], action.microbatch)
        self.messages[message] = task
        waiting = self.blocked.pop(message, None)
        if waiting is not None:
            self.ready.append(waiting)

    def work(self, rank: _Rank, action: Action) -> bool:
        """Do what is left of an action; False if it has to wait."""
        stage = self.stages[action.stage]
        key = (action.stage, action.kind, action.microbatch if stage.segments_at else None)
        parts = self.parts.get(key)
        if parts is None:
            parts = self.parts[key] = stage.parts(action.kind, action.microbatch)
        if rank.part == 0 and rank.running is None and not self.has_received(rank, action):
            return False
        while rank.part < len(parts):
            if rank.running is None:
                segment = parts[rank.part]
                if segment.joins and not self.has_joined(rank, action, segment):
                    return False
                task = Task(
                    rank.index,
                    segment.lane,
                    segment.lane,
                    action,
                    segment.seconds,
                    segment.label,
                    segment.overlaps,
                    position=rank.position,
                )
                self.issue(task, rank.now_s)
                if segment.overlaps:
                    self.overlapping[action.stage, segment.label, action.microbatch] = task
                    rank.part += 1
                    continue
                rank.running = task
            if not self.has_ended(rank, rank.running):
                return False
            rank.running = None
            rank.part += 1
        rank.part = 0
        return True

    def has_received(self, rank: _Rank, action: Action) -> bool:
        reads = _READS.get(action.kind)
        if reads is None:
            return True
        for message in self.awaited.get((action.stage, reads, action.microbatch), ()):
            task = self.messages.get(message)
            if task is None:
                self.blocked[message] = rank
                return False
            if not self.has_ended(rank, task):
                return False
        return True

    def has_joined(self, rank: _Rank, action: Action, segment: Segment) -> bool:
        for label in segment.joins:
            task = self.overlapping.get((action.stage, label, action.microbatch))
            task = task or self.overlapping.get((action.stage, label, None))
            if task is None:
                raise ConfigError(
                    f"simulate: {action} on rank {rank.index} waits for {label!r}, which stage "
                    f"{action.stage} has not issued for this micro-batch or once per step; put an "
                    "overlapping segment of that label before it"
                )
            if not self.has_ended(rank, task):
                return False
        return True

    def has_ended(self, rank: _Rank, task: Task) -> bool:
        """Take a rank to the end of a task; if that is not known yet, have it woken then."""
        if task.end_s is None:
            task.waiters = [*(task.waiters or ()), rank.index]
            return False
        if task.end_s > rank.now_s:
            rank.now_s = task.end_s
        return True

    def meet(self, rank: _Rank, action: Action) -> bool:
        """Wait for the other end of a tie; whoever comes last starts both."""
        if rank.running is None:
            peer = self.peer(action)
            other = self.at_tie.pop((action.kind, peer, action.stage), None)
            if other is None:
                self.at_tie[action.kind, action.stage, peer] = rank
                return False
            start_s = max(rank.now_s, other.now_s)
            seconds = max(self.stages[s].of(action.kind) for s in (action.stage, peer))
            for who in (other, rank):
                what = who.row[who.position]
                who.running = Task(
                    who.index, Lane.COMPUTE, Lane.COMPUTE, what, seconds, position=who.position
                )
                self.issue(who.running, start_s)
            self.ready.append(other)
        assert rank.running is not None
        if not self.has_ended(rank, rank.running):
            return False
        rank.running = None
        return True

    def issue(self, task: Task, now_s: float) -> None:
        self.tasks.append(task)
        self.clock.issue(task, now_s)

    def peer(self, action: Action) -> int:
        if action.peer is None:
            raise ConfigError(f"simulate: {action} names no other stage")
        return action.peer

    def describe(self) -> str:
        """How far every rank came and what it waits for."""
        messages = {rank.index: message for message, rank in self.blocked.items()}
        lines = []
        for rank in self.ranks:
            position, row = rank.position, rank.row
            if position == len(row):
                lines.append(f"rank {rank.index} has done all of its {position} actions")
                continue
            text = f"rank {rank.index} has done {position} of {len(row)} actions and waits at "
            text += str(row[position])
            if rank.index in messages:
                source, target, kind, microbatch = messages[rank.index]
                what = "" if microbatch is None else microbatch
                text += f" for {source}{kind.value}{what} from stage {source} to stage {target}"
            lines.append(text)
        return "simulate: the schedule can't finish; " + "; ".join(lines)
