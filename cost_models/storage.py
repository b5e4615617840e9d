"""Which values of a program share memory, and which reshapes copy.

A view costs nothing and keeps its base alive. Whether ``reshape`` is a view depends on strides, so
they are followed through the program as torch computes them: inputs are taken to be contiguous,
results of matmuls and the like too, and an element-wise operator keeps the order of dims of its
first operand of the same shape (torch's TensorIterator, for tensors that are dense).

A block of the first dim (``local.shard``) is a view on ranks where it is not padded: where the dim
does not divide evenly, both the view's base and the padded copy are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from autopar.ir.graph import Arg, Graph, Meta, Node, Ref, TensorMeta
from autopar.sharding.buckets import PACK, UNPACK, lies_as_it_is
from autopar.sharding.host_copies import ON_DEVICE
from cost_models.flops import VIEW_OPS

Strides = tuple[int, ...]

# Parts of the names of operators whose result is contiguous whatever their operands' strides are.
_CONTIGUOUS = (
    "mm", "conv", "softmax", "norm", "attention", "embedding", "index", "gather", "scatter",
    "cumsum", "sort", "topk", "cat", "stack", "dropout", "full", "arange", "comm.", "local.",
    "constant", "sum", "amax", "amin", "argmax",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Storages:
    """The memory behind each value of a program.

    Attributes:
        of: Storages by value name; several for an operator with several results.
        bytes: Size of each storage.
        copies: Views that had to copy, as names of operators.
    """

    of: Mapping[str, tuple[str, ...]]
    bytes: Mapping[str, int]
    copies: frozenset[str]


def storages(graph: Graph) -> Storages:
    """The storages of ``graph``.

    They are named after the value that allocates them: ``"name"`` or, for result ``i`` of several,
    ``"name#i"``.
    """
    tracker = _Tracker()
    for item in graph.inputs:
        tracker.allocate(item.name, item.meta)
    metas = graph.metas()
    for node in graph.nodes:
        tracker.visit(node, metas)
    return Storages(
        MappingProxyType(tracker.of), MappingProxyType(tracker.bytes), frozenset(tracker.copies)
    )


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Strides of a dense tensor whose last dim is the fastest.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def view_strides(shape: Sequence[int], strides: Strides, sizes: Sequence[int]) -> Strides | None:
    """Strides of a tensor viewed with ``sizes``; None if that takes a copy.

    The dims of ``shape`` are taken together in chunks that lie contiguously, from the last; each
    chunk must be split among whole dims of ``sizes``.

    >>> view_strides((4, 6), (6, 1), (24,))
    (1,)
    >>> view_strides((4, 6), (1, 4), (24,)) is None
    True
    """
    if prod(shape) == 0 or not shape:
        return contiguous_strides(sizes)
    out = [0] * len(sizes)
    target = len(sizes) - 1
    chunk, base = 1, strides[-1]
    filled = 1
    for dim in range(len(shape) - 1, -1, -1):
        chunk *= shape[dim]
        ends = dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != chunk * base)
        if not ends:
            continue
        while target >= 0 and (filled < chunk or sizes[target] == 1):
            out[target] = filled * base
            filled *= sizes[target]
            target -= 1
        if filled != chunk:
            return None
        if dim > 0:
            base, chunk, filled = strides[dim - 1], 1, 1
    return tuple(out) if target < 0 else None


class _Tracker:
    """The state of :func:`storages` while it walks the program."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str, ...]] = {}
        self.bytes: dict[str, int] = {}
        self.copies: set[str] = set()
        self.strides: dict[str, Strides] = {}
        self.packed: set[str] = set()

    def allocate(self, name: str, meta: Meta, strides: Strides | None = None) -> None:
        if isinstance(meta, TensorMeta):
            self.of[name] = (name,)
            self.bytes[name] = meta.bytes
            self.strides[name] = strides or contiguous_strides(meta.shape)
        elif isinstance(meta, tuple):
            parts = []
            for index, part in enumerate(meta):
                parts.append(f"{name}#{index}")
                self.bytes[parts[-1]] = part.bytes if part is not None else 0
            self.of[name] = tuple(parts)
        else:
            self.of[name] = ()

    def alias(self, name: str, base: tuple[str, ...], strides: Strides) -> None:
        self.of[name] = base
        self.strides[name] = strides

    def visit(self, node: Node, metas: Mapping[str, Meta]) -> None:
        meta = node.meta
        source = node.args[0] if node.args else None
        if node.op == "local.shard" and isinstance(source, Ref) and isinstance(meta, TensorMeta):
            self.shard(node, source, metas[source.name], meta)
            return
        if node.op == PACK:
            self.packed.add(node.name)
        is_packed = isinstance(source, Ref) and source.name in self.packed
        if node.op == ON_DEVICE and isinstance(source, Ref) and isinstance(meta, TensorMeta):
            self.alias(node.name, self.of[source.name], contiguous_strides(meta.shape))
            return
        if node.op == "comm.all_reduce" and is_packed and isinstance(meta, TensorMeta):
            # done in place: see Collective.is_given of the runtime
            self.alias(node.name, self.of[node.refs()[0]], contiguous_strides(meta.shape))
            return
        if node.op == UNPACK and isinstance(source, Ref):
            self.unpack(node, source, metas[source.name])
            return
        if (
            node.op not in VIEW_OPS
            or not isinstance(source, Ref)
            or not isinstance(meta, TensorMeta)
        ):
            self.allocate(node.name, meta, self._element_wise(node, metas))
            return
        base = self.of[source.name]
        if node.op == "getitem":
            index = node.args[1]
            picked = base[index : index + 1] if isinstance(index, int) else base
            self.alias(node.name, picked, contiguous_strides(meta.shape))
            return
        old = metas[source.name]
        if not isinstance(old, TensorMeta):
            self.allocate(node.name, meta)
            return
        strides = _strides_after(node, old.shape, self.strides[source.name], meta.shape)
        if strides is None:
            self.copies.add(node.name)
            self.allocate(node.name, meta)
        else:
            self.alias(node.name, base, strides)

    def shard(self, node: Node, source: Ref, whole: Meta, block: TensorMeta) -> None:
        """A block of a dim: contiguous, and a view if it already is and needs no padding."""
        self.allocate(node.name, block)
        dim, parts = node.args[1], node.args[3]
        if not isinstance(whole, TensorMeta) or not isinstance(dim, int):
            return
        dim %= len(whole.shape)
        is_dense = self.strides[source.name] == contiguous_strides(whole.shape)
        if is_dense and all(size == 1 for size in whole.shape[:dim]):
            is_even = isinstance(parts, int) and whole.shape[dim] % parts == 0
            base = self.of[source.name]
            self.of[node.name] = base if is_even else (node.name, *base)

    def unpack(self, node: Node, source: Ref, flat: Meta) -> None:
        """Tensors out of a bucket: views of it where they lie in it as they are."""
        self.allocate(node.name, node.meta)
        dims, bucket = node.args[2], self.of[source.name]
        if not isinstance(dims, tuple) or not isinstance(flat, TensorMeta) or len(bucket) != 1:
            return
        self.of[node.name] = tuple(
            bucket[0] if lies_as_it_is(d if isinstance(d, int) else None, flat.shape[0]) else own
            for d, own in zip(dims, self.of[node.name], strict=True)
        )

    def _element_wise(self, node: Node, metas: Mapping[str, Meta]) -> Strides | None:
        meta = node.meta
        if not isinstance(meta, TensorMeta) or any(part in node.op for part in _CONTIGUOUS):
            return None
        for name in node.refs():
            operand = metas[name]
            if isinstance(operand, TensorMeta) and operand.shape == meta.shape:
                return _dense(operand.shape, self.strides[name])
        return None


