"""Cut a whole tensor into the ranks' blocks, and put blocks together again.

Blocks are those of :mod:`autopar.sharding.placement`: ``ceil(size / n)`` along each sharded dim,
the first axis outermost, what lies beyond the true size is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.sharding.placement import Layout, Shard, shard_size


def take_block(
    tensor: torch.Tensor, layout: Layout, coordinate: Sequence[int], axis_sizes: Sequence[int]
) -> torch.Tensor:
    """The block at a coordinate: a view where nothing is padded.

    Args:
        tensor: The whole tensor.
        layout: One placement per axis; all but ``S(d)`` keep it whole.
        coordinate: Position along each axis.
        axis_sizes: Size of each axis.
    """
    for placement, position, parts in zip(layout, coordinate, axis_sizes, strict=True):
        if isinstance(placement, Shard) and parts > 1:
            tensor = _block(tensor, placement.dim, position, parts)
    return tensor


def _block(tensor: torch.Tensor, dim: int, position: int, parts: int) -> torch.Tensor:
    size = tensor.shape[dim]
    block = shard_size(size, parts)
    start = min(position * block, size)
    part = tensor.narrow(dim, start, min(block, size - start))
    if part.shape[dim] == block:
        return part
    shape = list(tensor.shape)
    shape[dim] = block
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def assemble(
    block_at: Callable[[tuple[int, ...]], torch.Tensor],
    shape: Sequence[int],
    layout: Layout,
    axis_sizes: Sequence[int],
) -> torch.Tensor:
    """The whole tensor from its blocks; the inverse of :func:`take_block`.

    Args:
        block_at: Gives the block at a coordinate; along axes that do not shard, only position 0 is
            asked for.
        shape: True, global shape.
        layout: One placement per axis.
        axis_sizes: Size of each axis.
    """
    if not layout:
        return block_at(())
    placement, parts = layout[0], axis_sizes[0]

    def inner(position: int, inner_shape: Sequence[int]) -> torch.Tensor:
        return assemble(
            lambda rest: block_at((position, *rest)), inner_shape, layout[1:], axis_sizes[1:]
        )

    if not isinstance(placement, Shard) or parts == 1:
        return inner(0, shape)
    sizes = list(shape)
    sizes[placement.dim] = shard_size(sizes[placement.dim], parts)
    whole = torch.cat([inner(position, sizes) for position in range(parts)], placement.dim)
    return whole.narrow(placement.dim, 0, shape[placement.dim])
