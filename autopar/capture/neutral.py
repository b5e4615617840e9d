"""The device-neutral operators of autopar, as torch operators in the namespace ``autopar``.

They mean the same on every device, carry what sharding must see (global index offsets for random
bits, no hidden mean), and are what programs in ``autopar.ir`` refer to as ``"autopar.<name>"``.

=======================  ==========================================================================
attention                (q, k, v, mask?, key?, causal, q_start, scale, dropout_p, op_id,
                         global_shape, offsets) -> (o, lse)
attention_backward       (do, q, k, v, o, lse, mask?, key?, causal, q_start, scale, dropout_p,
                         op_id, global_shape, offsets, need_dmask) -> (dq, dk, dv, dmask?)
dropout                  (x, key, p, op_id, global_shape, offsets) -> (y, kept)
dropout_backward         (dy, kept, p) -> dx
uniform, normal          (key, op_id, shape, global_shape, offsets, dtype) -> random numbers
batch_norm               (x, w?, b?, running_mean?, running_var?, momentum, eps)
                         -> (y, mean, invstd, new_running_mean?, new_running_var?)
batch_norm_backward      (dy, x, w?, mean, invstd, eps) -> (dx, dw?, db?)
nll_loss_sum             (logp, target, weight?, ignore_index) -> sum of ``-w logp[target]``
nll_count                (target, weight?, ignore_index) -> sum of weights that count
nll_loss_backward        (g, target, weight?, ignore_index, classes, dtype) -> dlogp
constant                 (values, shape, dtype) -> tensor
moe_route                (ids, experts, k) -> (order, counts, splits)
moe_dispatch             (x, order, splits, k) -> rows sorted by expert
moe_combine              (rows, order, splits, k, shape) -> tokens
check_rows               (splits, needed, room, what) -> splits, or an error
moe_spread               (table, counts, order) -> rows with their expert's entry
moe_run_sums             (rows, counts) -> sum of each expert's rows
grouped_mm               (rows, weight, counts, share) -> rows
grouped_mm_weight        (rows, dy, counts, share) -> gradient of the weight
grouped_mm_ends          (rows, weight, ends) -> rows
grouped_mm_ends_backward (dy, rows, weight, ends) -> (drows, dweight)
=======================  ==========================================================================

``attention`` and ``grouped_mm_ends`` are put into a model by :mod:`autopar.capture.interception`,
so they alone need autograd; the others replace torch's operators in the captured graph. The
functions below may be called directly, which is faster than through the dispatcher and leaves
results as they are laid out; the operators give dense ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from autopar.capture.attention import attention_forward, attention_gradients
from autopar.capture.attention_kernels import AttentionOptions
from autopar.capture.counter_rng import keep_mask, normal, random_bits, uniform
from autopar.capture.moe import (
    check_rows,
    grouped_mm,
    grouped_mm_ends,
    grouped_mm_ends_backward,
    grouped_mm_weight,
    moe_combine,
    moe_dispatch,
    moe_route,
    moe_run_sums,
    moe_spread,
)

_ACCUMULATE_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def attention(  # noqa: PLR0913  the operator's schema
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    causal: bool,
    q_start: int,
    scale: float,
    dropout_p: float,
    op_id: int,
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention; see :mod:`autopar.capture.attention` for the meaning of every argument."""
    options = AttentionOptions(causal, q_start, scale, dropout_p, op_id, global_shape, offsets)
    return attention_forward(q, k, v, mask, key, options)


