"""Many small collectives of a once-per-step program as few large ones.

Gradients are reduced, and parameters gathered, one tensor each; a small tensor takes as long as the
start of a collective, whatever its size. Collectives of one kind, axis, reduction and dtype that do
not wait for each other are therefore done together: their operands are packed into one flat tensor
of at most :data:`BUCKET_BYTES`, which is communicated and taken apart. A tensor that is larger by
itself is not copied. Sums are those of the single collectives, element by element.

The bucket after the one that is taken apart is already under way then, so that copies and
communication overlap and no more than two buckets are alive beside what they are made of.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
13(12), 2020 (buckets, and their size).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Input, InputKind, Node, Ref, TensorMeta
from autopar.sharding.placement import shard_size
from autopar.units import MIB

BUCKET_BYTES = 25 * MIB
"""Most bytes of a bucket, of what a rank puts in or gets out, whichever is more."""

PACK, UNPACK = "local.pack", "local.unpack"
KINDS = frozenset({"comm.all_reduce", "comm.all_gather", "comm.reduce_scatter"})


@dataclass(frozen=True, slots=True)
class _Item:
    """A collective that may share a bucket.

    Attributes:
        node: The collective.
        key: What those of one bucket have in common.
        payload_bytes: What it adds to a bucket, on the side where a rank has more; padding
            included.
        dim: Dim that is gathered or scattered; None for an all-reduce.
        columns: Elements that it has in each of the rows of a bucket.
    """

    node: Node
    key: tuple[object, ...]
    payload_bytes: int
    dim: int | None
    columns: int


def in_buckets(graph: Graph, axis_sizes: Mapping[str, int], most_bytes: int | None = None) -> Graph:
    """The same program with its small collectives done together.

    The values of the collectives keep their names. A program whose collectives are all alone in
    their buckets is returned as it is.

    Args:
        graph: A program that runs once per step.
        axis_sizes: Ranks along each axis.
        most_bytes: Most bytes of a bucket; :data:`BUCKET_BYTES` if left out.
    """
    most_bytes = BUCKET_BYTES if most_bytes is None else most_bytes
    metas = graph.metas()
    items: dict[str, _Item] = {}
    for node in graph.nodes:
        item = _item(node, metas.get(node.refs()[0]) if node.refs() else None, axis_sizes)
        if item is not None and item.payload_bytes <= most_bytes:
            items[node.name] = item
    levels = _levels(graph)
    buckets = _filled(graph, items, levels, most_bytes)
    if all(len(bucket) == 1 for bucket in buckets):
        return graph
    nodes: list[Node] = []
    for level in range(1 + max(levels.values())):
        here = [n for n in graph.nodes if levels[n.name] == level]
        nodes += [n for n in here if n.name not in items]
        apart: list[Node] = []  # the bucket before is taken apart when this one is under way
        for bucket in (b for b in buckets if levels[b[0].node.name] == level):
            if len(bucket) == 1:
                nodes.append(bucket[0].node)
                continue
            issued, taken_apart = _together(bucket, axis_sizes)
            nodes += [*issued, *apart]
            apart = taken_apart
        nodes += apart
    return Graph(graph.inputs, tuple(nodes), graph.outputs)


def full_bucket(
    node: Node, operand: TensorMeta, axis_sizes: Mapping[str, int]
) -> tuple[Graph, float] | None:
    """A bucket of equal collectives as a program, and the share that one of them has in it.

    Args:
        node: The collective.
        operand: Its operand.
        axis_sizes: Ranks along each axis.

    Returns:
        None for a collective that shares no bucket.
    """
    item, most_bytes = _item(node, operand, axis_sizes), BUCKET_BYTES
    if item is None or item.payload_bytes > most_bytes:
        return None
    each = item.columns * most_bytes // (2 * item.payload_bytes)
    sizes, dim = [each], 0
    made = sizes
    if item.dim is not None:  # cut at the first dim or at a later one: in place, or copied
        parts = axis_sizes[_axis(node)]
        rows = (parts, 1) if node.op == "comm.reduce_scatter" else (1, parts)
        dim = min(1, item.dim)
        sizes, made = ([n, each] if dim == 0 else [each, n] for n in rows)
    given = TensorMeta(tuple(sizes), operand.dtype)
    args = {
        "comm.all_reduce": node.args[1:],
        "comm.all_gather": (dim, node.args[2], made[dim]),
        "comm.reduce_scatter": (node.args[1], dim, node.args[-1]),
    }[node.op]
    half = replace(node, meta=TensorMeta(tuple(made), operand.dtype))
    names = ("first", "second")
    whole = Graph(
        tuple(Input(name, InputKind.GRAD, name, given) for name in names),
        tuple(replace(half, name=f"{n}_moved", args=(Ref(n), *args)) for n in names),
        (),
    )
    return in_buckets(whole, axis_sizes), item.columns / (2 * each)


def packed_shape(shape: tuple[int, ...], dim: int | None, parts: int) -> tuple[int, int]:
    """Rows and columns that a tensor takes in a bucket of ``parts`` rows.

    Args:
        shape: Of the tensor.
        dim: Dim that is cut into the rows, padded to equal blocks; None if ``parts`` is 1.
        parts: Rows.

    >>> packed_shape((5, 3), 0, 2)
    (2, 9)
    """
    numel = TensorMeta(shape, "int8").numel
    if dim is None or not numel:
        return parts, numel
    return parts, numel // shape[dim] * shard_size(shape[dim], parts)


def lies_as_it_is(dim: int | None, parts: int) -> bool:
    """Whether a tensor taken out of a bucket of ``parts`` rows is a view of it.

    Args:
        dim: As in :func:`packed_shape`.
        parts: Rows.
    """
    return dim is None or (dim == 0 and parts == 1)


def _item(node: Node, operand: object, axis_sizes: Mapping[str, int]) -> _Item | None:
    if node.op not in KINDS or not isinstance(operand, TensorMeta) or not operand.numel:
        return None
    meta = node.meta
    if not isinstance(meta, TensorMeta) or node.kwargs:
        return None
    item_bytes = operand.bytes // operand.numel
    match node.op, node.args[1:]:
        case "comm.all_reduce", (str(op), str(axis)):
            return _Item(node, (node.op, op, axis, meta.dtype), meta.bytes, None, meta.numel)
        case "comm.all_gather", (int(dim), str(axis), int()):
            key: tuple[object, ...] = (node.op, axis, meta.dtype)
            whole = meta
        case "comm.reduce_scatter", (str(op), int(dim), str(axis)):
            key = (node.op, op, axis, meta.dtype)
            whole = operand
        case _:
            return None
    dim %= len(whole.shape)
    parts, columns = packed_shape(whole.shape, dim, axis_sizes[axis])
    if columns != min(operand.numel, meta.numel):  # blocks that are not those of an even cut
        return None
    return _Item(node, key, parts * columns * item_bytes, dim, columns)


def _levels(graph: Graph) -> dict[str, int]:
    """For each operator how many collectives must end before it can begin."""
    begins: dict[str, int] = {}
    ends: dict[str, int] = {i.name: 0 for i in graph.inputs}
    for node in graph.nodes:
        begins[node.name] = max((ends[name] for name in node.refs()), default=0)
        ends[node.name] = begins[node.name] + node.op.startswith("comm.")
    return begins


def _filled(
    graph: Graph, items: Mapping[str, _Item], levels: Mapping[str, int], most_bytes: int
) -> list[list[_Item]]:
    """Buckets in order of their first members."""
    buckets: list[list[_Item]] = []
    open_at: dict[tuple[object, ...], int] = {}
    filled_bytes: dict[int, int] = {}
    for node in graph.nodes:
        item = items.get(node.name)
        if item is None:
            continue
        key = (levels[node.name], *item.key)
        at = open_at.get(key)
        if at is None or filled_bytes[at] + item.payload_bytes > most_bytes:
            at = open_at[key] = len(buckets)
            buckets.append([])
            filled_bytes[at] = 0
        buckets[at].append(item)
        filled_bytes[at] += item.payload_bytes
    return buckets


def _together(
    bucket: Sequence[_Item], axis_sizes: Mapping[str, int]
) -> tuple[list[Node], list[Node]]:
    """Operators that issue a bucket's collective, and those that take its result apart."""
    first = bucket[0].node
    parts = {"comm.reduce_scatter": axis_sizes[_axis(first)]}.get(first.op, 1)
    columns = sum(item.columns for item in bucket)
    dtype = bucket[0].node.metas()[0].dtype  # type: ignore[union-attr]  # checked by _item
    dims = tuple(item.dim for item in bucket)
    stem = f"bucket_of_{first.name}"
    pack = replace(
        first,
        name=f"{stem}_pack",
        op=PACK,
        args=(tuple(item.node.args[0] for item in bucket), dims, parts),
        meta=TensorMeta((parts, columns), dtype),
    )
    packed, rows = Ref(pack.name), 1
    args: tuple[Arg, ...] = (packed, *first.args[1:])
    if first.op == "comm.all_gather":
        rows = axis_sizes[_axis(first)]
        args = (packed, 0, _axis(first), rows)
    elif first.op == "comm.reduce_scatter":
        args = (packed, first.args[1], 0, _axis(first))
    comm = replace(first, name=stem, args=args, meta=TensorMeta((rows, columns), dtype))
    metas = tuple(item.node.metas()[0] for item in bucket)
    shapes = tuple(m.shape for m in metas if m is not None)
    unpack = replace(
        first, name=f"{stem}_unpack", op=UNPACK, args=(Ref(stem), shapes, dims), meta=metas
    )
    picks = [
        replace(item.node, op="getitem", args=(Ref(unpack.name), index))
        for index, item in enumerate(bucket)
    ]
    return [pack, comm], [unpack, *picks]


def _axis(node: Node) -> str:
    axis = node.args[2] if node.op != "comm.reduce_scatter" else node.args[3]
    assert isinstance(axis, str)
    return axis
