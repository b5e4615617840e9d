"""torch's fused attention kernels for the cases that they compute as the formula does.

No kernel draws our dropout bits, and none knows ``q_start``; only the CPU's takes a mask here.
``lse`` is the natural logarithm in all of them, so that any backward follows any forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

_FLASH_MAX_WIDTH = 256  # and a multiple of 8: limits of the CUDA flash kernels
_LSE_ALIGNMENT = 32  # the memory-efficient CUDA kernel keeps rows of lse padded to this
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What attention does besides its tensors; see :mod:`autopar.capture.attention`."""

    causal: bool
    q_start: int
    scale: float
    dropout_p: float
    op_id: int
    global_shape: Sequence[int]
    offsets: Sequence[int]


class Kernel(StrEnum):
    """A fused implementation."""

    CPU = "cpu"
    CUDA_FLASH = "cuda_flash"
    CUDA_EFFICIENT = "cuda_efficient"


def choose_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> Kernel | None:
    """The kernel that computes this attention, or None if only the formula does."""
    width = q.shape[-1]
    if options.dropout_p > 0 or (options.causal and options.q_start != 0):
        return None
    if width != v.shape[-1] or q.numel() == 0 or v.numel() == 0:
        return None
    if q.device.type == "cpu":
        return Kernel.CPU if q.dtype != torch.float16 else None
    # the CUDA kernels align causal rows at the end, the formula at the start
    aligned = not options.causal or q.shape[-2] == k.shape[-2]
    if q.device.type != "cuda" or mask is not None or not aligned or width % 8:
        return None
    if q.dtype in _HALF and width <= _FLASH_MAX_WIDTH:
        return Kernel.CUDA_FLASH
    return Kernel.CUDA_EFFICIENT if q.dtype == torch.float32 else None


def fused_forward(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and ``lse``."""
    aten, scale = torch.ops.aten, options.scale
    q, k, v = (_rows(x) for x in (q, k, v))
    if kernel is Kernel.CPU:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, options.causal, attn_mask=_float_bias(mask, q), scale=scale
        )
    elif kernel is Kernel.CUDA_FLASH:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, options.causal, False, scale=scale
        )
    else:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, _repeated(k, q), _repeated(v, q), None, True, 0.0, options.causal, scale=scale
        )
        lse = lse[..., : q.shape[-2]]
    return out, lse


def fused_gradients(  # noqa: PLR0913  one per tensor of the operator
    kernel: Kernel,
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v."""
    aten, causal, scale = torch.ops.aten, options.causal, options.scale
    do, q, k, v, o = (_rows(x) for x in (do, q, k, v, o))
    if kernel is Kernel.CUDA_FLASH:  # reads fewer key heads by itself
        unused = q.new_empty(2, dtype=torch.uint64)  # random state: there is no dropout
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, None, None, q.shape[-2], k.shape[-2], 0.0, causal, unused,
            unused.new_empty(()), scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    k_all, v_all = _repeated(k, q), _repeated(v, q)
    if kernel is Kernel.CPU:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k_all, v_all, o, lse, 0.0, causal, attn_mask=_float_bias(mask, q), scale=scale
        )
    else:
        missing = -q.shape[-2] % _LSE_ALIGNMENT
        padded = torch.nn.functional.pad(lse, (0, missing), value=float("inf"))
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            do, q, k_all, v_all, None, o, padded, unused, unused, 0.0, [True, True, True, False],
            causal, scale=scale,
        )  # fmt: skip
    return dq, _summed(dk, k), _summed(dv, v)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Key or value heads, one for each query head."""
    group = q.shape[1] // x.shape[1]
    return x.repeat_interleave(group, 1) if group > 1 else x


def _summed(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Gradient of the heads that were repeated."""
    group = gradient.shape[1] // x.shape[1]
    if group == 1:
        return gradient
    batch, _, *rest = gradient.shape
    return gradient.reshape(batch, x.shape[1], group, *rest).sum(2)


def _float_bias(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        bias = bias.masked_fill_(~mask, float("-inf"))
    else:
        bias = mask.to(q.dtype)
    return bias.view((1,) * (4 - bias.dim()) + tuple(bias.shape))
