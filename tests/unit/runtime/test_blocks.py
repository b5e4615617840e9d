"""Blocks cut by hand, and put together again."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from autopar.runtime.blocks import assemble, take_block
from autopar.runtime.collective_math import pad, resolve
from autopar.runtime.requests import Collective
from autopar.sharding.placement import P, R, Shard, local_shape


def test_five_rows_over_two_ranks_by_hand():
    x = torch.arange(5)
    assert take_block(x, (Shard(0),), (0,), (2,)).tolist() == [0, 1, 2]
    assert take_block(x, (Shard(0),), (1,), (2,)).tolist() == [3, 4, 0]  # the last is padding


def test_a_rank_without_rows_gets_zeros():
    x = torch.arange(1, 6)
    assert take_block(x, (Shard(0),), (3,), (4,)).tolist() == [0, 0]  # blocks of two: 2, 2, 1, 0


def test_the_first_axis_is_the_outer_one():
    x = torch.arange(8)
    layout = (Shard(0), Shard(0))
    blocks = {c: take_block(x, layout, c, (2, 2)).tolist() for c in product(range(2), repeat=2)}
    assert blocks == {(0, 0): [0, 1], (0, 1): [2, 3], (1, 0): [4, 5], (1, 1): [6, 7]}


def test_an_even_block_is_a_view():
    x = torch.arange(8)
    assert take_block(x, (Shard(0),), (1,), (2,))._base is x


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 9), (3, 3), (10, 1)])
@pytest.mark.parametrize(
    "layout", [(Shard(0), Shard(0), R), (Shard(0), Shard(1), Shard(0)), (P, R, Shard(1)), (R, R, R)]
)
def test_blocks_put_together_are_the_whole(shape, layout):
    sizes = (2, 3, 2)
    x = torch.randn(shape)
    for coordinate in product(*map(range, sizes)):
        block = take_block(x, layout, coordinate, sizes)
        assert tuple(block.shape) == local_shape(shape, layout, sizes)
    whole = assemble(lambda c: take_block(x, layout, c, sizes), shape, layout, sizes)
    assert torch.equal(whole, x)


def requests(kind: str, tensors: list[torch.Tensor], **fields) -> list[Collective]:
    return [Collective(kind, t, "tp", node="n", **fields) for t in tensors]


def test_all_reduce_by_hand():
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    assert resolve(requests("all_reduce", tensors, op="sum"))[1].tolist() == [11.0, 22.0]
    assert resolve(requests("all_reduce", tensors, op="max"))[0].tolist() == [10.0, 20.0]
    assert resolve(requests("all_reduce", tensors, op="min"))[0].tolist() == [1.0, 2.0]


def test_all_gather_cuts_padding_off():
    tensors = [torch.tensor([[1, 2]]), torch.tensor([[3, 0]])]
    assert resolve(requests("all_gather", tensors, dim=1, out_size=3))[0].tolist() == [[1, 2, 3]]


def test_reduce_scatter_pads_with_zeros():
    tensors = [torch.ones(3), 2 * torch.ones(3)]
    first, second = resolve(requests("reduce_scatter", tensors, op="sum", dim=0))
    assert (first.tolist(), second.tolist()) == ([3.0, 3.0], [3.0, 0.0])


def test_all_to_all_is_a_transposition_of_blocks():
    # rank 0 has columns 0, 1 of a 3 x 3 matrix, rank 1 column 2 and padding; rows go out
    whole = torch.arange(9).view(3, 3)
    tensors = [whole[:, :2], torch.cat([whole[:, 2:], torch.zeros(3, 1, dtype=torch.int64)], 1)]
    first, second = resolve(requests("all_to_all", tensors, dim=1, scatter_dim=0, out_size=3))
    assert first.tolist() == whole[:2].tolist()
    assert second.tolist() == [[6, 7, 8], [0, 0, 0]]


def test_results_of_a_collective_share_no_memory():
    results = resolve(requests("all_reduce", [torch.ones(2), torch.ones(2)], op="sum"))
    results[0].zero_()
    assert results[1].tolist() == [2.0, 2.0]


def test_padding_nothing_copies_nothing():
    x = torch.ones(4)
    assert pad(x, 0, 2) is x
