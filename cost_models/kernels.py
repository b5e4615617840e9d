"""What the kernels of a framework do of an operator's work: attention, 8-bit matmuls.

The rates of a device (:class:`~autopar.cluster.device.EfficiencyCurve`) are those of its best
kernels. An older or differently made kernel for the same operator reaches a share of them, which
depends on the kernel and not on who measured it. Which kernels a program runs is told by name.

Source: Dao et al., "FlashAttention", 2022, and "FlashAttention-2", 2023; Micikevicius et al., "FP8
formats for deep learning", 2022; constants as marked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from cost_models.constants import CONSTANTS, PriceConstants
from cost_models.flops import OpClass, Work

FLOAT8 = "float8"  # key of peak_flops


class Backend(StrEnum):
    """What starts the kernels."""

    EAGER = "eager"
    COMPILED = "compiled"


class AttentionKernel(StrEnum):
    """How fused attention is computed."""

    FLASH_1 = "flash-1"
    FLASH_TRITON = "flash-triton"
    FLASH_2 = "flash-2"


class Float8(StrEnum):
    """How scales of 8-bit matmuls are found: one per tensor, or one per row."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"


# Bytes moved per element of an operand that is cast: read for its maximum, read again, written.
CAST_BYTES = 2 + 2 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels a training program runs.

    Attributes:
        backend: Eager or compiled.
        attention: Kernel of fused attention.
        float8: Scaling of 8-bit linear layers; None for the program's own dtype.
    """

    backend: Backend = Backend.EAGER
    attention: AttentionKernel = AttentionKernel.FLASH_2
    float8: Float8 | None = None


def attention_share(kernel: AttentionKernel, constants: PriceConstants = CONSTANTS) -> float:
    """Share of FlashAttention-2's rate that ``kernel`` reaches on the same device.

    Version 1 and its Triton form split work over heads only, and inside a block between the wrong
    warps.
    """
    match kernel:
        case AttentionKernel.FLASH_1:
            return constants.flash_1_share
        case AttentionKernel.FLASH_TRITON:
            return constants.flash_triton_share
        case AttentionKernel.FLASH_2:
            return 1.0


def kernel_works(
    work: Work, kernels: Kernels, constants: PriceConstants = CONSTANTS
) -> tuple[Work, ...]:
    """``work`` as these kernels do it.

    A slower kernel is given more FLOPs in proportion. An 8-bit matmul is preceded by the casts of
    its two operands, one kernel each if compiled, two if not. Batched matmuls, those of attention
    that is not fused, stay in the program's dtype.

    >>> score = Work(op_class=OpClass.ATTENTION, flops=6.0)
    >>> kernel_works(score, Kernels()) == (score,)
    True
    """
    if work.op_class is OpClass.ATTENTION:
        return (replace(work, flops=work.flops / attention_share(kernels.attention, constants)),)
    if work.op_class is OpClass.MATMUL and kernels.float8 is not None and work.dims[:1] == (1,):
        share = constants.rowwise_share if kernels.float8 is Float8.ROWWISE else 1.0
        _, m, n, k = work.dims
        cast = Work(
            op_class=OpClass.MEMORY,
            moved_bytes=float(CAST_BYTES * (m * k + k * n)),
            num_kernels=2 if kernels.backend is Backend.COMPILED else 4,
        )
        return (cast, replace(work, dtype=FLOAT8, flops=work.flops / share))
    return (work,)
