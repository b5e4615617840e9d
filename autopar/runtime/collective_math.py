"""What each collective computes, from all ranks' operands, in plain torch and in rank order.

The lockstep simulator answers with these; the tests hold real process groups against them.
Reductions add in rank order, so that every run gives the same bits. Results share no memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.errors import DeadlockError
from autopar.runtime.requests import Collective
from autopar.sharding.placement import shard_size


def resolve(requests: Sequence[Collective]) -> list[torch.Tensor]:
    """The result of every rank.

    Args:
        requests: One per rank along the axis, in rank order, that differ in their tensors only.
    """
    first = requests[0]
    tensors = [r.tensor for r in requests]
    count = len(requests)
    match first.kind:
        case "all_reduce":
            total = reduce_in_order(tensors, first.op)
            return [total.clone() for _ in requests]
        case "all_gather":
            whole = torch.cat(tensors, first.dim).narrow(first.dim, 0, first.out_size)
            return [whole.clone(memory_format=torch.contiguous_format) for _ in requests]
        case "reduce_scatter":
            total = pad(reduce_in_order(tensors, first.op), first.dim, count)
            return [block.contiguous().clone() for block in total.chunk(count, first.dim)]
        case "all_to_all":
            parts = [
                pad(t, first.scatter_dim, count).chunk(count, first.scatter_dim) for t in tensors
            ]
            results = (torch.cat([p[i] for p in parts], first.dim) for i in range(count))
            return [
                r.narrow(first.dim, 0, first.out_size).clone(memory_format=torch.contiguous_format)
                for r in results
            ]
        case "all_to_all_rows":
            return _exchanged(requests)
        case "broadcast":
            return [tensors[first.root].clone() for _ in requests]
    raise DeadlockError(f"collective of unknown kind {first.kind!r} at {first.node}")


def _exchanged(requests: Sequence[Collective]) -> list[torch.Tensor]:
    """Every rank's rows from every rank, in rank order."""
    ranks = len(requests)
    counts = [r.row_counts(ranks) for r in requests]
    pieces = [
        torch.split(r.tensor[: sum(go)], go) for r, (go, _) in zip(requests, counts, strict=True)
    ]
    results = []
    for at, (request, (_, come)) in enumerate(zip(requests, counts, strict=True)):
        sent = [row[at] for row in pieces]
        if [p.shape[0] for p in sent] != come:
            raise DeadlockError(
                f"all_to_all_rows at {request.node}: rank {at} of the axis is sent "
                f"{[p.shape[0] for p in sent]} rows and expects {come}"
            )
        results.append(filled_up(torch.cat(sent), request.out_size))
    return results


def filled_up(rows: torch.Tensor, size: int) -> torch.Tensor:
    """``rows`` with zeros behind them, ``size`` in all."""
    result = rows.new_zeros((size, *rows.shape[1:]))
    result[: rows.shape[0]] = rows
    return result


def reduce_in_order(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Sum, maximum or minimum, first rank first."""
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        match op:
            case "sum":
                total.add_(tensor)
            case "max":
                total = torch.maximum(total, tensor)
            case "min":
                total = torch.minimum(total, tensor)
            case _:
                raise DeadlockError(f"reduction {op!r} is unknown; there are sum, max and min")
    return total


def pad(tensor: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """The tensor with ``dim`` filled up with zeros to ``parts`` equal blocks."""
    size = tensor.shape[dim]
    padded_size = parts * shard_size(size, parts)
    if padded_size == size:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = padded_size - size
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
