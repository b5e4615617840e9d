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
own_runs(order, counts, start, size,     of slots sorted by expert: the first ``room`` of the order
         room)                           turned so that the runs of experts [start, start + size)
                                         come first, their counts, and (2, experts) counts with
                                         zeros for other experts
own_exchange(order, sent, arrive,        the order with room for ``room`` rows, the counts of own
             parts, room)                experts, and ``sent`` above ``arrive``: rows of each
                                         expert that go, rows of each sender's that come
group_runs(rows, splits, parts,          rows by sender and expert, as they arrive, by expert and
           by_expert)                    sender; or the other way round. Zeros behind them
take_heads(x, start, count, readers,     of ``x`` (b, h, ...) the ``count`` key heads that the query
           group)                        heads from ``start`` read, ``readers`` of them each
put_heads(x, start, count, readers,      the sum of the taken heads in their places, zeros elsewhere
          group, heads)
pack(tensors, dims, parts)               (parts, n): tensors side by side, the dim of each cut into
                                         ``parts`` blocks, zero padded; flat where the dim is None
unpack(flat, shapes, dims)               of (parts, n) the tensors again, their blocks put together
                                         along their dims and cut to their shapes; views where a
                                         tensor lies as it is (dim None, or one part of dim 0)
to_host, on_host, to_device, on_device   copies to host memory and back: passes/host_copies.py
=======================================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch

from autopar.sharding.buckets import lies_as_it_is, packed_shape
from autopar.sharding.host_copies import ON_DEVICE, ON_HOST, TO_DEVICE, TO_HOST
from autopar.sharding.placement import shard_size
from passes.host_copies import on_device, on_host, to_device, to_host


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


def own_runs(
    order: torch.Tensor, counts: torch.Tensor, start: int, size: int, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of experts [start, start + size) first, the others behind; see the table above."""
    own = counts[start : start + size].clone()
    begin = counts[:start].sum()
    slots = order.shape[0]
    turned = order[(torch.arange(room, device=order.device) + begin) % max(1, slots)]
    masked = torch.zeros_like(counts)
    masked[start : start + size] = own
    return turned, own, torch.stack([masked, masked])


def own_exchange(
    order: torch.Tensor, sent: torch.Tensor, arrive: torch.Tensor, parts: int, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a rank needs to exchange rows; see the table above."""
    padded = torch.cat([order, order.new_zeros(room - order.shape[0])])
    return padded, arrive.view(parts, -1).sum(0), torch.stack([sent, arrive])


def group_runs(
    rows: torch.Tensor, splits: torch.Tensor, parts: int, by_expert: bool
) -> torch.Tensor:
    """Runs of rows in another order; see the table above."""
    lengths = splits[1].view(parts, -1)  # sender, expert
    begins = (splits[1].cumsum(0) - splits[1]).view(parts, -1)
    by_expert_length = lengths.t().reshape(-1)
    by_expert_begin = (by_expert_length.cumsum(0) - by_expert_length).view(-1, parts)
    if by_expert:
        to_length, source = by_expert_length, begins.t().reshape(-1)
    else:
        to_length, source = splits[1], by_expert_begin.t().reshape(-1)
    ends = to_length.cumsum(0)
    position = torch.arange(rows.shape[0], device=rows.device)
    run = torch.searchsorted(ends, position, right=True)
    beyond = run >= ends.shape[0]
    run = run.masked_fill(beyond, 0)
    picked = (source - ends + to_length)[run] + position
    found = rows[picked.masked_fill(beyond, 0)]
    return found.masked_fill(beyond.view(-1, *(1 for _ in rows.shape[1:])), 0)


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


def pack(tensors: Sequence[torch.Tensor], dims: Sequence[int | None], parts: int) -> torch.Tensor:
    """Tensors of one dtype as the columns of one matrix; see the table above."""
    shapes = [tuple(x.shape) for x in tensors]
    widths = [packed_shape(s, d, parts)[1] for s, d in zip(shapes, dims, strict=True)]
    flat = tensors[0].new_empty((parts, sum(widths)))
    # each is written where it belongs: rearranged copies of all would be alive at once
    for x, dim, piece in zip(tensors, dims, torch.split(flat, widths, 1), strict=True):
        if dim is None:
            piece.view(x.shape).copy_(x)
            continue
        front = x.movedim(dim, 0)
        block = shard_size(front.shape[0], parts)
        rows = piece.view(parts, block, *front.shape[1:])
        for row in range(parts):
            own = front[row * block : (row + 1) * block]
            rows[row, : own.shape[0]].copy_(own)
            rows[row, own.shape[0] :].zero_()
    return flat


def unpack(
    flat: torch.Tensor, shapes: Sequence[Sequence[int]], dims: Sequence[int | None]
) -> tuple[torch.Tensor, ...]:
    """What :func:`pack` put together, after it was communicated; see the table above."""
    parts = flat.shape[0]
    widths = [packed_shape(tuple(s), d, parts)[1] for s, d in zip(shapes, dims, strict=True)]
    pieces = torch.split(flat, widths, 1)
    return tuple(
        _tensor(piece, shape, dim, parts)
        for piece, shape, dim in zip(pieces, shapes, dims, strict=True)
    )


def _tensor(piece: torch.Tensor, shape: Sequence[int], dim: int | None, parts: int) -> torch.Tensor:
    if dim is None:
        return piece.reshape(shape)
    block = shard_size(shape[dim], parts)
    rest = [n for d, n in enumerate(shape) if d != dim]
    rows = piece.view(parts, block, *rest)
    if lies_as_it_is(dim, parts):
        return rows[0]
    whole = piece.new_empty(list(shape))
    front = whole.movedim(dim, 0)
    for row in range(parts):
        own = front[row * block : (row + 1) * block]
        own.copy_(rows[row, : own.shape[0]])
    return whole


LOCAL_OPS: Mapping[str, Callable[..., object]] = MappingProxyType(
    {
        "local.shard": shard,
        "local.mask": mask,
        "local.first": first,
        "local.start": start,
        "local.plus": plus,
        "local.shift_ids": shift_ids,
        "local.keep_rows": keep_rows,
        "local.own_runs": own_runs,
        "local.own_exchange": own_exchange,
        "local.group_runs": group_runs,
        "local.take_heads": take_heads,
        "local.put_heads": put_heads,
        "local.pack": pack,
        "local.unpack": unpack,
        TO_HOST: to_host,
        ON_HOST: on_host,
        TO_DEVICE: to_device,
        ON_DEVICE: on_device,
    }
)
"""Implementations by operator name."""
