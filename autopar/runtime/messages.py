"""Values under way between stages: what was made, sent, announced and received.

Messages of one directed pair of ranks keep the order of the action lists on both sides. Two stages
on one rank hand values over without a message; their SEND and RECV actions do nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import PassError
from autopar.plan.actions import Action, ActionKind
from autopar.plan.types import MeshShape
from autopar.runtime.requests import PostRecv, Request, Running, Send, WaitRecv
from autopar.sharding.programs import LocalPrograms

Tensors = dict[str, torch.Tensor]
_COMPUTE_OF = {
    ActionKind.SEND_F: ActionKind.FORWARD,
    ActionKind.RECV_F: ActionKind.FORWARD,
    ActionKind.SEND_B: ActionKind.BACKWARD,
    ActionKind.RECV_B: ActionKind.BACKWARD,
}


class Mailbox:
    """The messages of one rank in one step."""

    def __init__(self, local: LocalPrograms, mesh: MeshShape, rank: int) -> None:
        self._local = local
        self._mesh = mesh
        self._pp, self._dp, self._tp = mesh.coordinate(rank)
        self._made: dict[tuple[int, int, ActionKind, int], list[torch.Tensor]] = {}
        self._tickets: dict[tuple[int, int, ActionKind, int], list[tuple[str, object]]] = {}

    def is_own(self, stage: int) -> bool:
        """Whether this rank runs the stage."""
        return self._mesh.pipeline_rank(stage) == self._pp

    def peer(self, stage: int) -> int:
        """Global rank of this rank's counterpart in another stage."""
        return self._mesh.rank_of(self._mesh.pipeline_rank(stage), self._dp, self._tp)

    def _edges(self, kind: ActionKind) -> Mapping[tuple[int, int], tuple[str, ...]]:
        forward = kind is ActionKind.FORWARD
        return self._local.forward_edges if forward else self._local.backward_edges

    def put(self, stage: int, kind: ActionKind, microbatch: int, made: Tensors) -> None:
        """Keep what an F or B made for other stages until it is sent or taken."""
        for (source, target), names in self._edges(kind).items():
            if source == stage and names:
                self._made[source, target, kind, microbatch] = [made[n] for n in names]

    def send(self, action: Action) -> Running:
        """Do a SEND action."""
        source, target, kind, microbatch = action.stage, *_details(action)
        if self.is_own(target):
            return
        made = self._made.pop((source, target, kind, microbatch))
        for name, tensor in zip(self._edges(kind)[source, target], made, strict=True):
            label = _label(name, microbatch, source, target)
            yield Send(tensor.contiguous(), self.peer(target), label)

    def post(self, action: Action) -> Running:
        """Do a RECV action: announce the receives."""
        target, source, kind, microbatch = action.stage, *_details(action)
        if self.is_own(source):
            return
        tickets = self._tickets.setdefault((source, target, kind, microbatch), [])
        for name in self._edges(kind)[source, target]:
            meta = self._local.edge_metas[name]
            label = _label(name, microbatch, source, target)
            dtype = torch_dtype(meta.dtype)
            ticket = yield PostRecv(meta.shape, dtype, self.peer(source), label)
            tickets.append((name, ticket))

    def take(
        self, stage: int, kind: ActionKind, microbatch: int
    ) -> Generator[Request, object, Tensors]:
        """Wait for everything that an F or B reads from other stages.

        Raises:
            PassError: The action list has no RECV for it, or runs the source later.
        """
        found: Tensors = {}
        for (source, target), names in self._edges(kind).items():
            if target != stage or not names:
                continue
            key = (source, target, kind, microbatch)
            if self.is_own(source):
                if key not in self._made:
                    reader, maker = (f"{s}{kind.value}{microbatch}" for s in (target, source))
                    raise PassError(f"{reader} runs before {maker}, whose values it reads")
                found.update(zip(names, self._made.pop(key), strict=True))
                continue
            if key not in self._tickets:
                raise PassError(
                    f"{target}{kind.value}{microbatch} reads values of stage {source}, "
                    "but the action list has no RECV before it"
                )
            for name, ticket in self._tickets.pop(key):
                label = _label(name, microbatch, source, target)
                found[name] = yield from wait_for(ticket, self.peer(source), label)
        return found


def receive(
    shape: Sequence[int], dtype: torch.dtype, peer: int, label: str
) -> Generator[Request, object, torch.Tensor]:
    """Announce a receive and wait for it."""
    ticket = yield PostRecv(tuple(shape), dtype, peer, label)
    return (yield from wait_for(ticket, peer, label))


def wait_for(ticket: object, peer: int, label: str) -> Generator[Request, object, torch.Tensor]:
    """Wait for an announced receive."""
    value = yield WaitRecv(ticket, peer, label)
    if value is not None and not isinstance(value, torch.Tensor):
        value = value.wait()  # type: ignore[attr-defined]  # a Pending
    if not isinstance(value, torch.Tensor):
        raise PassError(f"the driver answered the receive of {label!r} with {value!r}")
    return value


def _details(action: Action) -> tuple[int, ActionKind, int]:
    """Other stage, what made the value, micro-batch."""
    if action.peer is None or action.microbatch is None:
        raise PassError(f"action {action} needs a peer stage and a micro-batch")
    return action.peer, _COMPUTE_OF[action.kind], action.microbatch


def _label(name: str, microbatch: int, source: int, target: int) -> str:
    return f"{name} of micro-batch {microbatch}, stage {source} to {target}"
