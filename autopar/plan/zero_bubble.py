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
from autopar.plan.order_codes import eager_codes, v_codes, zero_bubble_codes
from autopar.plan.schedule import Order, decoded


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
    rows = eager_codes(warmup, num_microbatches)
    return tuple(decoded(row, (stage,)) for stage, row in enumerate(rows))


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
    rows = zero_bubble_codes(pp, num_microbatches)
    return tuple(decoded(row, (rank,)) for rank, row in enumerate(rows))


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
    rows = v_codes(pp, num_microbatches)
    return tuple(decoded(row, (rank, 2 * pp - 1 - rank)) for rank, row in enumerate(rows))


def _check_counts(pp: int, num_microbatches: int) -> None:
    for name, count in (("stages", pp), ("micro-batches", num_microbatches)):
        if count < 1:
            raise ConfigError(f"a schedule of {count} {name}: the least is 1")
