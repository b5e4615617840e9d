"""Can the action lists of all pipeline ranks be run to their end? A strict simulation.

Strict means what the poorest transport gives: one channel per directed pair of ranks, first in,
first out, tags ignored. The n-th receive that is posted on a channel gets the n-th message that was
sent on it; if that is another value, the run would go on with wrong numbers, so it is an error.
A compute waits for the messages it reads; nothing else waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.errors import DeadlockError
from autopar.plan.actions import Action, ActionKind
from autopar.plan.schedule import ActionLists, Edge
from autopar.plan.types import MeshShape

K = ActionKind
_SENDS = {K.SEND_F: K.FORWARD, K.SEND_B: K.BACKWARD}
_RECEIVES = {K.RECV_F: K.FORWARD, K.RECV_B: K.BACKWARD}
_TIES = (K.FETCH_TIED, K.SYNC_TIED)
# which pass a compute belongs to, by what it reads of other stages
_PASS = {K.FORWARD: K.FORWARD, K.BACKWARD: K.BACKWARD, K.BACKWARD_INPUT: K.BACKWARD}


@dataclass(frozen=True, slots=True)
class _Message:
    """What travels: made by ``source`` in its F or B of a micro-batch, for ``target``."""

    source: int
    target: int
    kind: ActionKind
    microbatch: int | None

    def __str__(self) -> str:
        of = "" if self.microbatch is None else self.microbatch
        return f"{self.source}{self.kind.value}{of}>{self.target}"


@dataclass(slots=True)
class _State:
    """Progress of all ranks."""

    positions: list[int]
    sent: dict[tuple[int, int], list[_Message]] = field(default_factory=dict)
    posted: dict[tuple[int, int], list[_Message]] = field(default_factory=dict)
    slot: dict[_Message, int] = field(default_factory=dict)
    computed: set[tuple[int, ActionKind, int | None]] = field(default_factory=set)
    unsharded: set[int] = field(default_factory=set)


def check_actions(
    lists: ActionLists,
    mesh: MeshShape,
    *,
    forward_edges: Iterable[Edge] = (),
    backward_edges: Iterable[Edge] = (),
    tied: Iterable[Edge] = (),
) -> tuple[tuple[int, Action], ...]:
    """Run the lists in simulation and return one order in which they can happen.

    Args:
        lists: Per pipeline rank, its actions.
        mesh: Tells the rank of each stage.
        forward_edges: As in :func:`autopar.plan.schedule.action_lists`.
        backward_edges: As there.
        tied: As there.

    Returns:
        (Pipeline rank, action) of everything that was done, in an order that works.

    Raises:
        DeadlockError: The ranks cannot go on (every rank's position is named), a receive would get
            another message than it expects, or a message is never received.
    """
    check = _Check(mesh, tuple(set(forward_edges)), tuple(set(backward_edges)), frozenset(tied))
    state = _State([0] * len(lists))
    done: list[tuple[int, Action]] = []
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while state.positions[rank] < len(actions):
                action = actions[state.positions[rank]]
                if check.waits_for(state, rank, action):
                    break
                check.perform(state, rank, action)
                state.positions[rank] += 1
                done.append((rank, action))
                moved = True
    if any(p < len(actions) for p, actions in zip(state.positions, lists, strict=True)):
        raise DeadlockError(_stuck_text(check, state, lists))
    check.end(state)
    return tuple(done)


@dataclass(frozen=True, slots=True)
class _Check:
    """The rules, with what they need to know of the plan."""

    mesh: MeshShape
    forward_edges: tuple[Edge, ...]
    backward_edges: tuple[Edge, ...]
    tied: frozenset[Edge]

    def needs(self, action: Action) -> list[_Message]:
        """Values of other stages that an F, a B or the I of one reads."""
        kind = _PASS[action.kind]
        edges = self.forward_edges if kind is K.FORWARD else self.backward_edges
        return [
            _Message(source, target, kind, action.microbatch)
            for source, target in sorted(edges)
            if target == action.stage
        ]

    def tie_message(self, action: Action) -> tuple[_Message, bool]:
        """What a FETCH_TIED or SYNC_TIED moves, and whether this end gives it."""
        if action.peer is None:
            raise DeadlockError(f"{action} names no peer stage")
        owns = (action.stage, action.peer) in self.tied
        gives = owns is (action.kind is K.FETCH_TIED)
        ends = (action.stage, action.peer) if gives else (action.peer, action.stage)
        return _Message(*ends, action.kind, None), gives

    def waits_for(self, state: _State, rank: int, action: Action) -> str:
        """What ``action`` has to wait for now; "" if it can be done."""
        if action.kind in _TIES:
            message, gives = self.tie_message(action)
            if not gives and message not in state.sent.get(self.channel(message), ()):
                return f"the tied weight {message}"
        if action.kind is K.BACKWARD_WEIGHT:
            if (action.stage, K.BACKWARD, action.microbatch) not in state.computed:
                raise DeadlockError(f"pipeline rank {rank} runs {action} before its other half")
            return ""
        if action.kind not in _PASS:
            return ""
        if _PASS[action.kind] is K.BACKWARD:
            own = (action.stage, K.FORWARD, action.microbatch)
            if own not in state.computed:
                raise DeadlockError(f"pipeline rank {rank} runs {action} before its forward")
        for message in self.needs(action):
            if self.mesh.pipeline_rank(message.source) == rank:
                if (message.source, message.kind, message.microbatch) not in state.computed:
                    raise DeadlockError(
                        f"pipeline rank {rank} runs {action} before {message}, which is its own"
                    )
            elif message not in state.slot:
                raise DeadlockError(
                    f"pipeline rank {rank} runs {action} but posted no receive of {message} before"
                )
            elif state.slot[message] >= len(state.sent.get(self.channel(message), ())):
                return f"the message {message}"
        return ""

    def perform(self, state: _State, rank: int, action: Action) -> None:
        """Do ``action``, which has nothing to wait for."""
        if action.kind in (*_PASS, K.BACKWARD_WEIGHT):
            if action.stage not in state.unsharded:
                raise DeadlockError(f"pipeline rank {rank} runs {action} while it is not unsharded")
            kind = _PASS.get(action.kind, action.kind)
            state.computed.add((action.stage, kind, action.microbatch))
        elif action.kind is K.UNSHARD:
            state.unsharded.add(action.stage)
        elif action.kind is K.RESHARD:
            state.unsharded.discard(action.stage)
        elif action.kind in _TIES:
            message, gives = self.tie_message(action)
            self.put(state, message, given=gives)
        elif action.kind in _SENDS and action.peer is not None:
            kind = _SENDS[action.kind]
            message = _Message(action.stage, action.peer, kind, action.microbatch)
            if (action.stage, kind, action.microbatch) not in state.computed:
                raise DeadlockError(f"pipeline rank {rank} runs {action} before it is computed")
            self.put(state, message, given=True)
        elif action.kind in _RECEIVES and action.peer is not None:
            kind = _RECEIVES[action.kind]
            message = _Message(action.peer, action.stage, kind, action.microbatch)
            self.put(state, message, given=False)

    def channel(self, message: _Message) -> tuple[int, int]:
        """The directed pair of pipeline ranks that carries ``message``."""
        rank_of = self.mesh.pipeline_rank
        return rank_of(message.source), rank_of(message.target)

    def put(self, state: _State, message: _Message, *, given: bool) -> None:
        """Issue one end of a message; both ends of each slot of a channel must agree."""
        channel = self.channel(message)
        mine, other = (state.sent, state.posted) if given else (state.posted, state.sent)
        queue = mine.setdefault(channel, [])
        if not given:
            state.slot[message] = len(queue)
        queue.append(message)
        facing: Sequence[_Message] = other.get(channel, ())
        slot = len(queue) - 1
        if slot < len(facing) and facing[slot] != message:
            sent, posted = (message, facing[slot]) if given else (facing[slot], message)
            raise DeadlockError(
                f"message {slot} from pipeline rank {channel[0]} to {channel[1]} is {sent}, but "
                f"the receive posted for it expects {posted}; receives must be posted in the "
                "sender's order"
            )

    def end(self, state: _State) -> None:
        """Check that every message was received."""
        for channel in sorted({*state.sent, *state.posted}):
            sent, posted = state.sent.get(channel, []), state.posted.get(channel, [])
            if len(sent) != len(posted):
                kept = (sent if len(sent) > len(posted) else posted)[min(len(sent), len(posted))]
                fault = "sent but never received" if len(sent) > len(posted) else "never sent"
                raise DeadlockError(
                    f"pipeline ranks {channel[0]} to {channel[1]}: {kept} is {fault} "
                    f"({len(sent)} sends, {len(posted)} receives)"
                )


def _stuck_text(check: _Check, state: _State, lists: ActionLists) -> str:
    lines = ["the pipeline ranks wait for each other:"]
    for rank, actions in enumerate(lists):
        position = state.positions[rank]
        if position == len(actions):
            lines.append(f"pipeline rank {rank}: has ended")
            continue
        action = actions[position]
        lines.append(
            f"pipeline rank {rank}: action {position} of {len(actions)}, {action}, waits for "
            f"{check.waits_for(state, rank, action)}"
        )
    return "\n  - ".join(lines)
