"""Random bits that depend only on a key, an operator id and the global index of an element.

Every rank draws the bits of its own block of a tensor: the same bits as one device would draw for
those elements, under every plan and again under recompute. The hash is splitmix64's finaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi

import torch

BITS = 31
_STEP = -0x61C8864680B583EB  # splitmix64's increment 0x9E3779B97F4A7C15 as a signed number
_MIX_1 = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_2 = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
_OPERATOR_STEP = 0x632BE59BD9B4E019
_STREAM_STEP = 0x2545F4914F6CDD1D


def _signed(value: int) -> int:
    wrapped = value & 0xFFFFFFFFFFFFFFFF
    return wrapped - (1 << 64) if wrapped >> 63 else wrapped


def _mix(hashed: torch.Tensor) -> torch.Tensor:
    # the shift of an int64 keeps the sign; x ^ (x >> k) is a bijection all the same
    hashed = (hashed ^ (hashed >> 30)) * _MIX_1
    hashed = (hashed ^ (hashed >> 27)) * _MIX_2
    return hashed ^ (hashed >> 31)


def random_bits(
    key: torch.Tensor,
    op_id: int,
    *,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
    stream: int = 0,
) -> torch.Tensor:
    """Uniform integers in ``[0, 2**31)`` for one block of a global tensor.

    Args:
        key: int64 scalar, a new one per training step, on the device of the result.
        op_id: Number of the operator among the random operators of the model.
        shape: Sizes of the block.
        global_shape: Sizes of the whole tensor, one per dim.
        offsets: First global index of the block, one per dim.
        stream: Tells several draws for one element apart.
    """
    index = torch.zeros((), dtype=torch.int64, device=key.device)
    rank = len(shape)
    for dim, (size, whole, start) in enumerate(zip(shape, global_shape, offsets, strict=True)):
        along = torch.arange(start, start + size, dtype=torch.int64, device=key.device)
        index = index * whole + along.view([-1 if d == dim else 1 for d in range(rank)])
    salt = _signed(op_id * _OPERATOR_STEP + stream * _STREAM_STEP)
    seeded = _mix(key + salt)
    return (_mix(index * _STEP + seeded) >> 32) & ((1 << BITS) - 1)


def keep_mask(bits: torch.Tensor, p: float) -> torch.Tensor:
    """Where an element is kept that is dropped with probability ``p``."""
    return bits >= int(p * (1 << BITS))


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """float32 numbers in ``[0, 1)`` of 24 bits each."""
    return (bits >> (BITS - 24)).to(torch.float32) * 2.0**-24


def normal(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """float32 numbers of the standard normal distribution (Box and Muller)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(first)))
    return radius * torch.cos(2 * pi * uniform(second))
