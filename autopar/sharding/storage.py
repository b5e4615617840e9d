"""How parameters rest between steps: ZeRO's choice of the dim that data-parallel ranks share."""

from __future__ import annotations

from autopar.ir.graph import TensorMeta
from autopar.sharding.placement import Layout, R, Replicate, Shard


def storage_layout(meta: TensorMeta, compute: Layout, dp: int, zero_level: int) -> Layout:
    """Layout of a parameter at rest.

    Under ZeRO (any level over 0) the optimizer works on a shard over ``dp``. The shard's dim must
    not be one that ``tp`` shards, because a shard on an outer axis can't be gathered while an inner
    axis shards the same dim. The largest dim that ``dp`` divides is taken, else the largest that
    leaves no rank empty; a parameter without such a dim stays replicated.

    Args:
        meta: True shape.
        compute: Layout over (mb, dp, tp) in which programs read it.
        dp: Ranks along dp.
        zero_level: 0 to 3.
    """
    if zero_level == 0 or dp == 1 or not isinstance(compute[1], Replicate):
        return (R, compute[1], compute[2])
    free = [d for d in range(len(meta.shape)) if compute[2] != Shard(d)]
    even = [d for d in free if meta.shape[d] % dp == 0 and meta.shape[d] >= dp]
    uneven = [d for d in free if meta.shape[d] > (dp - 1) * -(-meta.shape[d] // dp)]
    for dims in (even, uneven):
        if dims:
            return (R, Shard(max(dims, key=lambda d: meta.shape[d])), compute[2])
    return (R, R, compute[2])
