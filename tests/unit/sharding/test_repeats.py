from __future__ import annotations

import pytest

from autopar.ir.graph import Graph
from autopar.sharding import propagation
from autopar.sharding.build import signatures_of
from autopar.sharding.propagate import DataAxes, DataSplits
from autopar.sharding.repeats import Piece, find_pieces, repeated_runs
from tests.joint_graphs import residual_network


def test_runs_cover_a_sequence_in_order() -> None:
    words = [7, 7, *[1, 2, 3, 1, 2, 3, 4] * 6, 9, *[5, 6] * 20, 8]
    runs = repeated_runs(words)
    assert [at for low, high in runs for at in range(low, high)] == list(range(len(words)))
    assert (2, 9) in runs  # the run whose repeats go furthest, not the shorter one inside
    assert (45, 47) in runs


def test_what_repeats_too_little_is_left_in_one_run() -> None:
    assert repeated_runs([1, 2, 1, 2, 3]) == [(0, 5)]


def test_layers_of_a_network_are_pieces_of_one_kind() -> None:
    graph = residual_network(12)
    pieces, _ = find_pieces(graph.nodes, lambda n: (n.op, n.meta, len(n.refs())))
    kinds = [p.kind for p in pieces if p.repeats]
    assert len(kinds) >= 20  # forward and backward of a layer
    assert len(set(kinds)) <= 4


@pytest.mark.parametrize("is_tied", [False, True])
def test_splits_are_those_of_a_walk_through_every_operator(
    monkeypatch: pytest.MonkeyPatch, is_tied: bool
) -> None:
    graph = residual_network(12, rows=16, is_tied=is_tied)
    found = _splits(graph)
    monkeypatch.setattr(propagation, "find_pieces", _one_piece)
    expected = _splits(graph)
    assert found == expected
    for one, other in zip(found, expected, strict=True):
        assert one.dp.moved_bytes == pytest.approx(other.dp.moved_bytes)
        assert one.mb.unsplit_bytes == other.mb.unsplit_bytes


def _splits(graph: Graph) -> list[DataSplits]:
    axes = DataAxes(graph, signatures_of(graph))
    return [axes.split(num_microbatches=mb, dp=dp) for mb, dp in ((1, 2), (2, 1), (4, 4), (2, 8))]


def _one_piece(nodes: tuple[object, ...], _: object) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    return (Piece(kind=0, low=0, high=len(nodes), outer=(), repeats=False),), ()
