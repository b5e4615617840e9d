"""Building a rewritten program operator by operator.

A rule is a function ``(builder, node) -> value`` for one traced operator: ``node`` has its
operands already replaced by new values; the rule emits what stands for it and returns the value,
or a tuple of values for an operator with several results. ``emit_*`` methods know the shape of
what they make and leave out what changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from autopar.ir.graph import (
    Arg,
    Dtype,
    Graph,
    Input,
    InputKind,
    Meta,
    Node,
    Output,
    Ref,
    TensorMeta,
)

RNG_KEY = "rng_key"

Value: TypeAlias = "Ref | tuple[Ref | None, ...]"
Rule: TypeAlias = "Callable[[Builder, Node], Value]"


class Builder:
    """A new program in the making.

    Attributes:
        node: The traced operator that is being rewritten; what is emitted inherits its phase,
            scope and source.
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.inputs = list(inputs)
        self.nodes: list[Node] = []
        self.node: Node | None = None
        self._metas: dict[str, Meta] = {i.name: i.meta for i in inputs}
        self._producers: dict[str, Node] = {}
        self._tuples: dict[str, tuple[Ref | None, ...]] = {}
        self._random_count = 0

    def meta(self, value: Arg) -> TensorMeta:
        """Shape and dtype of a tensor value."""
        assert isinstance(value, Ref), value
        meta = self._metas[value.name]
        assert isinstance(meta, TensorMeta), value
        return meta

    def shape(self, value: Arg) -> tuple[int, ...]:
        """Sizes of a tensor value."""
        return self.meta(value).shape

    def producer(self, value: Arg) -> Node | None:
        """The emitted operator of a value; None for inputs and numbers."""
        return self._producers.get(value.name) if isinstance(value, Ref) else None

    def random_id(self) -> int:
        """Number of the next random operator, in program order."""
        self._random_count += 1
        return self._random_count - 1

    def rng_key(self) -> Ref:
        """The key input of random operators, made at its first use."""
        if RNG_KEY not in self._metas:
            meta = TensorMeta((), "int64")
            self.inputs.append(Input(RNG_KEY, InputKind.RNG, RNG_KEY, meta))
            self._metas[RNG_KEY] = meta
        return Ref(RNG_KEY)

    def emit(self, op: str, args: Sequence[Arg], meta: Meta, **kwargs: Arg) -> Ref:
        """Add an operator and give its value."""
        assert self.node is not None
        node = Node(
            name=f"v{len(self.nodes)}",
            op=op,
            args=tuple(args),
            meta=meta,
            kwargs=tuple(kwargs.items()),
            phase=self.node.phase,
            twin=self.node.twin,
            scope=self.node.scope,
            source=self.node.source,
        )
        self.nodes.append(node)
        self._metas[node.name] = meta
        self._producers[node.name] = node
        return Ref(node.name)

    def emit_tuple(
        self, op: str, args: Sequence[Arg], metas: Sequence[TensorMeta | None]
    ) -> tuple[Ref | None, ...]:
        """Add an operator with several results and give each of them."""
        whole = self.emit(op, args, tuple(metas))
        return tuple(
            self.emit("getitem", (whole, i), meta) if meta is not None else None
            for i, meta in enumerate(metas)
        )

    def keep(self, node: Node) -> Value:
        """The operator as it was traced."""
        ref = self.emit(node.op, node.args, node.meta, **dict(node.kwargs))
        if isinstance(node.meta, tuple):
            return self._items(ref, node.meta)
        return ref

    def _items(self, whole: Ref, metas: tuple[TensorMeta | None, ...]) -> tuple[Ref | None, ...]:
        return tuple(
            self.emit("getitem", (whole, i), meta) if meta is not None else None
            for i, meta in enumerate(metas)
        )

    def view(self, value: Arg, shape: Sequence[int]) -> Ref:
        """``value`` in another shape; views of views are one view."""
        assert isinstance(value, Ref)
        producer = self.producer(value)
        if producer is not None and producer.op == "aten.view.default":
            source = producer.args[0]
            assert isinstance(source, Ref)
            value = source
        meta = self.meta(value)
        target = _resolved(shape, meta.numel)
        if target == meta.shape:
            return value
        return self.emit("aten.view.default", (value, target), replace(meta, shape=target))

    def permute(self, value: Arg, dims: Sequence[int]) -> Ref:
        """``value`` with reordered dims; permutations of permutations are one."""
        assert isinstance(value, Ref)
        rank = len(self.shape(value))
        order = tuple(d % rank for d in dims)
        producer = self.producer(value)
        if producer is not None and producer.op == "aten.permute.default":
            before = producer.args[1]
            assert isinstance(before, tuple)
            source = producer.args[0]
            assert isinstance(source, Ref)
            value, order = source, tuple(before[d] for d in order)  # type: ignore[misc]
        if order == tuple(range(rank)):
            return value
        meta = self.meta(value)
        result = replace(meta, shape=tuple(meta.shape[d] for d in order))
        return self.emit("aten.permute.default", (value, order), result)

    def expand(self, value: Arg, shape: Sequence[int]) -> Ref:
        """``value`` repeated along dims of size 1, or new dims in front."""
        assert isinstance(value, Ref)
        meta = self.meta(value)
        lead = len(shape) - len(meta.shape)
        sizes = tuple(
            size if size != -1 else meta.shape[dim - lead] for dim, size in enumerate(shape)
        )
        if sizes == meta.shape:
            return value
        return self.emit("aten.expand.default", (value, sizes), replace(meta, shape=sizes))

    def cast(self, value: Arg, dtype: str) -> Ref:
        """``value`` in another dtype."""
        assert isinstance(value, Ref)
        meta = self.meta(value)
        if meta.dtype == dtype:
            return value
        return self.emit(
            "aten._to_copy.default", (value,), replace(meta, dtype=dtype), dtype=Dtype(dtype)
        )

    def full(self, shape: Sequence[int], value: float, dtype: str) -> Ref:
        """A tensor of one number."""
        meta = TensorMeta(tuple(shape), dtype)
        return self.emit("aten.full.default", (meta.shape, value), meta, dtype=Dtype(dtype))

    def binary(self, name: str, left: Arg, right: Arg, dtype: str | None = None) -> Ref:
        """``aten.<name>.Tensor``: add, sub, mul or div of a tensor and a tensor or number."""
        meta = self.meta(left)
        shape = meta.shape
        if isinstance(right, Ref):
            shape = broadcast(shape, self.shape(right))
        result = TensorMeta(shape, dtype or meta.dtype)
        return self.emit(f"aten.{name}.Tensor", (left, right), result)

    def unary(self, name: str, value: Arg) -> Ref:
        """``aten.<name>.default``, element by element."""
        return self.emit(f"aten.{name}.default", (value,), self.meta(value))

    def sum(
        self, value: Arg, dims: Sequence[int] | None, *, keepdim: bool, dtype: str | None = None
    ) -> Ref:
        """Sum over ``dims`` (all if None or empty), accumulated and given in ``dtype``."""
        assert isinstance(value, Ref)
        meta = self.meta(value)
        rank = len(meta.shape)
        over = tuple(sorted({d % rank for d in dims})) if dims and rank else tuple(range(rank))
        default = meta.dtype if meta.is_float else "int64"
        target = dtype or default
        if not over:
            return self.cast(value, target)
        shape = reduced(meta.shape, over, keepdim=keepdim)
        extra: dict[str, Arg] = {} if target == default else {"dtype": Dtype(target)}
        return self.emit(
            "aten.sum.dim_IntList", (value, over, keepdim), TensorMeta(shape, target), **extra
        )

    def slice(self, value: Arg, dim: int, start: int, end: int, step: int = 1) -> Ref:
        """Elements ``start:end:step`` of a dim."""
        assert isinstance(value, Ref)
        meta = self.meta(value)
        if (start, end, step) == (0, meta.shape[dim], 1):
            return value
        size = max(0, -(-(end - start) // step))
        shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
        return self.emit(
            "aten.slice.Tensor", (value, dim, start, end, step), replace(meta, shape=shape)
        )

    def cat(self, values: Sequence[Arg], dim: int) -> Ref:
        """Values one after the other along ``dim``; empty ones are left out."""
        kept = [v for v in values if self.meta(v).numel > 0] or list(values[:1])
        first = kept[0]
        assert isinstance(first, Ref)
        if len(kept) == 1:
            return first
        meta = self.meta(first)
        size = sum(self.shape(v)[dim] for v in kept)
        shape = (*meta.shape[:dim], size, *meta.shape[dim + 1 :])
        return self.emit("aten.cat.default", (tuple(kept), dim), replace(meta, shape=shape))

    def pad(self, value: Arg, before: Sequence[int], after: Sequence[int], fill: float) -> Ref:
        """``value`` with ``before`` and ``after`` elements of ``fill`` added to each dim."""
        assert isinstance(value, Ref)
        if not any(before) and not any(after):
            return value
        meta = self.meta(value)
        shape = tuple(b + s + a for b, s, a in zip(before, meta.shape, after, strict=True))
        pads: list[int] = []  # torch lists the last dim first
        for low, high in zip(reversed(before), reversed(after), strict=True):
            pads += [low, high]
        while len(pads) > 2 and pads[-2:] == [0, 0]:
            del pads[-2:]
        return self.emit(
            "aten.constant_pad_nd.default", (value, tuple(pads), fill), replace(meta, shape=shape)
        )


def broadcast(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    """Shape of an element-wise operator over two shapes."""
    rank = max(len(left), len(right))
    a = (1,) * (rank - len(left)) + tuple(left)
    b = (1,) * (rank - len(right)) + tuple(right)
    return tuple(y if x == 1 else x for x, y in zip(a, b, strict=True))


def reduced(shape: Sequence[int], dims: Sequence[int], *, keepdim: bool) -> tuple[int, ...]:
    """Shape after a reduction over ``dims``."""
    if keepdim:
        return tuple(1 if d in dims else size for d, size in enumerate(shape))
    return tuple(size for d, size in enumerate(shape) if d not in dims)


def _resolved(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    if -1 not in shape:
        return tuple(shape)
    known = prod(size for size in shape if size != -1)
    return tuple(size if size != -1 else numel // max(1, known) for size in shape)


def rebuilt(graph: Graph, rules: Callable[[str], Rule | None]) -> Graph:
    """``graph`` with every operator replaced by what its rule emits; kept where there is none."""
    builder = Builder(graph.inputs)
    values: dict[str, Value] = {i.name: Ref(i.name) for i in graph.inputs}
    stands_for: dict[str, str] = {}  # a traced operator -> the new one that twins refer to

    def new(name: str) -> Arg:
        value = values[name]
        assert isinstance(value, Ref), f"{name} has several results"
        return value

    for node in graph.nodes:
        if node.op == "getitem":
            values[node.name] = _picked(values, node)
            continue
        args, kwargs = node.map_refs(new)
        twin = stands_for.get(node.twin) if node.twin is not None else None
        renamed = replace(node, args=args, kwargs=kwargs, twin=twin)
        builder.node = renamed
        before = len(builder.nodes)
        renamed = _with_float_operands(builder, renamed)
        rule = rules(node.op)
        value = rule(builder, renamed) if rule is not None else builder.keep(renamed)
        values[node.name] = value
        _check_result(builder, node, value)
        stands_for[node.name] = _main(builder.nodes[before:], value)
    outputs = tuple(
        Output(o.kind, o.target, None if o.value is None else _single(values[o.value.name]))
        for o in graph.outputs
    )
    return Graph(tuple(builder.inputs), tuple(builder.nodes), outputs)


_FLOATING = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar", "mul.Tensor",
        "mul.Scalar", "div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode",
        "pow.Tensor_Scalar", "pow.Scalar", "pow.Tensor_Tensor", "exp.default", "exp2.default",
        "log.default", "log2.default", "log1p.default", "sqrt.default", "rsqrt.default",
        "reciprocal.default", "sin.default", "cos.default", "tan.default", "tanh.default",
        "sigmoid.default", "erf.default", "atan2.default",
    )
)  # fmt: skip
"""Element-wise operators that give floats of integers, in torch's default dtype."""


def _with_float_operands(builder: Builder, node: Node) -> Node:
    """``node`` with integer operands cast to its float result's dtype, as torch does inside.

    Said aloud, the dtype can be changed: in a program of another precision torch's default would
    stay what it was.
    """
    result = node.meta
    if node.op not in _FLOATING or not isinstance(result, TensorMeta) or not result.is_float:
        return node
    if any(builder.meta(Ref(name)).is_float for name in node.refs()):
        return node
    args, kwargs = node.map_refs(lambda name: builder.cast(Ref(name), result.dtype))
    return replace(node, args=args, kwargs=kwargs)


def _picked(values: dict[str, Value], node: Node) -> Value:
    source, index = node.args
    assert isinstance(source, Ref)
    assert isinstance(index, int)
    results = values[source.name]
    assert isinstance(results, tuple), f"{source.name} has one result"
    picked = results[index]
    # a result that the rule does not provide: nothing may read it
    return picked if picked is not None else (None,)


def _single(value: Value) -> Ref:
    assert isinstance(value, Ref), value
    return value


def _check_result(builder: Builder, node: Node, value: Value) -> None:
    if isinstance(value, Ref) and isinstance(node.meta, TensorMeta):
        made = builder.meta(value)
        assert made == node.meta, f"{node.name} ({node.op}): {node.meta} became {made}"


_LIGHT = ("getitem", "aten.view.", "aten.permute.", "aten.expand.", "aten.add.", "aten.full.",
          "aten._to_copy.", "aten.slice.")  # fmt: skip


def _main(emitted: Sequence[Node], value: Value) -> str:
    """The heaviest of the operators that stand for a traced one."""
    for node in emitted:
        if not node.op.startswith(_LIGHT):
            return node.name
    if emitted:
        return emitted[0].name
    if isinstance(value, Ref):
        return value.name
    return next((ref.name for ref in value if ref is not None), "")
