from __future__ import annotations

import pytest

from autopar.errors import ShardingError
from autopar.ir.graph import TensorMeta
from autopar.sharding.emitter import Emitter
from autopar.sharding.placement import Layout, P, Partial, R, Shard, local_shape

SHAPE = (8, 10)


def _reshard(have: Layout, want: Layout, sizes: tuple[int, ...] = (2, 4)) -> list[str]:
    emitter = Emitter(("dp", "tp"), sizes)
    local = TensorMeta(local_shape(SHAPE, have, sizes), "float32")
    ref = emitter.reshard(emitter.bind("x", local), SHAPE, have, want)
    assert emitter.meta(ref).shape == local_shape(SHAPE, want, sizes)
    return [
        f"{n.op.split('.')[1]}:{n.args[-1] if 'reduce' in n.op else n.args[2]}"
        for n in emitter.nodes
    ]


def test_a_pending_sum_becomes_a_shard_by_one_reduce_scatter() -> None:
    assert _reshard((R, P), (R, Shard(0))) == ["reduce_scatter:tp"]


def test_a_pending_sum_becomes_whole_by_one_all_reduce() -> None:
    assert _reshard((P, R), (R, R)) == ["all_reduce:dp"]


def test_a_pending_maximum_is_never_scattered() -> None:
    assert _reshard((R, Partial("max")), (R, Shard(0)))[0] == "all_reduce:tp"


def test_moving_a_shard_to_another_dim_is_one_all_to_all() -> None:
    assert _reshard((R, Shard(0)), (R, Shard(1))) == ["all_to_all:1"]


def test_an_uneven_gather_is_cut_to_the_true_size() -> None:
    emitter = Emitter(("tp",), (4,))
    ref = emitter.bind("x", TensorMeta((8, 3), "float32"))
    out = emitter.reshard(ref, SHAPE, (Shard(1),), (R,))
    assert emitter.nodes[0].args[3] == 10
    assert emitter.meta(out).shape == (8, 10)


def test_an_inner_shard_is_undone_before_the_outer_one() -> None:
    ops = _reshard((Shard(0), Shard(0)), (R, R))
    assert ops == ["all_gather:tp", "all_gather:dp"]


def test_an_inner_shard_gives_way_to_an_outer_axis_that_cuts_the_same_dim() -> None:
    # blocks of a dim are nested: dp can't cut rows that tp has cut already
    ops = _reshard((P, Shard(0)), (Shard(0), Shard(0)))
    assert ops == ["all_gather:tp", "reduce_scatter:dp", "shard:%coord_tp"]


def test_nothing_moves_between_micro_batches() -> None:
    emitter = Emitter(("mb",), (4,))
    ref = emitter.bind("x", TensorMeta((2, 10), "float32"))
    with pytest.raises(ShardingError, match="inside a micro-batch"):
        emitter.reshard(ref, SHAPE, (Shard(0),), (R,))


def test_a_replicated_value_becomes_pending_without_communication() -> None:
    emitter = Emitter(("tp",), (4,))
    ref = emitter.bind("x", TensorMeta(SHAPE, "float32"))
    emitter.reshard(ref, SHAPE, (R,), (P,))
    assert [n.op for n in emitter.nodes] == ["local.first"]
    assert emitter.used_coords == {"tp"}
