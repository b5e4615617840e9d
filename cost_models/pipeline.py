"""Closed forms for the time of a pipelined step: for ranking; the simulator decides.

``S`` stages, ``M`` micro-batches, ``F`` and ``B`` the forward and backward seconds of a stage,
``t = F + B``, ``c`` the seconds of a message between neighbours, ``w_i`` the forwards that stage
``i`` runs before its first backward (its warm-up depth, 1 for the last stage). With equal stages
and ``c = 0`` the formulas are exact (the tests compare with :mod:`cost_models.simulate`). With
uneven stages they are estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar.errors import ConfigError
from autopar.plan.types import ScheduleKind


def balanced_step_time_s(
    kind: ScheduleKind,
    *,
    num_ranks: int,
    num_microbatches: int,
    forward_s: float,
    backward_s: float,
    virtual: int = 1,
) -> float:
    """Seconds of a step whose stages are equal and whose messages are free.

    GPipe and 1F1B: ``(M + S - 1) (F + B)``. Interleaved with ``v`` stages per rank, each of ``F``
    and ``B``: ``(M v + p - 1) (F + B)``, exact where ``p`` divides ``M``.

    Source: Huang et al., "GPipe", 2019; Narayanan et al., SC 2021.

    >>> balanced_step_time_s(ScheduleKind.GPIPE, num_ranks=4, num_microbatches=8,
    ...                      forward_s=1.0, backward_s=2.0)
    33.0
    """
    chunks = virtual if kind is ScheduleKind.INTERLEAVED else 1
    slots = num_microbatches * chunks + num_ranks - 1
    return slots * (forward_s + backward_s)


def bubble_fraction(num_ranks: int, num_microbatches: int, virtual: int = 1) -> float:
    """Idle share of a balanced step: ``(p - 1) / (M v + p - 1)``.

    >>> bubble_fraction(4, 9)
    0.25
    """
    return (num_ranks - 1) / (num_microbatches * virtual + num_ranks - 1)


def zero_bubble_h1_step_time_s(
    *,
    num_ranks: int,
    num_microbatches: int,
    forward_s: float,
    input_s: float,
    weight_s: float,
) -> float:
    """Seconds of ZB-H1 with equal stages and free messages.

    That is ``M (F + I + W) + (p - 1) (F + I - W)``: for ``F = I = W`` a third of 1F1B's bubble.

    Args:
        num_ranks: ``p``.
        num_microbatches: ``M``, at least ``p``.
        forward_s: ``F``.
        input_s: ``I``, the half of a backward that makes the gradients of the stage's inputs.
        weight_s: ``W``, the other half; at most ``F`` and at most ``I``.

    Raises:
        ConfigError: There are too few micro-batches, or ``W`` is longer: the form is not exact.

    Source: Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, table 1.

    >>> zero_bubble_h1_step_time_s(num_ranks=4, num_microbatches=8,
    ...                            forward_s=1.0, input_s=1.0, weight_s=1.0)
    27.0
    """
    if num_microbatches < num_ranks or weight_s > min(forward_s, input_s):
        raise ConfigError(
            f"ZB-H1: {num_microbatches} micro-batches on {num_ranks} ranks with F, I and W of "
            f"{forward_s}, {input_s} and {weight_s} seconds; the closed form needs as many "
            "micro-batches as ranks and a W that is at most F and I: simulate others"
        )
    slot_s = forward_s + input_s + weight_s
    return num_microbatches * slot_s + (num_ranks - 1) * (forward_s + input_s - weight_s)


def zero_bubble_v_step_time_s(*, num_ranks: int, num_microbatches: int, unit_s: float) -> float:
    """Seconds of ZB-V whose ``F``, ``I`` and ``W`` all take ``unit_s``: ``(6 M + p - 1)`` units.

    A rank has two stages; between its first and its last work it never idles.

    Args:
        num_ranks: ``p``.
        num_microbatches: ``M``, at least ``2 p - 1``.
        unit_s: Seconds of each of the three on one stage.

    Raises:
        ConfigError: There are too few micro-batches: the form is not exact.

    Source: Qi et al., "Pipeline parallelism with controllable memory", 2024.
    """
    if num_microbatches < 2 * num_ranks - 1:
        raise ConfigError(
            f"ZB-V: {num_microbatches} micro-batches on {num_ranks} ranks; the closed form needs "
            f"at least {2 * num_ranks - 1}: simulate fewer"
        )
    return (6 * num_microbatches + num_ranks - 1) * unit_s


def one_f_one_b_warmup(num_stages: int) -> tuple[int, ...]:
    """Warm-up depths of plain 1F1B: ``S - i``, counted from 0."""
    return tuple(num_stages - stage for stage in range(num_stages))


def steady_period_s(
    stage_s: Sequence[float], warmup: Sequence[int], *, p2p_s: float = 0.0
) -> float:
    """Seconds between two micro-batches once a one-forward-one-backward pipeline is full.

    ``max over i <= j of [sum of t_i .. t_j + 2 (j - i) c] / (w_i - w_j + 1)``: between stages i
    and j a micro-batch goes down and up again while stage i may be ``w_i - w_j`` forwards ahead.

    Args:
        stage_s: ``t`` of every stage, forward and backward.
        warmup: ``w``, not increasing, at least 1.
        p2p_s: ``c``.

    Raises:
        ConfigError: The lengths differ, or ``warmup`` increases or is below 1.

    Source: ours; within 0.1 % of simulation for plain 1F1B, 1.3 % for deeper warm-ups.

    >>> steady_period_s([3.0, 3.0], [2, 1], p2p_s=0.5)
    3.5
    """
    if len(stage_s) != len(warmup) or not stage_s:
        raise ConfigError(
            f"steady_period_s: {len(stage_s)} stages and {len(warmup)} warm-up depths; "
            "give one each"
        )
    if min(warmup) < 1 or any(a < b for a, b in pairwise(warmup)):
        raise ConfigError(
            f"steady_period_s: warm-up depths are {tuple(warmup)}, must be at least 1 and must not "
            "increase along the pipeline"
        )
    period_s = 0.0
    for i in range(len(stage_s)):
        work_s = 0.0
        for j in range(i, len(stage_s)):
            work_s += stage_s[j]
            cycle_s = work_s + 2 * (j - i) * p2p_s
            period_s = max(period_s, cycle_s / (warmup[i] - warmup[j] + 1))
    return period_s


def step_time_s(
    kind: ScheduleKind,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    *,
    num_ranks: int,
    num_microbatches: int,
    p2p_s: float = 0.0,
    once_s: float = 0.0,
) -> float:
    """Estimate of a step with uneven stages.

    One stage per rank: the first micro-batch's way ``sum of t + 2 (S - 1) c``, then ``M - 1``
    periods; a period is the slowest F and the slowest B for GPipe (exact), that of
    :func:`steady_period_s` for 1F1B. Interleaved: ``M`` times the slowest rank, and a fill of one
    average stage per rank.

    Args:
        kind: The schedule.
        forward_s: ``F`` of every stage in pipeline order.
        backward_s: ``B`` of every stage.
        num_ranks: Pipeline ranks; stages are dealt round robin.
        num_microbatches: ``M``.
        p2p_s: ``c``.
        once_s: Work once per step that nothing hides.

    Raises:
        ConfigError: The stages are not a multiple of the ranks, or the lengths differ.
    """
    if len(forward_s) != len(backward_s) or not forward_s or len(forward_s) % num_ranks:
        raise ConfigError(
            f"step_time_s: {len(forward_s)} forwards and {len(backward_s)} backwards on "
            f"{num_ranks} pipeline ranks; every stage needs one each and every rank as many stages"
        )
    stage_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    per_rank = len(stage_s) // num_ranks
    if per_rank > 1:
        rank_s = [sum(stage_s[rank::num_ranks]) for rank in range(num_ranks)]
        fill_s = (num_ranks - 1) * (sum(stage_s) / len(stage_s) + 2 * p2p_s)
        tax_s = 0.0 if num_ranks == 1 else 2 * per_rank * p2p_s
        return num_microbatches * (max(rank_s) + tax_s) + fill_s + once_s
    fill_s = sum(stage_s) + 2 * (num_ranks - 1) * p2p_s
    if kind is ScheduleKind.GPIPE:
        lane_s = p2p_s if num_ranks > 1 else 0.0
        period_s = max(max(forward_s), lane_s) + max(max(backward_s), lane_s)
    else:
        period_s = steady_period_s(stage_s, one_f_one_b_warmup(num_ranks), p2p_s=p2p_s)
    return fill_s + (num_microbatches - 1) * period_s + once_s
