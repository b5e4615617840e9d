"""Masks that depend on no input are evaluated on one copy of what is only repeated."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.mask_values import classify_masks
from tests.graphs import GraphBuilder

BATCH, LENGTH = 64, 32


class _LargestStorage(TorchDispatchMode):
    """Notes the most bytes that one result of an operator holds."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


def _packed_mask(*, equal_rows: bool):
    """Whether a query may see a key: not later, and of the same run of positions.

    The positions come from a concatenation, which writes the rows of the batch out.
    """
    g = GraphBuilder()
    one = g.op("one", "aten.arange.start_step", (0, LENGTH, 1), (LENGTH,), dtype="int64")
    row = g.op("row", "aten.view.default", (one, (1, LENGTH)), (1, LENGTH), dtype="int64")
    rows = g.op(
        "rows", "aten.expand.default", (row, (BATCH, LENGTH)), (BATCH, LENGTH), dtype="int64"
    )
    if not equal_rows:
        ids = g.op("ids", "aten.arange.start_step", (0, BATCH, 1), (BATCH,), dtype="int64")
        column = g.op("column", "aten.view.default", (ids, (BATCH, 1)), (BATCH, 1), dtype="int64")
        rows = g.op("moved", "aten.sub.Tensor", (rows, column), (BATCH, LENGTH), dtype="int64")
    first = g.op("first", "aten.slice.Tensor", (rows, 1, 0, 1, 1), (BATCH, 1), dtype="int64")
    tail = g.op(
        "tail", "aten.slice.Tensor", (rows, 1, 1, LENGTH, 1), (BATCH, LENGTH - 1), dtype="int64"
    )
    joined = g.op("joined", "aten.cat.default", ((first, tail), 1), (BATCH, LENGTH), dtype="int64")
    shapes = ((BATCH, 1, LENGTH, 1), (BATCH, 1, 1, LENGTH))
    queries, keys = (
        g.op(name, "aten.view.default", (joined, shape), shape, dtype="int64")
        for name, shape in zip(("queries", "keys"), shapes, strict=True)
    )
    square = (BATCH, 1, LENGTH, LENGTH)
    g.op("mask", "aten.le.Tensor", (keys, queries), square, dtype="bool")
    return g.build()


def test_rows_that_a_concatenation_wrote_out_are_compared_once():
    with _LargestStorage() as largest:
        forms = classify_masks(_packed_mask(equal_rows=True), ["mask"])

    assert forms == {"mask": (True, 0)}
    assert largest.num_bytes <= BATCH * LENGTH * 8  # of the positions, not BATCH * LENGTH ** 2


def test_rows_that_differ_in_value_are_all_looked_at():
    graph = _packed_mask(equal_rows=False)

    assert classify_masks(graph, ["mask"]) == {"mask": (True, 0)}
