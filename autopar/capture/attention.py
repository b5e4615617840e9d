"""Scaled dot-product attention and its backward: the meaning, as a formula.

``q`` is (B, H, S, D), ``k`` and ``v`` are (B, KV, T, D) with ``H % KV == 0``: query head h reads
key head ``h // (H / KV)``. Row i of ``q`` stands at position ``q_start + i``; with ``causal`` it
reads keys up to its position. A bool ``mask`` says which keys are read, a float one is added to
the scores; both broadcast to (B, H, S, T). A row that reads no key gives zeros. ``lse`` is the
logarithm of the sum of exponentials of each row (0 for a row that reads nothing), in float32 for
lower precisions.

Kernels of torch compute what they can (:mod:`autopar.capture.attention_kernels`), the formula the
rest: dropout, blocks of rows that do not start at 0, gradients of a mask.

Dropout bits are a hash of ``(key, op_id)`` and the global (batch, head, row, column), so a rank
that holds a block draws what one device draws: ``global_shape`` has the four global sizes,
``offsets`` the first index of the block in each.
"""

from __future__ import annotations

import torch

from autopar.capture.attention_kernels import (
    AttentionOptions,
    choose_kernel,
    fused_forward,
    fused_gradients,
)
from autopar.capture.counter_rng import keep_mask, random_bits


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result (B, H, S, Dv) and ``lse`` (B, H, S)."""
    kernel = choose_kernel(q, k, v, mask, options)
    if kernel is not None:
        return fused_forward(kernel, q, k, v, mask, options)
    scores = _scores(q, k, mask, options)
    lse = torch.logsumexp(scores, -1)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    weights = (scores - lse.unsqueeze(-1)).exp()
    if options.dropout_p > 0:
        weights = torch.where(_kept(weights, key, options), weights / (1 - options.dropout_p), 0.0)
    return _weighted(weights, v).to(q.dtype), lse


def attention_gradients(  # noqa: PLR0913  one per tensor of the operator
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    options: AttentionOptions,
    *,
    need_dmask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and mask (empty unless ``need_dmask``); weights are recomputed."""
    kernel = None if need_dmask else choose_kernel(q, k, v, mask, options)
    if kernel is not None:
        fused = fused_gradients(kernel, do, q, k, v, o, lse, mask, options)
        return *fused, q.new_empty(0)
    batch, heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    grouped = (batch, kv_heads, heads // kv_heads * rows, -1)
    work = torch.promote_types(q.dtype, torch.float32)
    q_work, k_work, v_work, do_work = (x.to(work) for x in (q, k, v, do))
    weights = (_scores(q, k, mask, options) - lse.unsqueeze(-1)).exp()
    dweights = torch.matmul(do_work.reshape(grouped), v_work.transpose(-1, -2))
    dweights = dweights.view(weights.shape)
    dropped = weights
    if options.dropout_p > 0:
        kept = _kept(weights, key, options)
        dropped = torch.where(kept, weights / (1 - options.dropout_p), 0.0)
        dweights = torch.where(kept, dweights / (1 - options.dropout_p), 0.0)
    delta = (do_work * o.to(work)).sum(-1, keepdim=True)
    dscores = weights * (dweights - delta)
    by_group = dscores.reshape(grouped)
    dq = (torch.matmul(by_group, k_work) * options.scale).view(q.shape)
    dk = torch.matmul(by_group.transpose(-1, -2), q_work.reshape(grouped)) * options.scale
    dv = torch.matmul(dropped.reshape(grouped).transpose(-1, -2), do_work.reshape(grouped))
    if need_dmask and mask is not None:
        dmask = dscores.sum_to_size(mask.shape).to(mask.dtype)
    else:
        dmask = q.new_empty(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    batch, heads, rows, _ = q.shape
    kv_heads, columns = k.shape[1], k.shape[2]
    work = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(work).reshape(batch, kv_heads, heads // kv_heads * rows, -1)
    scores = torch.matmul(grouped, k.to(work).transpose(-1, -2)) * options.scale
    scores = scores.view(batch, heads, rows, columns)
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask.to(work)
    if options.causal:
        row = torch.arange(rows, device=q.device).unsqueeze(-1) + options.q_start
        later = torch.arange(columns, device=q.device) > row
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _weighted(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    batch, heads, rows, columns = weights.shape
    kv_heads = v.shape[1]
    grouped = weights.reshape(batch, kv_heads, heads // kv_heads * rows, columns)
    return torch.matmul(grouped, v.to(weights.dtype)).view(batch, heads, rows, v.shape[-1])


def _kept(
    weights: torch.Tensor, key: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    if key is None:
        raise ValueError("attention: dropout_p > 0 needs a random key")
    bits = random_bits(
        key, options.op_id, shape=weights.shape,
        global_shape=options.global_shape, offsets=options.offsets,
    )  # fmt: skip
    return keep_mask(bits, options.dropout_p)
