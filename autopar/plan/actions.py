"""What each rank does in one step: the vocabulary of actions.

An action prints as in torch's pipelining CSV form: ``2F0`` is the forward of stage 2 on
micro-batch 0, ``1SEND_F3`` sends what stage 1 computed for micro-batch 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """Kinds of action; the values are the words of the CSV form.

    ``I`` and ``W`` are the two halves of a backward: the gradients of a stage's inputs, and those
    of its weights. OFFLOAD and RELOAD (saved values to host memory and back between forward and
    backward) and OPTIMIZER are simulated; no rank runs them. What programs copy to the host they
    copy inside F and B.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    PROLOGUE = "PROLOGUE"
    REDUCE_GRAD = "REDUCE_GRAD"
    FETCH_TIED = "FETCH_TIED"
    SYNC_TIED = "SYNC_TIED"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    OPTIMIZER = "OPTIMIZER"


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list.

    Attributes:
        stage: The stage that acts (the sender of SEND, the receiver of RECV).
        kind: What it does.
        microbatch: Micro-batch, or None for once-per-step actions.
        peer: The other stage of a send or receive.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """Such as ``2F0``, ``1SEND_F3>2``."""
        text = f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"
        if self.peer is not None:
            text += f"{'>' if self.kind.value.startswith('SEND') else '<'}{self.peer}"
        return text