def _dense(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Strides of a new tensor with the order of dims of an old one."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    if any(strides[d] == 0 and shape[d] > 1 for d in order):
        return contiguous_strides(shape)  # an expanded operand does not decide
    out = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        out[dim] = step
        step *= max(1, shape[dim])
    return tuple(out)


def _strides_after(
    node: Node, shape: tuple[int, ...], strides: Strides, result: tuple[int, ...]
) -> Strides | None:
    """Strides of a view's result; None where it copies."""
    args = node.args
    rank = len(shape)
    match node.op.split(".")[1]:
        case "view" | "reshape" | "_unsafe_view":
            return view_strides(shape, strides, result)
        case "permute":
            return tuple(strides[d % rank] for d in _ints(args[1]))
        case "transpose" | "t":
            first, second = (0, rank - 1) if node.op == "aten.t.default" else _ints(args[1:3])
            swapped = list(strides)
            swapped[first % rank], swapped[second % rank] = strides[second], strides[first]
            return tuple(swapped)
        case "expand":
            padded = (0,) * (len(result) - rank) + strides
            sizes = (1,) * (len(result) - rank) + shape
            return tuple(
                0 if old != new else step
                for step, old, new in zip(padded, sizes, result, strict=True)
            )
        case "slice":
            dim = _ints(args[1:2])[0] if len(args) > 1 else 0
            step = _ints(args[4:5])[0] if len(args) > 4 else 1
            out = list(strides)
            out[dim % rank] *= step
            return tuple(out)
        case "select":
            dim = _ints(args[1:2])[0] % rank
            return strides[:dim] + strides[dim + 1 :]
        case "detach" | "alias":
            return strides
        case _:
            # squeeze, unsqueeze and the rest: the size-1 dims have no effect on the order
            return view_strides(shape, strides, result) or contiguous_strides(result)


def _ints(arg: Arg) -> tuple[int, ...]:
    items = arg if isinstance(arg, tuple) else (arg,)
    return tuple(item for item in items if isinstance(item, int))