def attention_backward(  # noqa: PLR0913  the operator's schema
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    causal: bool,
    q_start: int,
    scale: float,
    dropout_p: float,
    op_id: int,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    need_dmask: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`attention` for q, k, v, mask; the last is empty unless asked for."""
    options = AttentionOptions(causal, q_start, scale, dropout_p, op_id, global_shape, offsets)
    return attention_gradients(do, q, k, v, o, lse, mask, key, options, need_dmask=need_dmask)


def dropout(
    x: torch.Tensor,
    key: torch.Tensor,
    p: float,
    op_id: int,
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` with each element dropped with probability ``p``, the rest scaled; and the mask."""
    bits = random_bits(
        key, op_id, shape=x.shape, global_shape=global_shape, offsets=offsets
    )  # fmt: skip
    kept = keep_mask(bits, p)
    return dropout_backward(x, kept, p), kept


def dropout_backward(dy: torch.Tensor, kept: torch.Tensor, p: float) -> torch.Tensor:
    """Gradient of :func:`dropout`, which is the same map as its forward."""
    scale = 1.0 / (1.0 - p) if p < 1 else 0.0
    return torch.where(kept, dy * scale, 0.0)


def uniform_numbers(
    key: torch.Tensor,
    op_id: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Numbers in ``[0, 1)``."""
    bits = random_bits(key, op_id, shape=shape, global_shape=global_shape, offsets=offsets)
    return uniform(bits).to(dtype)


def normal_numbers(
    key: torch.Tensor,
    op_id: int,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Numbers of the standard normal distribution."""
    first, second = (
        random_bits(
            key, op_id, shape=shape, global_shape=global_shape, offsets=offsets, stream=stream
        )
        for stream in (0, 1)
    )
    return normal(first, second).to(dtype)


def batch_norm(
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch normalisation in training: x is (N, C, ...); statistics over all dims but C."""
    if running_mean is None or running_var is None:
        y, mean, invstd = torch.ops.aten.native_batch_norm.default(
            x, w, b, None, None, True, momentum, eps
        )
        return y, mean, invstd, x.new_empty(0), x.new_empty(0)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = (
        torch.ops.aten._native_batch_norm_legit_functional.default(
            x, w, b, running_mean, running_var, True, momentum, eps
        )
    )
    return result


def batch_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`batch_norm` for x, w, b; w's and b's are empty without w."""
    affine = w is not None
    dx, dw, db = torch.ops.aten.native_batch_norm_backward.default(
        dy, x, w, None, None, mean, invstd, True, eps, [True, affine, affine]
    )
    return (dx, dw, db) if affine else (dx, x.new_empty(0), x.new_empty(0))


def _label_weights(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = target != ignore_index
    label = torch.where(counts, target, 0)
    if weight is None:
        return label, counts.to(dtype)
    return label, torch.where(counts, weight.to(dtype)[label], 0.0)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return _ACCUMULATE_IN.get(dtype, dtype)


def nll_loss_sum(
    logp: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """Sum over samples of ``-weight[target] * logp[target]``, in float32 or float64."""
    dtype = _accumulator(logp.dtype)
    label, scale = _label_weights(target, weight, ignore_index, dtype)
    picked = logp.gather(1, label.unsqueeze(1)).squeeze(1).to(dtype)
    return -torch.where(scale != 0, picked * scale, 0.0).sum()


def nll_count(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum of the weights of the samples that count: what a mean divides by."""
    return _label_weights(target, weight, ignore_index, dtype)[1].sum()


def nll_loss_backward(
    g: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    classes: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Gradient for the log-probabilities (N, classes), of a scalar or (N,) gradient ``g``."""
    label, scale = _label_weights(target, weight, ignore_index, g.dtype)
    value = torch.where(scale != 0, -g * scale, 0.0).to(dtype)
    dlogp = torch.zeros((target.shape[0], classes), dtype=dtype, device=g.device)
    return dlogp.scatter_(1, label.unsqueeze(1), value.unsqueeze(1))


def constant(
    values: Sequence[float],
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A small tensor that was made from numbers in the model's code."""
    return torch.tensor(list(values), dtype=dtype, device=device).view(list(shape))


def _define(name: str, function: Callable[..., object], fake: Callable[..., object]) -> None:
    @functools.wraps(function)
    def dense(*args: object, **kwargs: object) -> object:
        # what the fakes promise to a compiler; kernels differ in the layout of their results
        result = function(*args, **kwargs)
        if isinstance(result, tuple):
            return tuple(tensor.contiguous() for tensor in result)
        assert isinstance(result, torch.Tensor)
        return result.contiguous()

    operator = torch.library.custom_op(f"autopar::{name}", dense, mutates_args=())
    operator.register_fake(fake)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=_lse_dtype(q))


def _attention_backward_fake(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    *rest: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    wanted = rest[-1] and mask is not None
    dmask = mask.new_empty(mask.shape) if wanted and mask is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dmask


def _batch_norm_fake(
    x: torch.Tensor,
    w: torch.Tensor | None,
    b: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    channels, stat = x.shape[1], _lse_dtype(x)
    running = channels if running_mean is not None else 0
    dtype = running_mean.dtype if running_mean is not None else x.dtype
    return (
        x.new_empty(x.shape),
        x.new_empty(channels, dtype=stat),
        x.new_empty(channels, dtype=stat),
        x.new_empty(running, dtype=dtype),
        x.new_empty(running, dtype=dtype),
    )


def _batch_norm_backward_fake(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, *_: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = (0,) if w is None else w.shape
    return x.new_empty(x.shape), x.new_empty(size), x.new_empty(size)


class _Context(Protocol):
    """What torch hands from a forward to its backward, and our own field on it."""

    saved_tensors: tuple[torch.Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]
    scalars: Sequence[object]

    def save_for_backward(self, *tensors: object) -> None:
        """Keep tensors."""


def _setup_context(
    ctx: _Context, inputs: tuple[object, ...], output: tuple[torch.Tensor, torch.Tensor]
) -> None:
    q, k, v, mask, key, *scalars = inputs
    ctx.save_for_backward(q, k, v, *output, mask, key)
    ctx.scalars = scalars


def _attention_autograd(
    ctx: _Context, do: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    need_dmask = ctx.needs_input_grad[3]
    dq, dk, dv, dmask = torch.ops.autopar.attention_backward(
        do, *ctx.saved_tensors, *ctx.scalars, need_dmask
    )
    return dq, dk, dv, dmask if need_dmask else None, *(None,) * 8


def _keep_operands(ctx: _Context, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_mm_autograd(ctx: _Context, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    drows, dweight = torch.ops.autopar.grouped_mm_ends_backward(dy, *ctx.saved_tensors)
    return drows, dweight, None


def _register() -> None:
    _define("attention", attention, _attention_fake)
    _define("attention_backward", attention_backward, _attention_backward_fake)
    torch.library.register_autograd(
        "autopar::attention", _attention_autograd, setup_context=_setup_context
    )
    _define(
        "dropout", dropout,
        lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)),
    )  # fmt: skip
    _define("dropout_backward", dropout_backward, lambda dy, *_: dy.new_empty(dy.shape))
    _define("batch_norm", batch_norm, _batch_norm_fake)
    _define("batch_norm_backward", batch_norm_backward, _batch_norm_backward_fake)
    _define(
        "nll_loss_sum", nll_loss_sum,
        lambda logp, *_: logp.new_empty((), dtype=_accumulator(logp.dtype)),
    )  # fmt: skip
    _define("nll_count", nll_count, lambda target, *rest: target.new_empty((), dtype=rest[-1]))
    _define(
        "nll_loss_backward", nll_loss_backward,
        lambda g, target, weight, ignore_index, classes, dtype: g.new_empty(
            (target.shape[0], classes), dtype=dtype
        ),
    )  # fmt: skip
    for name, function in (("uniform", uniform_numbers), ("normal", normal_numbers)):
        _define(
            name, function,
            lambda key, op_id, shape, global_shape, offsets, dtype: key.new_empty(
                shape, dtype=dtype
            ),
        )  # fmt: skip
    _define(
        "constant", constant,
        lambda values, shape, dtype, device=None: torch.empty(shape, dtype=dtype, device=device),
    )  # fmt: skip
    _register_moe()


def _register_moe() -> None:
    _define(
        "moe_route", moe_route,
        lambda ids, experts, k: (
            ids.new_empty(ids.shape, dtype=torch.int64),
            ids.new_empty(experts, dtype=torch.int64),
            ids.new_empty((2, experts), dtype=torch.int64),
        ),
    )  # fmt: skip
    _define(
        "moe_dispatch", moe_dispatch,
        lambda x, order, *_: x.new_empty((order.shape[0], *x.shape[1:])),
    )  # fmt: skip
    _define(
        "moe_combine", moe_combine,
        lambda rows, order, splits, k, shape: rows.new_empty(shape),
    )  # fmt: skip
    _define("check_rows", check_rows, lambda splits, *_: splits.new_empty(splits.shape))
    _define(
        "moe_spread", moe_spread,
        lambda table, counts, order: table.new_empty((order.shape[0], *table.shape[1:])),
    )  # fmt: skip
    _define(
        "moe_run_sums", moe_run_sums,
        lambda rows, counts: rows.new_empty((counts.shape[0], *rows.shape[1:])),
    )  # fmt: skip
    _define(
        "grouped_mm", grouped_mm,
        lambda rows, weight, *_: rows.new_empty((rows.shape[0], weight.shape[2])),
    )  # fmt: skip
    _define(
        "grouped_mm_weight", grouped_mm_weight,
        lambda rows, dy, counts, *_: rows.new_empty((counts.shape[0], rows.shape[1], dy.shape[1])),
    )  # fmt: skip
    _define(
        "grouped_mm_ends", grouped_mm_ends,
        lambda rows, weight, ends: rows.new_empty((rows.shape[0], weight.shape[2])),
    )  # fmt: skip
    _define(
        "grouped_mm_ends_backward", grouped_mm_ends_backward,
        lambda dy, rows, weight, ends: (rows.new_empty(rows.shape), weight.new_empty(weight.shape)),
    )  # fmt: skip
    torch.library.register_autograd(
        "autopar::grouped_mm_ends", _grouped_mm_autograd, setup_context=_keep_operands
    )


_register()
