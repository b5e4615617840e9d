"""Drive all ranks in one process, one generator per rank, and match what they ask for.

Strict, or it could not see what NCCL does:

* a collective needs all ranks of its group in the same collective, with equal kind, reduction,
  dims, shape, dtype and operator; each rank blocks at it, so a group's collectives match in issue
  order;
* the n-th message of a directed pair of ranks goes to the n-th receive posted for that pair. Labels
  don't match messages, but two that meet under different labels are an error: on a real transport
  the run would go on with wrong numbers;
* a send is complete when its receive has been posted, and the end of a step waits for it.

Ranks advance round robin, so a run is deterministic. Nothing here depends on time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.errors import DeadlockError
from autopar.plan.types import DP_AXIS, PP_AXIS, TP_AXIS, MeshShape
from autopar.runtime.collective_math import resolve
from autopar.runtime.requests import (
    Collective,
    PostRecv,
    Request,
    Running,
    Send,
    WaitRecv,
    WaitSends,
    describe,
)


@dataclass(slots=True)
class Traffic:
    """What was communicated in a step, over all ranks.

    Attributes:
        collectives: (Kind, axis) -> collectives; one over n ranks counts once per group.
        collective_bytes: (Kind, axis) -> payload of one rank, summed over those collectives: the
            larger of operand and result.
        messages: Sends.
        message_bytes: Their bytes.
    """

    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    collective_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: int = 0
    message_bytes: int = 0


@dataclass(slots=True)
class _Message:
    tensor: torch.Tensor
    label: str


@dataclass(slots=True)
class _Ticket:
    shape: tuple[int, ...]
    dtype: torch.dtype
    label: str
    value: torch.Tensor | None = None


@dataclass(slots=True)
class _Result:
    """What a collective or a receive gives, handed out once: nobody else keeps it alive."""

    box: list[torch.Tensor]

    def wait(self) -> torch.Tensor:
        """Give it."""
        return self.box.pop()


@dataclass(slots=True)
class _Channel:
    """A directed pair of ranks: what was sent and what was posted, in order."""

    sent: list[_Message] = field(default_factory=list)
    posted: list[_Ticket] = field(default_factory=list)
    matched: int = 0


def group_of(mesh: MeshShape, rank: int, axis: str) -> tuple[int, ...]:
    """Ranks that share a collective over ``axis`` with ``rank``, in order of the axis."""
    pp, dp, tp = mesh.coordinate(rank)
    match axis:
        case _ if axis == TP_AXIS:
            return tuple(mesh.rank_of(pp, dp, i) for i in range(mesh.tp))
        case _ if axis == DP_AXIS:
            return tuple(mesh.rank_of(pp, i, tp) for i in range(mesh.dp))
        case _ if axis == PP_AXIS:
            return tuple(mesh.rank_of(i, dp, tp) for i in range(mesh.pp))
    raise DeadlockError(f"axis {axis!r} has no ranks to talk to; there are dp, tp and pp")


def run_lockstep(
    running: Sequence[Running],
    mesh: MeshShape,
    position: Callable[[int], str] = lambda rank: "?",
) -> Traffic:
    """Run every rank's generator to its end.

    Args:
        running: One generator per rank.
        mesh: Tells the groups.
        position: Where a rank is, in words, for messages.

    Raises:
        DeadlockError: The ranks can't go on, or two ends of an exchange differ. The text has every
            rank's position and what it waits for.
    """
    state = _Lockstep(dict(enumerate(running)), mesh, position)
    with torch.no_grad():
        for rank in state.running:
            state.advance(rank, None)
        while state.waiting:
            answered = [state.try_answer(rank) for rank in sorted(state.waiting)]
            if not any(answered):
                raise DeadlockError(state.text("the ranks wait for each other"))
    state.check_drained()
    return state.traffic


class _Lockstep:
    """Generators, what each waits for, and the channels between them."""

    def __init__(
        self, running: Mapping[int, Running], mesh: MeshShape, position: Callable[[int], str]
    ) -> None:
        self.running = running
        self.waiting: dict[int, Request] = {}
        self.traffic = Traffic()
        self._mesh = mesh
        self._position = position
        self._channels: dict[tuple[int, int], _Channel] = {}

    def advance(self, rank: int, answer: object) -> None:
        """Run one rank until it has to wait."""
        try:
            request = self.running[rank].send(answer)
            while isinstance(request, Send | PostRecv):
                answer = None
                if isinstance(request, Send):
                    self._sent(rank, request)
                else:
                    answer = self._posted(rank, request)
                request = self.running[rank].send(answer)
        except StopIteration:
            self.waiting.pop(rank, None)
            return
        self.waiting[rank] = request

    def try_answer(self, rank: int) -> bool:
        """Answer what a rank waits for, if that is possible now."""
        if isinstance(self.waiting.get(rank), Collective):
            return self._try_collective(rank)
        request = self.waiting.get(rank)
        match request:
            case WaitRecv(ticket=_Ticket() as ticket) if ticket.value is not None:
                answer = _Result([ticket.value])
                ticket.value = None
                self.advance(rank, answer)
                return True
            case WaitSends() if not self._undelivered(rank):
                self.advance(rank, None)
                return True
        return False

    # ---------------------------------------------------------------- messages
    def _channel(self, source: int, target: int) -> _Channel:
        return self._channels.setdefault((source, target), _Channel())

    def _sent(self, rank: int, request: Send) -> None:
        self.traffic.messages += 1
        self.traffic.message_bytes += request.tensor.numel() * request.tensor.element_size()
        channel = self._channel(rank, request.peer)
        channel.sent.append(_Message(request.tensor, request.label))
        self._match(rank, request.peer)

    def _posted(self, rank: int, request: PostRecv) -> _Ticket:
        ticket = _Ticket(request.shape, request.dtype, request.label)
        self._channel(request.peer, rank).posted.append(ticket)
        self._match(request.peer, rank)
        return ticket

    def _match(self, source: int, target: int) -> None:
        channel = self._channel(source, target)
        number = channel.matched
        if number >= min(len(channel.sent), len(channel.posted)):
            return
        message, ticket = channel.sent[number], channel.posted[number]
        expected = (ticket.label, ticket.shape, ticket.dtype)
        if (message.label, tuple(message.tensor.shape), message.tensor.dtype) != expected:
            dtype = str(ticket.dtype).removeprefix("torch.")
            raise DeadlockError(
                self.text(
                    f"message {number} from rank {source} to rank {target} differs at its ends: "
                    f"sent is {message.label!r} {describe(message.tensor)}, "
                    f"the receive posted is for {ticket.label!r} {dtype}{list(ticket.shape)}"
                )
            )
        # a copy: the ranks of a simulation must not share memory any more than real ones
        ticket.value = message.tensor.clone()
        channel.sent[number] = _Message(torch.empty(0), message.label)
        channel.matched += 1

    def _undelivered(self, rank: int) -> list[str]:
        return [
            f"{message.label!r} to rank {target}"
            for (source, target), channel in self._channels.items()
            if source == rank
            for message in channel.sent[channel.matched :]
        ]

    def check_drained(self) -> None:
        """Raise if something was sent and never received, or the other way round."""
        for (source, target), channel in self._channels.items():
            if channel.matched < max(len(channel.sent), len(channel.posted)):
                left = [m.label for m in channel.sent[channel.matched :]]
                left += [t.label for t in channel.posted[channel.matched :]]
                raise DeadlockError(
                    self.text(f"the step ended with messages from rank {source} to rank {target} "
                              f"left over: {left}")
                )  # fmt: skip

    # ---------------------------------------------------------------- collectives
    def _try_collective(self, rank: int) -> bool:
        request = self.waiting[rank]
        assert isinstance(request, Collective)
        members = group_of(self._mesh, rank, request.axis)
        requests: list[Collective] = []
        for member in members:
            other = self.waiting.get(member)
            if not isinstance(other, Collective) or other.axis != request.axis:
                return False
            requests.append(other)
        if len({_signature(r) for r in requests}) > 1:
            lines = [f"rank {m}: {r.describe()}" for m, r in zip(members, requests, strict=True)]
            raise DeadlockError(
                self.text(f"the collectives of ranks {list(members)} over {request.axis!r} differ: "
                          + "; ".join(lines))
            )  # fmt: skip
        results = resolve(requests)
        key = (request.kind, request.axis)
        sizes = [t.numel() * t.element_size() for t in (request.tensor, results[0])]
        self.traffic.collectives[key] += 1
        self.traffic.collective_bytes[key] += max(sizes)
        for member in members:
            del self.waiting[member]
        answers = [_Result([result]) for result in results]
        del request, requests, other, results  # they would keep operands and results alive
        for member, answer in zip(members, answers, strict=True):
            self.advance(member, answer)
        return True

    # ---------------------------------------------------------------- messages for people
    def text(self, what: str) -> str:
        """``what``, and every rank's position."""
        lines = [what]
        for rank in self.running:
            request = self.waiting.get(rank)
            lines.append(f"rank {rank} at {self._position(rank)}: {self._waits_for(rank, request)}")
        return "\n  - ".join(lines)

    def _waits_for(self, rank: int, request: Request | None) -> str:
        match request:
            case Collective():
                return f"waits in {request.describe()}"
            case WaitRecv():
                return f"waits for {request.label!r} from rank {request.peer}"
            case WaitSends():
                return (
                    f"waits until its sends arrive: {', '.join(self._undelivered(rank)) or 'none'}"
                )
        return "waits for nothing"


def _signature(request: Collective) -> tuple[object, ...]:
    return (
        request.kind, request.axis, request.op, request.dim, request.scatter_dim, request.out_size,
        request.root, request.node, tuple(request.tensor.shape), request.tensor.dtype,
    )  # fmt: skip
