"""Roofline time of one operator on one device.

::

    time = kernels * launch overhead
         + max(flops / (peak * efficiency), bytes / (bandwidth * efficiency))

The efficiencies come from the device's :class:`~autopar.cluster.device.EfficiencyCurve`. Kernels
are taken one after another; what a compiler would fuse is priced apart, so predictions are for
eager programs. Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009; ours (the
efficiency curve, a general one that is fitted to no single paper).
"""

from __future__ import annotations

from autopar.cluster.device import MIN_TILE, Device, DeviceKind, EfficiencyCurve
from cost_models.flops import OpClass, Work


def work_time_s(work: Work, device: Device) -> float:
    """Seconds of ``work`` on ``device``; 0.0 for views.

    >>> from autopar.cluster.presets import PRESETS
    >>> big = Work(op_class=OpClass.MATMUL, flops=2.0 * 8192**3, moved_bytes=3 * 2 * 8192**2,
    ...            dtype="bfloat16", dims=(1, 8192, 8192, 8192))
    >>> h100 = PRESETS["h100-sxm"].device
    >>> round(big.flops / work_time_s(big, h100) / h100.peak_flops_for("bfloat16"), 2)
    0.71
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


def matmul_efficiency(dims: tuple[int, ...], curve: EfficiencyCurve) -> float:
    """Share of the peak that a matmul ``(b, m, n, k)`` reaches; 0 < share <= 1."""
    batch, m, n, k = (max(1, size) for size in dims)
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


def _tile(size: int, curve: EfficiencyCurve) -> int:
    """Edge of the tile for a dim of ``size``: the next power of two, within limits."""
    return min(curve.tile, max(MIN_TILE, 1 << (size - 1).bit_length()))


def _efficiency(work: Work, curve: EfficiencyCurve) -> float:
    match work.op_class:
        case OpClass.MATMUL:
            return matmul_efficiency(work.dims, curve)
        case OpClass.ATTENTION:
            return curve.attention_fraction
        case OpClass.CONV:
            return curve.conv_fraction
        case _:
            return 1.0
