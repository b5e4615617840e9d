"""Every change of layout over two and three axes, on all ranks, against the whole tensor."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.graph import TensorMeta
from autopar.sharding.emitter import Emitter
from autopar.sharding.placement import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    Shard,
    format_layout,
    local_shape,
)
from tests.oracle.shard_oracle import combine, run_nodes, split

PLACEMENTS: tuple[Placement, ...] = (R, P, Shard(0), Shard(1))


def _check(have: Layout, want: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    axes = ("dp", "tp", "cp")[: len(sizes)]
    emitter = Emitter(axes, sizes)
    x = torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    local = local_shape(shape, have, sizes)
    ref = emitter.reshard(emitter.bind("x", TensorMeta(local, "float64")), shape, have, want)
    if emitter.meta(ref).shape != local_shape(shape, want, sizes):
        return f"{format_layout(have)} -> {format_layout(want)}: shape {emitter.meta(ref).shape}"
    values = run_nodes(emitter.nodes, {"x": split(x, have, sizes, 0)}, axes, sizes)
    blocks = {coords: values[coords][ref.name] for coords in values}
    found = combine(blocks, want, sizes, shape)
    if isinstance(found, str) or not torch.allclose(found, x):
        return f"{format_layout(have)} -> {format_layout(want)}: wrong values"
    return ""


@pytest.mark.parametrize("shape", [(8, 12), (7, 10)], ids=["even", "uneven"])
def test_every_change_over_two_axes_keeps_the_value(shape: tuple[int, int]) -> None:
    layouts = list(itertools.product(PLACEMENTS, repeat=2))
    faults = [_check(a, b, shape, (2, 2)) for a in layouts for b in layouts]
    assert not [f for f in faults if f]


def test_every_change_over_three_axes_keeps_the_value() -> None:
    layouts = list(itertools.product(PLACEMENTS, repeat=3))
    pairs = list(itertools.product(layouts, layouts))[::7]
    faults = [_check(a, b, (8, 12), (2, 2, 2)) for a, b in pairs]
    assert not [f for f in faults if f]


def test_a_pending_maximum_is_resolved() -> None:
    for want in (R, Shard(0), Shard(1)):
        assert not _check((R, Partial("max")), (R, want), (8, 12), (2, 2))
