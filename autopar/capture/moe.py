"""Mixture of experts: rows sorted by expert, and matrix products over runs of equal expert.

``ids`` has one expert per *slot*; token ``t`` has the slots ``t * k .. (t + 1) * k - 1``. Sorted by
expert, stably, the slots are *rows*: row i is slot ``order[i]``. Rows of expert e are one run of
``counts[e]`` rows; the runs follow each other in the order of the experts.

A rank may hold rows of a few experts only. Then the runs in ``counts`` are shorter than ``order``,
and the rows behind the last run are to be ignored, whatever they hold: products leave zeros there,
and :func:`moe_combine` does not read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.errors import RowBudgetError


def moe_route(
    ids: torch.Tensor, experts: int, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort slots by expert.

    Args:
        ids: Expert of each slot, (r,), in ``0 .. experts - 1``.
        experts: Number of experts.
        k: Slots per token; only sharding reads it.

    Returns:
        ``order`` (r,): the slot of each row. ``counts`` (experts,): rows of each expert.
        ``splits`` (2, experts): rows that this rank sends to each expert, and rows that it
        receives, which are the same on one device.

    Raises:
        RuntimeError: An id is no expert.
    """
    order = ids.sort(stable=True)[1]
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add(0, ids.long(), torch.ones_like(ids, dtype=torch.int64))
    return order, counts, torch.stack([counts, counts])


def moe_dispatch(
    x: torch.Tensor, order: torch.Tensor, splits: torch.Tensor, k: int
) -> torch.Tensor:
    """Rows (r, ...) of tokens ``x`` (r / k, ...): row i is the token of slot ``order[i]``."""
    return x[order if k == 1 else order.div(k, rounding_mode="floor")]


def moe_combine(
    rows: torch.Tensor,
    order: torch.Tensor,
    splits: torch.Tensor,
    k: int,
    shape: Sequence[int],
) -> torch.Tensor:
    """Tokens of shape ``shape``: the sum of each token's rows.

    Slots whose row is not here, or lies behind the last run, count as zeros. The transpose of
    :func:`moe_dispatch`, and its gradient.
    """
    position = torch.arange(order.shape[0], device=order.device)
    nowhere = order.shape[0]
    row_of_slot = order.new_full((shape[0] * k,), nowhere).scatter_(0, order, position)
    used = row_of_slot < splits[1].sum().clamp(max=nowhere)
    found = rows[row_of_slot.masked_fill(~used, 0)]
    found = torch.where(used.view(-1, *(1 for _ in rows.shape[1:])), found, 0)
    if k == 1:
        return found
    return found.view(-1, k, *rows.shape[1:]).sum(1)


def moe_spread(table: torch.Tensor, counts: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows (r, ...) with the entry of each row's expert in ``table`` (experts, ...).

    Rows behind the last run get zeros.
    """
    row = torch.arange(order.shape[0], device=order.device)
    expert = torch.searchsorted(counts.cumsum(0), row, right=True)
    beyond = expert >= table.shape[0]
    found = table[expert.masked_fill(beyond, 0)]
    return found.masked_fill(beyond.view(-1, *(1 for _ in table.shape[1:])), 0)


def moe_run_sums(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Sum of each run of rows, (experts, ...): the gradient of :func:`moe_spread`."""
    row = torch.arange(rows.shape[0], device=rows.device)
    expert = torch.searchsorted(counts.cumsum(0), row, right=True)
    # one more entry, for the rows behind the last run
    sums = rows.new_zeros(counts.shape[0] + 1, *rows.shape[1:])
    return sums.index_put((expert,), rows, accumulate=True)[:-1]


def grouped_mm(
    rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, share: float
) -> torch.Tensor:
    """``rows`` (r, k) times the matrix of each row's expert, ``weight`` (experts, k, n).

    Args:
        rows: Sorted by expert.
        weight: One matrix per expert.
        counts: Rows of each expert; rows behind the last run give zeros.
        share: Part of the rows that is expected in a run; only prices read it.
    """
    kernel = _fused_kernel(rows)
    if kernel:
        ends = counts.cumsum(0, dtype=torch.int32)
        found = torch.nn.functional.grouped_mm(rows.contiguous(), weight, offs=ends)
        beyond = torch.arange(rows.shape[0], device=rows.device) >= ends[-1]
        return found.masked_fill(beyond.unsqueeze(1), 0)
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            result[begin : begin + count] = rows[begin : begin + count] @ weight[expert]
        begin += count
    return result


def grouped_mm_weight(
    rows: torch.Tensor, dy: torch.Tensor, counts: torch.Tensor, share: float
) -> torch.Tensor:
    """Gradient of :func:`grouped_mm` for the weight: of each run, ``rows^T dy`` (experts, k, n)."""
    result = rows.new_zeros(counts.shape[0], rows.shape[1], dy.shape[1])
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            result[expert] = rows[begin : begin + count].t() @ dy[begin : begin + count]
        begin += count
    return result


def check_rows(splits: torch.Tensor, needed: torch.Tensor, room: int, what: str) -> torch.Tensor:
    """``splits`` as they are, if the fullest rank has room for its rows.

    Args:
        splits: Result of :func:`moe_route`.
        needed: Rows of the fullest rank, (1,), the same on every rank.
        room: Row budget of a rank.
        what: The operator, for the message.

    Raises:
        RowBudgetError: It has not; on every rank.
    """
    rows = int(needed)
    if rows > room:
        raise RowBudgetError(
            f"{what}: {rows} rows were routed to the experts of one rank, which has room for "
            f"{room}; raise expert_capacity, or leave it out to have room for all rows"
        )
    return splits.clone()


def grouped_mm_ends(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """:func:`grouped_mm` of runs that end where ``ends`` (experts,) says."""
    return grouped_mm(rows, weight, _counts(ends), 1.0)


def grouped_mm_ends_backward(
    dy: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`grouped_mm_ends` for rows and weight."""
    counts = _counts(ends)
    return (
        grouped_mm(dy, weight.transpose(1, 2), counts, 1.0),
        grouped_mm_weight(rows, dy, counts, 1.0),
    )


def _counts(ends: torch.Tensor) -> torch.Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def _fused_kernel(rows: torch.Tensor) -> bool:
    """Whether torch's own kernel takes these rows: bfloat16 on GPUs, aligned."""
    return (
        rows.is_cuda
        and rows.dtype == torch.bfloat16
        and rows.shape[1] % 8 == 0
        and hasattr(torch.nn.functional, "grouped_mm")
    )
