"""Rules for operators that only move elements: one view, one permute, slices and pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autopar.capture.rewrites.builder import Builder, Rule, Value
from autopar.ir.graph import Node, Ref, TensorMeta


def ints(arg: object) -> tuple[int, ...]:
    """An argument that is a list of integers."""
    assert isinstance(arg, tuple), arg
    return tuple(_int(item) for item in arg)


def _int(arg: object) -> int:
    assert isinstance(arg, int), arg
    return arg


def result_shape(node: Node) -> tuple[int, ...]:
    """Shape that tracing found for the result."""
    assert isinstance(node.meta, TensorMeta), node
    return node.meta.shape


def identity(b: Builder, node: Node) -> Value:
    """The operand itself: detach, alias, clone."""
    assert isinstance(node.args[0], Ref)
    return node.args[0]


def to_view(b: Builder, node: Node) -> Value:
    """Any operator that gives its operand in another shape."""
    return b.view(node.args[0], result_shape(node))


def _t(b: Builder, node: Node) -> Value:
    rank = len(b.shape(node.args[0]))
    return b.permute(node.args[0], range(rank - 1, -1, -1))


def _transpose(b: Builder, node: Node) -> Value:
    value, first, second = node.args
    rank = len(b.shape(value))
    order = list(range(rank))
    i, j = _int(first) % rank if rank else 0, _int(second) % rank if rank else 0
    if rank:
        order[i], order[j] = order[j], order[i]
    return b.permute(value, order)


def _permute(b: Builder, node: Node) -> Value:
    return b.permute(node.args[0], ints(node.args[1]))


def _expand(b: Builder, node: Node) -> Value:
    return b.expand(node.args[0], result_shape(node))


def _clamp(index: int | None, size: int, default: int) -> int:
    if index is None:
        return default
    if index < 0:
        index += size
    return min(max(index, 0), size)


def _slice_bounds(
    size: int, start: object, end: object, step: object
) -> tuple[int, int, int]:  # fmt: skip
    first = _clamp(start if isinstance(start, int) else None, size, 0)
    last = max(first, _clamp(end if isinstance(end, int) else None, size, size))
    return first, last, _int(step)


def _slice(b: Builder, node: Node) -> Value:
    value, dim_arg, start, end, step = node.args
    shape = b.shape(value)
    dim = _int(dim_arg) % len(shape)
    return b.slice(value, dim, *_slice_bounds(shape[dim], start, end, step))


def _slice_backward(b: Builder, node: Node) -> Value:
    grad, sizes_arg, dim_arg, start, end, step = node.args
    sizes = ints(sizes_arg)
    dim = _int(dim_arg) % len(sizes)
    first, last, stride = _slice_bounds(sizes[dim], start, end, step)
    if stride > 1:  # zeros between the elements, then cut or pad to the end
        shape = b.shape(grad)
        apart = b.view(grad, (*shape[: dim + 1], 1, *shape[dim + 1 :]))
        apart = _padded(b, apart, dim + 1, 0, stride - 1)
        grad = b.view(apart, (*shape[:dim], shape[dim] * stride, *shape[dim + 1 :]))
        last = min(sizes[dim], first + shape[dim] * stride)
        grad = b.slice(grad, dim, 0, last - first)
    return _padded(b, grad, dim, first, sizes[dim] - last)


def _select_backward(b: Builder, node: Node) -> Value:
    grad, sizes_arg, dim_arg, index_arg = node.args
    sizes = ints(sizes_arg)
    dim = _int(dim_arg) % len(sizes)
    index = _int(index_arg) % sizes[dim]
    row = b.view(grad, (*sizes[:dim], 1, *sizes[dim + 1 :]))
    return _padded(b, row, dim, index, sizes[dim] - index - 1)


def _padded(b: Builder, value: object, dim: int, before: int, after: int) -> Ref:
    assert isinstance(value, Ref)
    meta = b.meta(value)
    low, high = [0] * len(meta.shape), [0] * len(meta.shape)
    low[dim], high[dim] = before, after
    return b.pad(value, low, high, 0.0 if meta.is_float else 0)


def _select(b: Builder, node: Node) -> Value:
    value, dim_arg, index_arg = node.args
    shape = b.shape(value)
    dim = _int(dim_arg) % len(shape)
    index = _int(index_arg) % shape[dim]
    assert isinstance(node.meta, TensorMeta)
    return b.emit("aten.select.int", (value, dim, index), node.meta)


def _split_sizes(b: Builder, node: Node, sizes: Sequence[int], dim: int) -> Value:
    position, parts = 0, []
    for size in sizes:
        parts.append(b.slice(node.args[0], dim, position, position + size))
        position += size
    return tuple(parts)


def _split(b: Builder, node: Node) -> Value:
    value, size_arg, dim_arg = node.args
    shape = b.shape(value)
    dim, size = _int(dim_arg) % len(shape), _int(size_arg)
    sizes = [min(size, shape[dim] - start) for start in range(0, shape[dim], size)]
    return _split_sizes(b, node, sizes, dim)


def _split_with_sizes(b: Builder, node: Node) -> Value:
    value, sizes, dim_arg = node.args
    return _split_sizes(b, node, ints(sizes), _int(dim_arg) % len(b.shape(value)))


def _chunk(b: Builder, node: Node) -> Value:
    assert isinstance(node.meta, tuple)
    value, _, dim_arg = node.args
    dim = _int(dim_arg) % len(b.shape(value))
    return _split_sizes(b, node, [m.shape[dim] for m in node.meta if m is not None], dim)


def _unbind(b: Builder, node: Node) -> Value:
    value, dim_arg = node.args
    meta = b.meta(value)
    dim = _int(dim_arg) % len(meta.shape)
    result = TensorMeta((*meta.shape[:dim], *meta.shape[dim + 1 :]), meta.dtype)
    return tuple(
        b.emit("aten.select.int", (value, dim, index), result) for index in range(meta.shape[dim])
    )


def _cat(b: Builder, node: Node) -> Value:
    values, dim_arg = node.args
    assert isinstance(values, tuple)
    return b.cat(values, _int(dim_arg) % max(1, len(result_shape(node))))


def _stack(b: Builder, node: Node) -> Value:
    values, dim_arg = node.args
    assert isinstance(values, tuple)
    rank = len(b.shape(values[0])) + 1
    dim = _int(dim_arg) % rank
    rows = []
    for value in values:
        shape = b.shape(value)
        rows.append(b.view(value, (*shape[:dim], 1, *shape[dim:])))
    return b.cat(rows, dim)


def _slice_scatter(b: Builder, node: Node) -> Value:
    base, source, dim_arg, start, end, step = node.args
    shape = b.shape(base)
    dim = _int(dim_arg) % len(shape)
    first, last, stride = _slice_bounds(shape[dim], start, end, step)
    if stride != 1:
        return b.keep(node)
    source = b.cast(source, b.meta(base).dtype)
    parts = [b.slice(base, dim, 0, first)] if first else []
    parts.append(source)
    parts += [b.slice(base, dim, last, shape[dim])] if last < shape[dim] else []
    return b.cat(parts, dim)


def _select_scatter(b: Builder, node: Node) -> Value:
    base, source, dim_arg, index_arg = node.args
    shape = b.shape(base)
    dim = _int(dim_arg) % len(shape)
    index = _int(index_arg) % shape[dim]
    row = b.view(source, (*shape[:dim], 1, *shape[dim + 1 :]))
    parts = [b.slice(base, dim, 0, index)] if index else []
    parts.append(b.cast(row, b.meta(base).dtype))
    parts += [b.slice(base, dim, index + 1, shape[dim])] if index + 1 < shape[dim] else []
    return b.cat(parts, dim)


def _repeat(b: Builder, node: Node) -> Value:
    value, repeats_arg = node.args
    repeats = ints(repeats_arg)
    shape = (1,) * (len(repeats) - len(b.shape(value))) + b.shape(value)
    inner = tuple(size for s in shape for size in (1, s))
    outer = tuple(size for r, s in zip(repeats, shape, strict=True) for size in (r, s))
    return b.view(b.expand(b.view(value, inner), outer), result_shape(node))


def _repeat_interleave(b: Builder, node: Node) -> Value:
    value, repeats, dim_arg, *_ = node.args
    if not isinstance(repeats, int):
        return b.keep(node)
    shape = b.shape(value)
    if dim_arg is None:
        value, shape, dim = b.view(value, (-1,)), (b.meta(value).numel,), 0
    else:
        dim = _int(dim_arg) % len(shape)
    inner = (*shape[: dim + 1], 1, *shape[dim + 1 :])
    outer = (*shape[: dim + 1], repeats, *shape[dim + 1 :])
    return b.view(b.expand(b.view(value, inner), outer), result_shape(node))


def _pad(b: Builder, node: Node) -> Value:
    value, pads_arg, fill = node.args
    assert isinstance(fill, bool | int | float)
    pads = ints(pads_arg)
    rank = len(b.shape(value))
    low, high = [0] * rank, [0] * rank
    for i in range(len(pads) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = pads[2 * i], pads[2 * i + 1]
    for dim in range(rank):  # negative padding cuts
        size = b.shape(value)[dim]
        value = b.slice(value, dim, max(0, -low[dim]), size - max(0, -high[dim]))
    assert isinstance(value, Ref)
    number = fill if b.meta(value).is_float else int(fill)
    return b.pad(value, [max(0, x) for x in low], [max(0, x) for x in high], number)


def _roll(b: Builder, node: Node) -> Value:
    value, shifts_arg, dims_arg = node.args
    shifts, dims = ints(shifts_arg), ints(dims_arg)
    shape = b.shape(value)
    if not dims:
        value, dims = b.view(value, (-1,)), (0,)
    for shift, dim in zip(shifts, dims, strict=True):
        d = dim % len(b.shape(value))
        size = b.shape(value)[d]
        cut = (size - shift) % size
        if cut:
            value = b.cat([b.slice(value, d, cut, size), b.slice(value, d, 0, cut)], d)
    return b.view(value, shape)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            ("aten.detach.default", "aten.alias.default", "aten.clone.default",
             "aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.lift.default",
             "aten.contiguous.default"),
            identity,
        ),
        **dict.fromkeys(
            ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default",
             "aten._reshape_alias.default", "aten.view_copy.default", "aten.squeeze.default",
             "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default",
             "aten.flatten.using_ints", "aten.unflatten.int"),
            to_view,
        ),
        "aten.t.default": _t,
        "aten.transpose.int": _transpose,
        "aten.permute.default": _permute,
        "aten.expand.default": _expand,
        "aten.slice.Tensor": _slice,
        "aten.slice_backward.default": _slice_backward,
        "aten.select.int": _select,
        "aten.select_backward.default": _select_backward,
        "aten.split.Tensor": _split,
        "aten.split_with_sizes.default": _split_with_sizes,
        "aten.chunk.default": _chunk,
        "aten.unbind.int": _unbind,
        "aten.cat.default": _cat,
        "aten.stack.default": _stack,
        "aten.slice_scatter.default": _slice_scatter,
        "aten.select_scatter.default": _select_scatter,
        "aten.repeat.default": _repeat,
        "aten.repeat_interleave.self_int": _repeat_interleave,
        "aten.constant_pad_nd.default": _pad,
        "aten.roll.default": _roll,
    }
)  # fmt: skip
