"""Roofline time of one operator on one device.

::

    time = kernels * launch overhead
         + max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))

The efficiencies come from the device's :class:`~autopar.cluster.device.EfficiencyCurve`. Kernels
are taken one after another; what a kernel library or a compiler fuses is merged beforehand
(:mod:`cost_models.kernels`), and what the host adds comes after (:mod:`cost_models.host`).

**Matmuls on GPUs.** The output is cut into tiles that are dealt to the multiprocessors in waves. A
tile of ``tm x tn`` takes ``2 tm tn (k + half_k)`` FLOP at a rate that falls with its edge, since a
small tile reads more per FLOP. Fewer tiles than multiprocessors leave some idle, unless k is cut
as well; a last wave that is not full loses ``wave_share`` of what it leaves idle. The library is
taken to choose the best tile and cut. Sizes count as the next multiple of ``alignment``. Every
choice costs more for longer operands, and so does the best of them.

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009; NVIDIA, "Matrix
Multiplication Background User's Guide" (tiles and waves); ours (the curve's form).
"""

from __future__ import annotations

from functools import lru_cache

from autopar.cluster.device import MIN_TILE, Device, DeviceKind, EfficiencyCurve
from cost_models.flops import OpClass, Work

# Output tiles that matmul libraries have kernels for. [published: NVIDIA's guide, and smaller ones]
TILES = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (32, 32), (128, 16), (16, 128), (16, 16),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32)  # cuts of k
# A tile that does r = tm tn / (tm + tn) multiply-adds for each element that it reads runs at
# r / (r + HALF_REUSE) of the rate. [general] 0.97 of the largest tile's rate at 128 x 128
HALF_REUSE = 8.0
LARGEST_REUSE = 256 * 128 / (256 + 128)
# Head width of fused attention at which half of the matmul units' rate is lost to the softmax.
# [general] heads of 64 reach 0.8 of what heads of 128 do: Dao, "FlashAttention-2", 2023, figure 4
HALF_HEAD = 43.0
FULL_HEAD = 128
ATTENTION_ROWS = 128  # query rows that a multiprocessor works on at once [published: the same]
HALF_SEQUENCE = 256.0  # [general] keys at which the loop over them reaches half of its rate


def work_time_s(work: Work, device: Device) -> float:
    """Seconds of ``work`` on ``device``; 0.0 for views.

    >>> from autopar.cluster.presets import PRESETS
    >>> big = Work(op_class=OpClass.MATMUL, flops=2.0 * 8192**3, moved_bytes=3 * 2 * 8192**2,
    ...            dtype="bfloat16", dims=(1, 8192, 8192, 8192))
    >>> h100 = PRESETS["h100-sxm"].device
    >>> 0.6 < big.flops / work_time_s(big, h100) / h100.peak_flops_for("bfloat16") < 0.9
    True
    """
    if work.op_class is OpClass.FREE:
        return 0.0
    curve = device.curve
    moved_s = work.moved_bytes / (device.memory_bandwidth_bytes_per_s * curve.memory_fraction)
    arithmetic_s = 0.0
    # GPUs hide element-wise arithmetic behind the memory
    if work.flops and (work.op_class is not OpClass.MEMORY or device.kind is DeviceKind.CPU):
        peak = device.peak_flops_for(work.dtype)
        arithmetic_s = work.flops / (peak * _efficiency(work, curve))
    return work.num_kernels * device.launch_overhead_s + max(moved_s, arithmetic_s)


@lru_cache(maxsize=1 << 16)
def matmul_efficiency(dims: tuple[int, ...], curve: EfficiencyCurve) -> float:
    """Share of the peak that a matmul ``(b, m, n, k)`` reaches; 0 < share <= 1."""
    batch, m, n, k = (max(1, size) for size in dims)
    if curve.num_units:
        return curve.matmul_fraction * batch * m * n * k / _wave_cost(batch, m, n, k, curve)
    tile_m, tile_n = _tile(m, curve), _tile(n, curve)
    rows, columns = -(-m // tile_m), -(-n // tile_n)
    pieces = batch * rows * columns * max(1.0, k / curve.split_k)
    # the last tile of a row or column works on padding as well
    filled = m * n / (rows * tile_m * columns * tile_n)
    return (
        curve.matmul_fraction
        * filled
        * (pieces / (pieces + curve.half_tiles))
        * (k / (k + curve.half_k))
    )


def attention_efficiency(
    dims: tuple[int, ...], curve: EfficiencyCurve, *, is_backward: bool = False
) -> float:
    """Share of the peak that fused attention reaches; 0 < share <= 1.

    Args:
        dims: ``(batch x heads, query rows, key rows, head width)``; empty for the large limit.
        curve: Of the device.
        is_backward: Whether it is the backward pass.
    """
    fraction = curve.attention_backward_fraction if is_backward else curve.attention_fraction
    if len(dims) != 4:
        return fraction
    groups, rows, keys, width = (max(1, size) for size in dims)
    by_width = width / (width + HALF_HEAD) * (FULL_HEAD + HALF_HEAD) / FULL_HEAD
    pieces = groups * rows / ATTENTION_ROWS
    by_pieces = min(1.0, pieces / curve.num_units) if curve.num_units else 1.0
    return fraction * min(1.0, by_width) * keys / (keys + HALF_SEQUENCE) * by_pieces


def _wave_cost(batch: int, m: int, n: int, k: int, curve: EfficiencyCurve) -> float:
    """Multiply-adds of the whole device while the best choice of tile and cut runs."""
    a = curve.alignment
    m, n, k = (-(-size // a) * a for size in (m, n, k))
    best = float("inf")
    for tile_m, tile_n in TILES:
        tiles = batch * -(-m // tile_m) * -(-n // tile_n)
        reuse = tile_m * tile_n / (tile_m + tile_n)
        rate = reuse / (reuse + HALF_REUSE) * (LARGEST_REUSE + HALF_REUSE) / LARGEST_REUSE
        for split in SPLITS:
            waves = tiles * split / curve.num_units
            lost = -(-tiles * split // curve.num_units)
            waves = curve.wave_share * lost + (1.0 - curve.wave_share) * max(1.0, waves)
            cost = waves * tile_m * tile_n * (k / split + curve.half_k * (2 if split > 1 else 1))
            best = min(best, cost / rate)
            if tiles * split >= curve.num_units:
                break  # all are busy: further cuts only start more pieces
    return best * curve.num_units


def _tile(size: int, curve: EfficiencyCurve) -> int:
    """Edge of the tile for a dim of ``size``: the next power of two, within limits."""
    return min(curve.tile, max(MIN_TILE, 1 << (size - 1).bit_length()))


def _efficiency(work: Work, curve: EfficiencyCurve) -> float:
    match work.op_class:
        case OpClass.MATMUL:
            return matmul_efficiency(work.dims, curve)
        case OpClass.ATTENTION:
            return attention_efficiency(work.dims, curve, is_backward=work.is_backward)
        case OpClass.CONV:
            return curve.conv_fraction
        case _:
            return 1.0
