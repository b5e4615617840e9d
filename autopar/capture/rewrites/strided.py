"""Rules for reads and writes by strides: a view and a permutation, where they cover the tensor.

Programs have no memory layout. A read of *all* elements of a dense tensor by the strides of a dense
tensor needs none: it is the tensor's elements in row-major order, in another shape and order of
dims. Anything else is refused while the traced strides are still known
(:func:`autopar.capture.lower.check_strided`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.capture.rewrites.builder import Builder, Rule, Value
from autopar.capture.rewrites.views import ints, result_shape
from autopar.ir.graph import Node


def dense_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Dims from the outermost in memory to the innermost, or None if memory is not dense.

    >>> dense_order((4, 6), (1, 4)), dense_order((4, 6), (12, 1))
    ((1, 0), None)
    """
    # dims of size one may have any stride; they keep their place beside dims of equal stride
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    expected = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    return tuple(order)


def _read(b: Builder, node: Node) -> Value:
    """``as_strided(x, size, stride, offset)``."""
    shape = result_shape(node)
    order = dense_order(shape, ints(node.args[2]))
    assert order is not None, node
    flat = b.view(node.args[0], [shape[d] for d in order])
    return b.permute(flat, [order.index(d) for d in range(len(shape))])


def _write(b: Builder, node: Node) -> Value:
    """``as_strided_scatter(x, src, size, stride, offset)``: nothing of ``x`` is left."""
    order = dense_order(ints(node.args[2]), ints(node.args[3]))
    assert order is not None, node
    return b.view(b.permute(node.args[1], order), result_shape(node))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.as_strided.default": _read,
        "aten.as_strided_scatter.default": _write,
    }
)
"""Rules by operator name."""
