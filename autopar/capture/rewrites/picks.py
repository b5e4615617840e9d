"""Rules for indexing by tensors where it is something simpler: a view, or a gather row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from autopar.capture.rewrites.builder import Builder, Rule, Value, broadcast
from autopar.capture.rewrites.views import result_shape
from autopar.ir.graph import Arg, Node, Ref, TensorMeta


def _index(b: Builder, node: Node) -> Value:
    """Indexing by the whole range of each dim, in order, is a view; one row's own index, a gather.

    Masks of model libraries are made by the one, pooled tokens by the other
    (``hidden[arange(B), last]``); as an index it would tie the batch to its global size.
    """
    value, indices = node.args
    assert isinstance(indices, tuple)
    shape = b.shape(value)
    rows = _row_index(b, shape, indices)
    if rows is not None:
        picked = b.emit("aten.gather.default", (value, 1, rows), _like(b, value, rows))
        return b.view(picked, result_shape(node))
    if len(indices) != len(shape):
        return b.keep(node)
    position = -1
    for index, size in zip(indices, shape, strict=True):
        along = _whole_range(b, index, size, len(result_shape(node)))
        if along is None or along <= position:
            return b.keep(node)
        position = along
    return b.view(value, result_shape(node))


def _whole_range(b: Builder, index: object, size: int, rank: int) -> int | None:
    """The result dim along which ``index`` counts 0, 1, ..., size - 1, or None."""
    if not isinstance(index, Ref):
        return None
    source = b.producer(index)
    if source is not None and source.op == "aten.view.default":
        source = b.producer(source.args[0])
    if source is None or source.op != "aten.arange.start_step" or source.args != (0, size, 1):
        return None
    sizes = b.shape(index)
    along = [dim for dim, extent in enumerate(sizes) if extent == size]
    if size == 1 or len(along) != 1 or b.meta(index).numel != size:
        return None
    return along[0] + rank - len(sizes)


def _index_put(b: Builder, node: Node) -> Value:
    """``index_put(x, indices, values, accumulate)``: the gradient of a gather row by row."""
    value, indices, source, *accumulate = node.args
    assert isinstance(indices, tuple)
    rows = _row_index(b, b.shape(value), indices)
    if rows is None or b.meta(rows).numel != b.meta(source).numel or accumulate != [True]:
        return b.keep(node)
    given = b.view(source, b.shape(rows))
    return b.emit("aten.scatter_add.default", (value, 1, rows, given), b.meta(value))


def _row_index(b: Builder, shape: Sequence[int], indices: Sequence[Arg]) -> Ref | None:
    """Index of a gather along dim 1 that stands for ``x[arange(len(x)), index]``, or None.

    Args:
        b: The builder.
        shape: Of ``x``.
        indices: Of the call.
    """
    if len(indices) != 2 or not all(isinstance(i, Ref) for i in indices):
        return None
    first, second = indices
    if b.meta(second).dtype in ("bool", "uint8"):
        return None
    sizes = broadcast(b.shape(first), b.shape(second))
    if not sizes or sizes[0] != shape[0] or _whole_range(b, first, shape[0], len(sizes)) != 0:
        return None
    if len(b.shape(second)) != len(sizes) or b.shape(second)[0] != shape[0]:
        return None  # one index for all rows
    width, rest = prod(sizes[1:]), tuple(shape[2:])
    index = b.view(b.expand(second, sizes), (shape[0], width))
    truth = TensorMeta(b.shape(index), "bool")
    # a gather takes no positions counted from the end
    behind = b.emit("aten.lt.Scalar", (index, 0), truth)
    wrapped = b.binary("add", index, shape[1])
    index = b.emit("aten.where.self", (behind, wrapped, index), b.meta(index))
    wide = b.view(index, (shape[0], width, *(1 for _ in rest)))
    return b.expand(wide, (shape[0], width, *rest))


def _like(b: Builder, value: Arg, index: Ref) -> TensorMeta:
    return TensorMeta(b.shape(index), b.meta(value).dtype)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.index.Tensor": _index,
        "aten.index_put.default": _index_put,
    }
)
"""Rules by operator name."""
