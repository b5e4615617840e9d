"""Orders of computes with split backwards, or with deeper warm-ups.

A backward in two halves, ``I`` (gradients of the stage's inputs, which the stage before waits for)
and ``W`` (gradients of its weights, which nothing waits for), leaves ``W`` to fill idle time.

>>> print(*zero_bubble_h1_order(2, 3)[1])
1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar.errors import ConfigError
from autopar.plan.actions import ActionKind
from autopar.plan.schedule import Compute, Order

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
INPUT, WEIGHT = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def eager_1f1b_order(warmup: Sequence[int], num_microbatches: int) -> Order:
    """1F1B, one stage per rank, with a warm-up depth for each stage.

    Stage ``i`` runs ``warmup[i]`` forwards before its first backward, then one backward and one
    forward in turn. With ``S - i`` it is plain 1F1B. More hides the time of messages, for as many
    more micro-batches in flight.

    Args:
        warmup: Depth of every stage, at least 1, not increasing.
        num_microbatches: Micro-batches, >= 1.

    Raises:
        ConfigError: The depths are below 1 or increase, or there are no micro-batches.

    Source: Zhuang et al., "On optimizing the communication of model parallelism", MLSys 2023
        (eager 1F1B); the vector is ours.
    """
    _check_counts(len(warmup), num_microbatches)
    if min(warmup) < 1 or any(a < b for a, b in pairwise(warmup)):
        raise ConfigError(
            f"eager_1f1b_order: warm-up depths are {tuple(warmup)}, must be at least 1 and must "
            "not increase along the pipeline"
        )
    rows = []
    for stage, depth in enumerate(warmup):
        first = min(depth, num_microbatches)
        row = [Compute(stage, F, mb) for mb in range(first)]
        for mb in range(num_microbatches):
            row.append(Compute(stage, B, mb))
            if first + mb < num_microbatches:
                row.append(Compute(stage, F, first + mb))
        rows.append(tuple(row))
    return tuple(rows)


def zero_bubble_h1_order(pp: int, num_microbatches: int) -> Order:
    """ZB-H1, one stage per rank: as much memory as 1F1B.

    Rank ``r`` warms up as in 1F1B and runs its first ``W`` after its ``r + 1``-th ``I``.

    Args:
        pp: Pipeline ranks, >= 1.
        num_microbatches: Micro-batches, >= 1.

    Raises:
        ConfigError: A count is below 1.

    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024; the order of
        torch.distributed.pipelining.
    """
    _check_counts(pp, num_microbatches)
    rows = []
    for rank in range(pp):
        warmup = min(num_microbatches, pp - rank - 1)
        row = [Compute(rank, F, mb) for mb in range(warmup)]
        for mb in range(num_microbatches):
            if warmup + mb < num_microbatches:
                row.append(Compute(rank, F, warmup + mb))
            row.append(Compute(rank, INPUT, mb))
            if mb >= rank:
                row.append(Compute(rank, WEIGHT, mb - rank))
        last = max(0, num_microbatches - rank)
        row += [Compute(rank, WEIGHT, mb) for mb in range(last, num_microbatches)]
        rows.append(tuple(row))
    return tuple(rows)


def zero_bubble_v_order(pp: int, num_microbatches: int) -> Order:
    """ZB-V: rank ``r`` has the stages ``r`` and ``2 pp - 1 - r``; the first and last one are one.

    With ``F = I = W`` and at least ``2 pp - 1`` micro-batches a rank idles only until its first
    micro-batch comes and after its last one has gone.

    Args:
        pp: Pipeline ranks, >= 1.
        num_microbatches: Micro-batches, >= 1; the order is that of ``2 pp - 1`` with those that do
            not exist left out if there are fewer.

    Raises:
        ConfigError: A count is below 1.

    Source: Qi et al., "Pipeline parallelism with controllable memory", 2024; the order of
        torch.distributed.pipelining.
    """
    _check_counts(pp, num_microbatches)
    return tuple(_v_row(pp, rank, num_microbatches) for rank in range(pp))


def _v_row(pp: int, rank: int, num_microbatches: int) -> tuple[Compute, ...]:
    down, up = rank, 2 * pp - 1 - rank
    total = max(2 * pp - 1, num_microbatches)
    done: dict[tuple[int, ActionKind], int] = {}
    row: list[Compute] = []

    def run(stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            mb = done.get((stage, kind), 0)
            done[stage, kind] = mb + 1
            if mb < num_microbatches:
                row.append(Compute(stage, kind, mb))

    for _ in range(2 * (pp - rank) - 1):
        run(down, F)
    for _ in range(rank):
        run(up, F)
        run(down, F)
    for _ in range(pp - rank):
        run(up, F, INPUT, WEIGHT)
    while done.get((up, F), 0) < done[down, F] or done[down, F] < total:
        if done[down, F] < total:
            run(down, F)
        run(down, INPUT, WEIGHT)
        run(up, F, INPUT, WEIGHT)
    for _ in range(rank):
        run(down, INPUT)
        run(up, INPUT)
    for _ in range(pp - rank):
        run(down, INPUT, WEIGHT)
    for stage in (up, down):
        while done.get((stage, WEIGHT), 0) < done[stage, INPUT]:
            run(stage, WEIGHT)
    return tuple(row)


def _check_counts(pp: int, num_microbatches: int) -> None:
    for name, count in (("stages", pp), ("micro-batches", num_microbatches)):
        if count < 1:
            raise ConfigError(f"a schedule of {count} {name}: the least is 1")
