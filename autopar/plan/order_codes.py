"""Orders as small numbers: what every pipeline rank computes, without an object for each compute.

A rank's own stages are numbered in the order of the model, kinds of computes as in
:data:`CODED_KINDS`; one compute is ``4 * own stage + kind``. Micro-batches need not be written: in
every schedule here the forwards of a stage run from the first micro-batch to the last, and so do
its backwards and their halves, so that the number of a compute among its likes is its micro-batch.

>>> whole_codes(ScheduleKind.ONE_F_ONE_B, 2, 1, 3)
([0, 0, 1, 0, 1, 1], [0, 1, 0, 1, 0, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count, repeat
from typing import NamedTuple, TypeAlias

from autopar.plan.actions import ActionKind
from autopar.plan.types import ScheduleKind

F = ActionKind.FORWARD
B = ActionKind.BACKWARD
I = ActionKind.BACKWARD_INPUT  # noqa: E741 - the schedules' own letter
W = ActionKind.BACKWARD_WEIGHT
CODED_KINDS = (F, B, I, W)
NUM_KINDS = len(CODED_KINDS)
_F, _B, _I, _W = range(NUM_KINDS)


Codes: TypeAlias = list[int]
"""What one rank computes, in order."""


class CodedRow(NamedTuple):
    """What one rank computes, and its stages in the order of the model."""

    codes: Codes
    stages: tuple[int, ...]


def microbatches(codes: Sequence[int]) -> list[int]:
    """The micro-batch of every compute of a rank."""
    counters = [count() for _ in range(max(codes, default=0) + 1)]
    return list(map(next, map(counters.__getitem__, codes)))


def whole_codes(
    kind: ScheduleKind, pp: int, virtual: int, num_microbatches: int
) -> tuple[Codes, ...]:
    """Orders whose backwards are whole: GPipe, 1F1B and interleaved."""
    rounds = [num_microbatches]
    if kind is ScheduleKind.INTERLEAVED:
        rounds = round_sizes(pp, num_microbatches)
    total = virtual * num_microbatches
    warmups = []
    for rank in range(pp):
        if kind is ScheduleKind.GPIPE:
            warmups.append(total)
        elif virtual == 1:
            warmups.append(min(total, pp - rank - 1))
        else:
            warmups.append(min(total, (virtual - 1) * max(rounds) + 2 * (pp - rank - 1)))
    forwards, backwards = _chunks(rounds, virtual)
    return tuple(
        [
            *forwards[:warmup],
            *chain.from_iterable(zip(forwards[warmup:], backwards, strict=False)),
            *backwards[total - warmup :],
        ]
        for warmup in warmups
    )


def round_sizes(pp: int, num_microbatches: int) -> list[int]:
    """Sizes of the rounds of an interleaved schedule, largest first.

    No round is smaller than ``pp`` unless there is only one: with smaller ones the backward of a
    round can be due on one rank before the forward that it waits for is reached on another.

    >>> round_sizes(4, 9)
    [5, 4]
    """
    count = max(1, num_microbatches // pp)
    base, extra = divmod(num_microbatches, count)
    return [base + 1] * extra + [base] * (count - extra)


def _chunks(rounds: Sequence[int], virtual: int) -> tuple[Codes, Codes]:
    """All forwards and all backwards of a rank."""
    forwards: Codes = []
    backwards: Codes = []
    for size in rounds:
        for chunk in range(virtual):
            forwards += repeat(NUM_KINDS * chunk + _F, size)
        for chunk in reversed(range(virtual)):
            backwards += repeat(NUM_KINDS * chunk + _B, size)
    return forwards, backwards


def forward_codes(pp: int, virtual: int, num_microbatches: int) -> tuple[Codes, ...]:
    """Forwards alone, stage after stage."""
    return tuple(_chunks([num_microbatches], virtual)[0] for _ in range(pp))


def eager_codes(warmup: Sequence[int], num_microbatches: int) -> tuple[Codes, ...]:
    """:func:`~autopar.plan.zero_bubble.eager_1f1b_order`."""
    return tuple(
        [_F] * first + [_B, _F] * (num_microbatches - first) + [_B] * first
        for first in (min(depth, num_microbatches) for depth in warmup)
    )


def zero_bubble_codes(pp: int, num_microbatches: int) -> tuple[Codes, ...]:
    """:func:`~autopar.plan.zero_bubble.zero_bubble_h1_order`."""
    return tuple(_half_row(pp, rank, num_microbatches) for rank in range(pp))


def _half_row(pp: int, rank: int, n: int) -> Codes:
    warmup = min(n, pp - rank - 1)
    row = [_F] * warmup
    for begin, end, weights in ((0, min(rank, n), ()), (min(rank, n), n, (_W,))):
        both = max(0, min(n - warmup, end) - begin)  # with a forward
        row += [_F, _I, *weights] * both + [_I, *weights] * (end - begin - both)
    return row + [_W] * min(rank, n)


def v_codes(pp: int, num_microbatches: int) -> tuple[Codes, ...]:
    """:func:`~autopar.plan.zero_bubble.zero_bubble_v_order`."""
    return tuple(v_row_codes(pp, rank, num_microbatches) for rank in range(pp))


def v_row_codes(pp: int, rank: int, num_microbatches: int) -> Codes:
    """One rank of it: ``down`` is its stage on the way to the last rank, ``up`` that back."""
    down_f, down_i, down_w = _F, _I, _W
    up_f, up_i, up_w = (NUM_KINDS + number for number in (_F, _I, _W))
    total = max(2 * pp - 1, num_microbatches)
    begun = 2 * (pp - rank) - 1
    row = [down_f] * begun + [up_f, down_f] * rank + [up_f, up_i, up_w] * (pp - rank)
    begun, turned = begun + rank, pp  # forwards of down, of up
    with_forward = total - begun
    row += [down_f, down_i, down_w, up_f, up_i, up_w] * with_forward
    turned += with_forward
    row += [down_i, down_w, up_f, up_i, up_w] * (total - turned)
    row += [down_i, up_i] * rank + [down_i, down_w] * (pp - rank)
    weights = [row.count(code) for code in (up_w, down_w)]
    row += [up_w] * (total - weights[0]) + [down_w] * (total - weights[1])
    if total > num_microbatches:  # those that do not exist are left out
        row = [code for code, mb in zip(row, microbatches(row), strict=True)
               if mb < num_microbatches]  # fmt: skip
    return row
