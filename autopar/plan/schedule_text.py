"""A schedule drawn as text: one row per pipeline rank, time from left to right.

>>> from autopar.plan.types import ScheduleKind
>>> from autopar.plan.schedule import compute_order
>>> order = compute_order(ScheduleKind.ONE_F_ONE_B, pp=2, virtual=1, num_microbatches=3)
>>> print(draw_schedule(order))
rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --
rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..
"""

from __future__ import annotations

from autopar.errors import DeadlockError
from autopar.plan.actions import ActionKind
from autopar.plan.schedule import Compute, Order

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def unit_spans(
    order: Order, *, forward_units: int = 1, backward_units: int = 2
) -> dict[Compute, tuple[int, int]]:
    """Start and end of every compute if all stages take the same time and messages take none.

    Each stage waits for the stage before it (forward) and after it (backward).

    Args:
        order: Per pipeline rank, what it computes.
        forward_units: Length of a forward.
        backward_units: Length of a backward; the two halves of a split one share it, the larger
            part is that of the inputs.

    Returns:
        (Start, end) in units, from 0.

    Raises:
        DeadlockError: The order cannot be run.
    """
    last = max((c.stage for row in order for c in row), default=0)
    spans: dict[Compute, tuple[int, int]] = {}
    positions = [0] * len(order)
    clocks = [0] * len(order)
    weight_units = backward_units // 2
    lengths = {
        F: forward_units,
        B: backward_units,
        INPUT: backward_units - weight_units,
        WEIGHT: weight_units,
    }
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(order):
            while positions[rank] < len(row):
                compute = row[positions[rank]]
                needed = _needed(compute, last)
                if any(n not in spans for n in needed):
                    break
                start = max([clocks[rank], *(spans[n][1] for n in needed)])
                units = lengths[compute.kind]
                clocks[rank] = start + units
                spans[compute] = (start, clocks[rank])
                positions[rank] += 1
                moved = True
    if any(p < len(row) for p, row in zip(positions, order, strict=True)):
        where = ", ".join(
            f"rank {r} at {row[p]}"
            for r, (p, row) in enumerate(zip(positions, order, strict=True))
            if p < len(row)
        )
        raise DeadlockError(f"the order of forwards and backwards can't be run: {where}")
    return spans


def _needed(compute: Compute, last: int) -> list[Compute]:
    stage, kind, microbatch = compute
    if kind is F:
        return [Compute(stage - 1, kind, microbatch)] if stage else []
    if kind is WEIGHT:
        return [Compute(stage, INPUT, microbatch)]
    own = [Compute(stage, F, microbatch)]
    return own if stage == last else [*own, Compute(stage + 1, kind, microbatch)]


def draw_schedule(
    order: Order, *, max_width: int = 100, forward_units: int = 1, backward_units: int = 2
) -> str:
    """The time grid: ``F3`` is the forward of micro-batch 3, ``B3 --`` its backward, ``..`` idle.

    Where backwards are split, ``I3`` makes the gradients of the inputs, ``W3`` those of weights.

    With several stages per rank each cell begins with its stage, as in ``5F3``. What does not fit
    into ``max_width`` columns is cut and counted.

    Args:
        order: Per pipeline rank, what it computes.
        max_width: Columns of the text, >= 40.
        forward_units: Cells of a forward.
        backward_units: Cells of a backward.
    """
    spans = unit_spans(order, forward_units=forward_units, backward_units=backward_units)
    length = max((end for _, end in spans.values()), default=0)
    by_rank = [list(dict.fromkeys(c.stage for c in row)) for row in order]
    with_stage = any(len(stages) > 1 for stages in by_rank)
    names = {c: str(c) if with_stage else f"{c.kind.value}{c.microbatch}" for c in spans}
    width = max((len(name) for name in names.values()), default=2)
    label = max(len(f"rank {rank}") for rank in range(len(order)))
    shown = min(length, max(1, (max_width - label - 6) // (width + 1)))
    lines = []
    for rank, row in enumerate(order):
        cells = ["." * width] * length
        for compute in row:
            start, end = spans[compute]
            cells[start:end] = [names[compute].ljust(width), *["-" * width] * (end - start - 1)]
        text = " ".join(cells[:shown])
        lines.append(f"{f'rank {rank}':<{label}}  {text}{' ...' if shown < length else ''}")
    if shown < length:
        lines.append(f"{'':<{label}}  {length - shown} of {length} columns are not shown")
    return "\n".join(lines)
