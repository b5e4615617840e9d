"""The local dialect: what a rank computes about its own block, as plain torch functions.

They run inside programs next to ATen operators, on real and on fake tensors. Coordinates are
integers. Blocks of a dim split over several axes are nested: block ``c0`` of ``ceil(size / n0)``
elements, in it block ``c1`` of ``ceil(ceil(size / n0) / n1)``, and so on.

=======================================  ==========================================================
shard(x, dim, coord, parts)              block ``coord`` of ``ceil(size / parts)``, zero padded
mask(x, dim, coords, parts, size, fill)  ``x`` with what lies beyond the true ``size`` overwritten
first(x, coord)                          ``x`` where coord is 0, else zeros
start(coords, parts, size)               integer: global index of the block's first element
plus(a, b)                               integer: a + b
shift_ids(ids, start, rows, fill, skip)  ``ids - start`` in [0, rows); ``fill`` for other ids and
                                         for ids equal to ``skip`` (None: no such id)
keep_rows(x, ids, start, rows)           ``x`` (ids..., h) with zeros where ids is not in
                                         [start, start + rows)
take_heads(x, start, count, readers,     of ``x`` (b, h, ...) the ``count`` key heads that the query
           group)                        heads from ``start`` read, ``readers`` of them each
put_heads(x, start, count, readers,      the sum of the taken heads in their places, zeros elsewhere
          group, heads)
=======================================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from autopar.sharding.placement import shard_size


def shard(x: torch.Tensor, dim: int, coord: int, parts: int) -> torch.Tensor:
    """Block ``coord`` of ``parts`` along ``dim``; short blocks are padded with zeros."""
    size = x.shape[dim]
    block = shard_size(size, parts)
    begin = min(coord * block, size)
    length = min(block, size - begin)
    piece = x.narrow(dim, begin, length)
    if length == block:
        # native_layer_norm_backward reads a strided mean or rstd wrongly on CPUs (torch 2.13)
        return piece.contiguous()
    padding = list(x.shape)
    padding[dim] = block - length
    return torch.cat([piece, x.new_zeros(padding)], dim)


def mask(
    x: torch.Tensor,
    dim: int,
    coords: Sequence[int],
    parts: Sequence[int],
    size: int,
    fill: float,
) -> torch.Tensor:
    """``x`` with the elements that are no part of the true dim set to ``fill``."""
    kept = size
    for coord, count in zip(coords, parts, strict=True):
        block = shard_size(size, count)
        kept = min(max(kept - coord * block, 0), block)
        size = block
    length = x.shape[dim]
    if kept >= length:
        return x
    position = torch.arange(length, device=x.device)
    beyond = (position >= kept).view([-1 if d == dim % x.dim() else 1 for d in range(x.dim())])
    return x.masked_fill(beyond, fill)


def first(x: torch.Tensor, coord: int) -> torch.Tensor:
    """``x`` on the first rank and zeros elsewhere: a whole value as a pending sum."""
    return x if coord == 0 else torch.zeros_like(x)


def start(coords: Sequence[int], parts: Sequence[int], size: int) -> int:
    """Global index of the first element of a block; it may lie beyond the true size."""
    begin = 0
    for coord, count in zip(coords, parts, strict=True):
        size = shard_size(size, count)
        begin += coord * size
    return begin


def plus(left: int, right: int) -> int:
    """Sum of two integers."""
    return left + right


def shift_ids(
    ids: torch.Tensor, start: int, rows: int, fill: int, skip: int | None
) -> torch.Tensor:
    """Ids counted from ``start``; ``fill`` outside of [0, rows) and for the id ``skip``."""
    near = ids - start
    foreign = (near < 0) | (near >= rows)
    if skip is not None:
        foreign = foreign | (ids == skip)
    return near.masked_fill(foreign, fill)


def keep_rows(x: torch.Tensor, ids: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """``x`` with the rows of ids outside of [start, start + rows) zeroed."""
    foreign = (ids < start) | (ids >= start + rows)
    return x.masked_fill(foreign.unsqueeze(-1), 0)


def take_heads(x: torch.Tensor, start: int, count: int, readers: int, group: int) -> torch.Tensor:
    """Key heads that a block of query heads reads; one may be taken several times."""
    return x.index_select(1, _heads(x, start, count, readers, group))


def put_heads(
    x: torch.Tensor, start: int, count: int, readers: int, group: int, heads: int
) -> torch.Tensor:
    """Gradients of taken heads, added up in the places that they were taken from."""
    whole = x.new_zeros((x.shape[0], heads, *x.shape[2:]))
    return whole.index_add(1, _heads(x, start, count, readers, group), x)


def _heads(x: torch.Tensor, start: int, count: int, readers: int, group: int) -> torch.Tensor:
    return (torch.arange(count, device=x.device) * readers + start) // group


LOCAL_OPS: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "local.shard": shard,
        "local.mask": mask,
        "local.first": first,
        "local.start": start,
        "local.plus": plus,
        "local.shift_ids": shift_ids,
        "local.keep_rows": keep_rows,
        "local.take_heads": take_heads,
        "local.put_heads": put_heads,
    }
)
"""Implementations by operator name."""
