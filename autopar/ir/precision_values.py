"""What :mod:`autopar.ir.precision` asks about operators, gradients and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite

from autopar.ir.graph import (
    ITEM_BYTES,
    Arg,
    Dtype,
    Graph,
    InputKind,
    Meta,
    Node,
    Phase,
    Ref,
    TensorMeta,
)
from autopar.ir.precision_rules import HALVES, LARGEST, WIDE


def is_float(meta: Meta) -> bool:
    """Whether it is one real floating-point tensor."""
    return isinstance(meta, TensorMeta) and meta.is_float


def is_half(meta: Meta) -> bool:
    """Whether it is one tensor in a low precision."""
    return isinstance(meta, TensorMeta) and meta.dtype in HALVES


def widest(metas: Sequence[Meta], *, has_weak_dims: bool) -> str:
    """The dtype that torch gives to an element-wise operator of these operands.

    Tensors without dims count only where there are no others.

    Args:
        metas: Of the operands that decide; others than floats are passed over.
        has_weak_dims: Whether an operand that does not decide has dims.

    >>> half, single = TensorMeta((4,), "float16"), TensorMeta((), "float32")
    >>> widest([half, single], has_weak_dims=False)
    'float16'
    """
    floats = [m for m in metas if isinstance(m, TensorMeta) and m.is_float]
    deciding = [m for m in floats if m.shape] or ([] if has_weak_dims else floats)
    dtypes = {m.dtype for m in deciding}
    if len(dtypes & HALVES) > 1:
        dtypes.add(WIDE)
    return max(sorted(dtypes), key=ITEM_BYTES.__getitem__, default=WIDE)


def fits(node: Node, dtype: str) -> bool:
    """Whether the numbers among an operator's arguments can be held in ``dtype``."""
    limit = LARGEST.get(dtype)
    if limit is None:
        return True
    return all(abs(x) <= limit for x in _numbers(node.args) if isfinite(x))


def _numbers(arg: Arg) -> Iterator[float]:
    if isinstance(arg, float):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _numbers(item)


def argument_of_refs(node: Node) -> list[int | None]:
    """For each of ``node.refs()`` the position of its argument; None for a keyword's."""
    found: list[int | None] = []
    for position, arg in enumerate(node.args):
        found += [position] * _count_refs(arg)
    return found + [None] * (len(node.refs()) - len(found))


def _count_refs(arg: Arg) -> int:
    if isinstance(arg, Ref):
        return 1
    return sum(map(_count_refs, arg)) if isinstance(arg, tuple) else 0


def result_metas(meta: Meta, dtype: str, wide: tuple[int, ...], like: Mapping[int, Meta]) -> Meta:
    """Metas of an operator's results when it computes in ``dtype``.

    Args:
        meta: As captured.
        dtype: Of its floating-point results.
        wide: Numbers of those that are in float32 all the same.
        like: Number of a result that is not empty -> meta whose dtype it has.
    """
    if isinstance(meta, TensorMeta):
        return replace(meta, dtype=dtype) if meta.is_float else meta
    if not isinstance(meta, tuple):
        return meta
    results: list[TensorMeta | None] = []
    for index, one in enumerate(meta):
        if one is None or not one.is_float:
            results.append(one)
            continue
        model = like.get(index)
        own = WIDE if index in wide else dtype
        if isinstance(model, TensorMeta) and model.is_float and one.numel:
            own = model.dtype
        results.append(replace(one, dtype=own))
    return tuple(results)


def without_halves(node: Node) -> Node:
    """The operator with low dtypes among its arguments made float32."""
    return replace(
        node,
        args=tuple(map(_widened, node.args)),
        kwargs=tuple((key, _widened(value)) for key, value in node.kwargs),
    )


def _widened(arg: Arg) -> Arg:
    if isinstance(arg, Dtype):
        return Dtype(WIDE) if arg.name in HALVES else arg
    return tuple(map(_widened, arg)) if isinstance(arg, tuple) else arg


class Gradients:
    """Which values of the backward pass are gradients of which values of the forward pass.

    The operators with one twin compute the gradients of the twin's operands; what is read by
    others is such a gradient, and its shape says of which operand.
    """

    def __init__(self, graph: Graph) -> None:
        self._nodes = graph.node_map()
        self._metas = graph.metas()
        users = graph.users()
        yielded = {o.value.name for o in graph.outputs if o.value is not None}
        self._leaving = {
            n.name
            for n in graph.nodes
            if n.phase is Phase.BACKWARD
            and n.twin is not None
            and (
                n.name in yielded or any(self._nodes[user].twin != n.twin for user in users[n.name])
            )
        }

    def twin(self, name: str) -> str | None:
        """The forward operator that a value's operator differentiates."""
        node = self._nodes.get(name)
        return None if node is None else node.twin

    def leaves(self, node: Node) -> bool:
        """Whether operators with another twin read it."""
        return node.name in self._leaving and is_float(node.meta)

    def operands(self, node: Node) -> list[str]:
        """Operands of the twin that it may be the gradient of."""
        twin = self._nodes.get(node.twin or "")
        if twin is None or not isinstance(node.meta, TensorMeta):
            return []
        found = []
        for name in twin.refs():
            meta = self._metas[name]
            if isinstance(meta, TensorMeta) and meta.is_float and meta.shape == node.meta.shape:
                found.append(name)
        return found


def wanted_parameters(graph: Graph, wants: Mapping[str, Mapping[str, str]]) -> Graph:
    """The program with parameters as inputs in the dtype that their readers want.

    Args:
        graph: Reads parameters under the names in ``wants``.
        wants: Parameter -> dtype -> name. One that is wanted in several dtypes is an input in
            float32, and cast before its first reader.
    """
    renamed: dict[str, str] = {}
    casts: dict[str, Node] = {}
    inputs = []
    for entry in graph.inputs:
        if entry.kind is not InputKind.PARAM or not is_float(entry.meta):
            inputs.append(entry)
            continue
        assert entry.meta is not None
        wanted = wants.get(entry.name, {})
        stored = WIDE if entry.requires_grad else entry.meta.dtype
        dtype = next(iter(wanted)) if len(wanted) == 1 else WIDE if wanted else stored
        meta = replace(entry.meta, dtype=dtype)
        inputs.append(replace(entry, meta=meta, master="" if stored == dtype else stored))
        for other, name in wanted.items():
            if other == dtype:
                renamed[name] = entry.name
            else:
                casts[name] = Node(
                    name=name, op="aten._to_copy.default", args=(Ref(entry.name),),
                    meta=replace(meta, dtype=other), kwargs=(("dtype", Dtype(other)),),
                )  # fmt: skip
    nodes: list[Node] = []
    for node in graph.nodes:
        now = [casts.pop(name) for name in dict.fromkeys(node.refs()) if name in casts]
        nodes += [replace(c, phase=node.phase, scope=node.scope, source=node.source) for c in now]
        args, kwargs = node.map_refs(lambda name: Ref(renamed.get(name, name)))
        nodes.append(replace(node, args=args, kwargs=kwargs))
    outputs = tuple(
        replace(o, value=None if o.value is None else Ref(renamed.get(o.value.name, o.value.name)))
        for o in graph.outputs
    )
    return Graph(tuple(inputs), tuple(nodes), outputs)
