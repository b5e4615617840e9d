"""What a running rank asks of its driver.

A program or a step is a generator: it yields one of these and is sent the answer. The lockstep
simulator and ``torch.distributed`` answer the same requests, so that both run the same code.

===============  =========================================================================
request          answer
===============  =========================================================================
``Collective``   the result, or a :class:`Pending` that is waited for before its first use
``Send``         None at once; the driver keeps the tensor until it has arrived
``PostRecv``     a ticket; the tensor's memory is claimed now
``WaitRecv``     the tensor of the ticket, or a :class:`Pending`
``WaitSends``    None, when all sends so far have arrived
===============  =========================================================================

A generator's caller keeps an answer alive until the next request: tensors are therefore handed over
in a :class:`Pending`, which gives its tensor away.

Sends and receives of one directed pair of ranks match in the order they are issued.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch


class Pending(Protocol):
    """A result on its way."""

    def wait(self) -> torch.Tensor:
        """Block until the result is there and give it."""
        ...


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over a mesh axis, in the meaning of :mod:`passes.comm_ops`.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``,
            ``"all_to_all_rows"`` or ``"broadcast"``.
        tensor: The operand. For a broadcast: the value on the root, on others a tensor of the
            same shape and dtype whose contents do not matter.
        axis: Mesh axis.
        op: Reduction, ``"sum"``, ``"max"``, ``"min"``; "" where nothing is reduced.
        dim: Gathered dim (all_gather, all_to_all) or scattered dim (reduce_scatter), >= 0.
        scatter_dim: Scattered dim of an all_to_all, >= 0.
        out_size: Size of the gathered dim in the result; rows of the result of all_to_all_rows.
        root: Coordinate along the axis of a broadcast's source.
        node: Name of the operator, for messages.
        splits: Of all_to_all_rows: rows that go and that come, see :mod:`passes.comm_ops`.
        is_back: Of all_to_all_rows: whether rows go back.
        is_given: Of all_reduce and reduce_scatter: whether the operand is the driver's to write
            to, since nobody else will read it.
    """

    kind: str
    tensor: torch.Tensor
    axis: str
    op: str = ""
    dim: int = 0
    scatter_dim: int = 0
    out_size: int = 0
    root: int = 0
    node: str = ""
    splits: torch.Tensor | None = None
    is_back: bool = False
    is_given: bool = False

    def row_counts(self, ranks: int) -> tuple[list[int], list[int]]:
        """Rows that go to each of ``ranks``, and rows that come from each."""
        assert self.splits is not None, self.describe()
        go, come = self.splits.view(2, ranks, -1).sum(2).tolist()
        return (come, go) if self.is_back else (go, come)

    def describe(self) -> str:
        """Such as ``all_reduce(sum) of float32[4, 8] over tp at ar_3``."""
        op = f"({self.op})" if self.op else ""
        return f"{self.kind}{op} of {describe(self.tensor)} over {self.axis} at {self.node}"


@dataclass(frozen=True, slots=True)
class Send:
    """Send a tensor; it must not be written to until it has arrived.

    Attributes:
        peer: Global rank of the receiver.
        label: Which value this is; drivers may check it, they never match by it.
    """

    tensor: torch.Tensor
    peer: int
    label: str


@dataclass(frozen=True, slots=True)
class PostRecv:
    """Announce a receive from global rank ``peer``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    peer: int
    label: str


@dataclass(frozen=True, slots=True)
class WaitRecv:
    """Wait for a posted receive."""

    ticket: object
    peer: int
    label: str


@dataclass(frozen=True, slots=True)
class WaitSends:
    """Wait until everything sent so far has arrived."""


Request: TypeAlias = Collective | Send | PostRecv | WaitRecv | WaitSends
Running: TypeAlias = Generator[Request, object, None]
"""A generator that yields requests, is sent answers, and returns nothing."""


def describe(tensor: torch.Tensor) -> str:
    """Such as ``float32[4, 8]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
