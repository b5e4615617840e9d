"""Operators that read or write at positions given by a tensor of indices.

Positions are global numbers, so an indexed dim is whole, except where a lowering shifts them
(vocabulary-parallel embedding). Factors of index tensors are never padded: garbage is no position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.graph import Ref
from autopar.sharding.placement import Partial, R, Shard
from autopar.sharding.rules.call import Naming, OpCall, Rule, normal_dim
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature


def _embedding(call: OpCall) -> OpSignature:
    """``embedding(weight, ids, ...)``: rows of the weight; the vocabulary splits by a lowering."""
    naming = Naming()
    vocab, hidden = call.shape_at(0)
    ids = naming.dims(call.shape_at(1), prefix="i")
    v = naming.dim("v", vocab, whole=True)
    h = naming.dim("h", hidden)
    extra = AxisStrategy((Shard(0), R), (Partial(),), "v", "vocabulary_embedding")
    return naming.build(
        [(v, h), ids],
        [(*ids, h)],
        linear=call.linear_positions((0,)),
        extra=[extra if v else None],
        padded=("v", "h"),
    )


def _embedding_backward(call: OpCall) -> OpSignature:
    """``embedding_dense_backward(dy, ids, vocabulary, padding_idx, scale_by_freq)``.

    With gradients scaled by frequency nothing but the hidden dim splits.
    """
    naming = Naming()
    scaled = bool(call.arg(4))
    vocab, hidden = call.result_shape()
    shape = call.shape_at(1)
    ids = naming.dims(shape, prefix="i", whole=range(len(shape)) if scaled else ())
    v = naming.dim("v", vocab, whole=True)
    h = naming.dim("h", hidden)
    extra = AxisStrategy((R, R), (Shard(0),), "v", "vocabulary_embedding_backward")
    return naming.build(
        [(*ids, h), ids],
        [(v, h)],
        reductions={names[0]: "sum" for names in ids if names},
        linear=call.linear_positions((0,)),
        extra=[extra if v and not scaled else None],
        padded=("v", "h"),
    )


def _gather(call: OpCall) -> OpSignature:
    """``gather(x, dim, index)``; dims in which the index is shorter than x are whole."""
    naming = Naming()
    x, index = call.shape(0), call.shape(1)
    dim = normal_dim(call.integer(1), len(x))
    sources, positions = _paired(naming, x, index, dim)
    return naming.build(
        [sources, positions],
        [positions],
        linear=call.linear_positions((0,)),
    )


def _paired(naming: Naming, x: Sequence[int], index: Sequence[int], dim: int) -> tuple[Dims, Dims]:
    """Dims of a tensor and of an index tensor that addresses it along ``dim``."""
    sources: list[tuple[str, ...]] = []
    positions: list[tuple[str, ...]] = []
    for i, (long, short) in enumerate(zip(x, index, strict=True)):
        if i == dim:
            sources.append(naming.dim("x", long, whole=True))
            positions.append(naming.dim("i", short))
        elif long == short:
            sources.append(naming.dim(f"d{i}", long))
            positions.append(sources[-1])
        else:
            sources.append(naming.dim(f"x{i}", long, whole=True))
            positions.append(naming.dim(f"i{i}", short, whole=True))
    return tuple(sources), tuple(positions)


def _scatter(call: OpCall, *, adds: bool) -> OpSignature | None:
    """``scatter(x, dim, index, src)`` and ``scatter_add``: src may be a number.

    The writes split where they add: then x, which every rank adds to, is a pending sum.
    """
    naming = Naming()
    x, index = call.shape_at(0), call.shape_at(2)
    if call.operand(3) is not None and call.shape_at(3) not in ((), index):
        return None  # a src longer than the index is read in part
    dim = normal_dim(call.integer(1), len(x))
    target, positions = _paired(naming, x, index, dim)
    has_source = call.operand(3) is not None and call.shape_at(3) == index
    extra = AxisStrategy((Partial(), Shard(dim), Shard(dim)), (Partial(),), "i")
    if "i" in naming.sizes:
        naming.whole.add("i")
    inputs: list[Dims | None] = [target, positions]
    if call.operand(3) is not None:
        inputs.append(positions if has_source else ())
    return naming.build(
        inputs,
        [target],
        linear=call.linear_positions((0, 3)) if has_source else (),
        extra=[extra if adds and has_source and "i" in naming.sizes else None],
    )


def _scatter_set(call: OpCall) -> OpSignature | None:
    """Writes that overwrite each other: only the other dims split."""
    return _scatter(call, adds=False)


def _scatter_add(call: OpCall) -> OpSignature | None:
    """Writes that add."""
    return _scatter(call, adds=True)


def _index_select(call: OpCall) -> OpSignature:
    """``index_select(x, dim, index)``."""
    naming = Naming()
    shape = call.shape_at(0)
    dim = normal_dim(call.integer(1), len(shape))
    dims = naming.dims(shape, whole=(dim,))
    index = naming.dims(call.shape_at(2), prefix="i")
    along = index[0] if index else ()
    return naming.build(
        [dims, index],
        [(*dims[:dim], along, *dims[dim + 1 :])],
        linear=call.linear_positions((0,)),
        padded=naming.sizes.keys() - naming.whole - {"i0"},
    )


def _index_add(call: OpCall) -> OpSignature:
    """``index_add(x, dim, index, source)``."""
    naming = Naming()
    shape = call.shape_at(0)
    dim = normal_dim(call.integer(1), len(shape))
    dims = naming.dims(shape, whole=(dim,))
    index = naming.dims(call.shape_at(2), prefix="i", whole=(0,))
    source = (*dims[:dim], index[0] if index else (), *dims[dim + 1 :])
    extra = AxisStrategy((Partial(), Shard(0), Shard(dim)), (Partial(),), "i0")
    return naming.build(
        [dims, index, source],
        [dims],
        linear=call.linear_positions((0, 3)),
        extra=[extra if "i0" in naming.sizes else None],
        padded=naming.sizes.keys() - naming.whole,
    )


def _index_plan(
    call: OpCall, naming: Naming
) -> tuple[list[tuple[str, ...]], Dims, list[Dims]] | None:
    """Dims of ``x[indices]``: of x, of the result, of each index tensor; None for bool masks.

    torch puts the broadcast index dims where the index tensors stand if they stand side by side,
    and in front otherwise.
    """
    indices = call.arg(1)
    shape = call.shape_at(0)
    if not isinstance(indices, tuple):
        return None
    numbers = [int(i.name) if isinstance(i, Ref) else None for i in indices]
    metas = [call.operands[n] for n in numbers if n is not None]
    if any(m is None or m.dtype in ("bool", "uint8") for m in metas):
        return None  # a mask: the result's shape depends on its values
    at = [i for i, number in enumerate(numbers) if number is not None]
    rank = max((len(call.shape(numbers[i])) for i in at), default=0)
    padded = [(1,) * (rank - len(s)) + s for s in (call.shape(numbers[i]) for i in at)]
    broadcast = tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))
    index_dims = naming.dims(broadcast, prefix="i")
    each = [
        tuple(
            index_dims[rank - len(s) + j] if size == broadcast[rank - len(s) + j] else ()
            for j, size in enumerate(s)
        )
        for s in (call.shape(numbers[i]) for i in at)
    ]
    x = [naming.dim(f"d{i}", size, whole=i in at) for i, size in enumerate(shape)]
    kept = [names for i, names in enumerate(x) if i not in at]
    together = at == list(range(at[0], at[0] + len(at))) if at else True
    front = at[0] if at and together else 0
    return x, (*kept[:front], *index_dims, *kept[front:]), each


def _index(call: OpCall) -> OpSignature | None:
    """``index(x, [None or index tensor, ...])``."""
    naming = Naming()
    plan = _index_plan(call, naming)
    if plan is None:
        return None
    x, result, each = plan
    return naming.build(
        [tuple(x), *each],
        [result],
        linear=call.linear_positions((0,)),
        padded=[n for n in naming.sizes if n.startswith("d") and n not in naming.whole],
    )


def _index_put(call: OpCall) -> OpSignature | None:
    """``index_put(x, indices, values, accumulate)``; values are broadcast to ``x[indices]``.

    Where writes add, the index dims split with x a pending sum; an index tensor or values that
    are broadcast over a split dim stay whole.
    """
    naming = Naming()
    plan = _index_plan(call, naming)
    if plan is None:
        return None
    x, target, each = plan
    shape = call.shape_at(2)
    values = tuple(
        names if size == naming.sizes.get(names[0] if names else "", 1) else ()
        for size, names in zip(shape, target[len(target) - len(shape) :], strict=True)
    )
    adds = bool(call.arg(3, False))
    extra: list[AxisStrategy] = []
    for name in [n for n in naming.sizes if n.startswith("i")]:
        naming.whole.add(name)
        if adds:
            places = (Shard(d.index((name,))) if (name,) in d else R for d in (*each, values))
            extra.append(AxisStrategy((Partial(), *places), (Partial(),), name))
    return naming.build(
        [tuple(x), *each, values],
        [tuple(x)],
        linear=call.linear_positions((0, 2)),
        extra=extra,
    )


RULES: Mapping[str, Rule] = {
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.gather.default": _gather,
    "aten.scatter.src": _scatter_set,
    "aten.scatter.value": _scatter_set,
    "aten.scatter_add.default": _scatter_add,
    "aten.index_select.default": _index_select,
    "aten.index_add.default": _index_add,
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
}
"""Rules by operator name."""
