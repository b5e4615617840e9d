"""Blocks of stored parameters, and parameters that programs read in slices."""

import pytest
import torch

from autopar.errors import PassError
from autopar.ir.graph import Part, TensorMeta
from autopar.runtime.parameters import block_at, store_parameter
from autopar.runtime.pieces import Composition, compositions
from autopar.sharding.placement import R, Shard
from autopar.sharding.programs import LocalPrograms, ParamSpec


def spec(name, shape, storage, owner=0):
    return ParamSpec(
        name=name, aliases=(), meta=TensorMeta(shape, "float32"), requires_grad=True, owner=owner,
        stages=(owner,), storage=(R, *storage), compute=(R, R, R),
    )  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 5, 8, 10])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_blocks_are_those_of_torch_chunk(size, parts):
    whole = torch.arange(size)
    chunks = torch.chunk(whole, parts)
    for at in range(parts):
        block = block_at((size,), (Shard(0),), (parts,), (at,)).of(whole)
        wanted = chunks[at] if at < len(chunks) else whole[:0]
        assert torch.equal(block, wanted)


def test_padding_is_zero_and_outside_the_view():
    plain = spec("w", (5, 2), (R, Shard(0)))
    item = store_parameter(
        Composition(plain, ((plain, None),), is_joint=True), torch.ones(5, 2),
        axis_sizes=(1, 1, 4), coordinate=(0, 2), mesh=None, device=torch.device("cpu"),
    )  # fmt: skip
    # ceil(5 / 4) = 2 rows each: 2, 2, 1, 0
    assert item.padded.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert item.view.shape == (1, 2)
    assert item.counted


def test_only_the_first_replica_is_counted():
    plain = spec("w", (4,), (R, Shard(0)))
    composition = Composition(plain, ((plain, None),), is_joint=True)
    counted = [
        store_parameter(
            composition, torch.ones(4), axis_sizes=(1, 2, 2), coordinate=(dp, tp), mesh=None,
            device=torch.device("cpu"),
        ).counted
        for dp in range(2)
        for tp in range(2)
    ]  # fmt: skip
    assert counted == [True, True, False, False]


def programs(params, sizes):
    empty: dict = {}
    return LocalPrograms(
        axis_sizes=sizes, stages=(), params=params, buffers=empty, buffer_stages=empty, users=empty,
        user_stages=empty, tangents=empty, results=(), forward_edges=empty, backward_edges=empty,
        edge_metas=empty, grads=empty, saved=empty,
    )  # fmt: skip


def slices(layout, dim=1):
    parts = {f"w[{dim}, {a}:{a + 4}]": Part("w", dim, a, a + 4) for a in (0, 4, 8)}
    shape = (6, 4) if dim == 1 else (4, 6)
    params = {name: spec(name, shape, layout) for name in parts}
    return params, parts


def test_slices_with_one_layout_are_views_of_the_parameter():
    params, parts = slices((Shard(0), R))
    found = compositions(programs(params, (1, 2, 2)), parts, {"w": TensorMeta((6, 12), "float32")})
    whole = torch.arange(72.0).reshape(6, 12)
    item = store_parameter(
        found["w"], whole, axis_sizes=(1, 2, 2), coordinate=(1, 0), mesh=None,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert item.is_joint
    assert item.spec.storage == (R, Shard(0), R)
    for piece, start in zip(item.pieces, (0, 4, 8), strict=True):
        assert torch.equal(piece.padded, whole[3:, start : start + 4])
        assert piece.padded.untyped_storage().data_ptr() == item.padded.untyped_storage().data_ptr()
    gradients = {
        piece.spec.name: torch.full((3, 4), float(i)) for i, piece in enumerate(item.pieces)
    }
    joined = item.join(gradients)
    assert joined[0].tolist() == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    assert gradients == {}


def test_slices_that_split_the_sliced_dim_have_buffers_of_their_own():
    params, parts = slices((R, Shard(1)))
    found = compositions(programs(params, (1, 1, 2)), parts, {"w": TensorMeta((6, 12), "float32")})
    assert not found["w"].is_joint
    assert found["w"].spec.storage == (R, R, Shard(1))


def test_slices_of_unlike_layouts_rest_whole():
    params, parts = slices((R, Shard(1)))
    odd = next(iter(params))
    params[odd] = spec(odd, (6, 4), (R, Shard(0)))
    found = compositions(programs(params, (1, 1, 2)), parts, {"w": TensorMeta((6, 12), "float32")})
    assert found["w"].spec.storage == (R, R, R)


def test_slices_with_gaps_are_refused():
    params, parts = slices((R, R))
    gone = "w[1, 4:8]"
    del params[gone], parts[gone]
    with pytest.raises(PassError, match="gaps"):
        compositions(programs(params, (1, 1, 1)), parts, {"w": TensorMeta((6, 12), "float32")})
