"""A program in low precision with float32 masters, by :mod:`autopar.ir.precision_rules`.

Casts are operators of the program, so that splits, prices, memory and the comparison in float64
see them. What is special:

* *Parameters* are read in the precision of their readers and never widen them. One that is only
  read in the low precision is an input in it, with a ``master``: it is cast where it rests, before
  anything is gathered.
* *What depends on buffers, constants and integer inputs alone* (position angles, masks) runs as the
  model's code says. Buffers are never cast; a new value of a buffer has the buffer's dtype.
* *Casts to a wider type* are made anew by the backward pass, so that what is kept for it is the
  narrow value; casts to a narrower one are shared.
* *Gradients* come back in the precision of the value that they belong to, those of parameters in
  float32, in which they are summed over micro-batches and ranks.
* *The model's own casts* stay. In a model whose parameters are in a low precision already, casts to
  that precision mean "back to my dtype" and are left to the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ConfigError
from autopar.ir.graph import (
    ITEM_BYTES,
    Arg,
    Dtype,
    Graph,
    Input,
    InputKind,
    Meta,
    Node,
    Output,
    OutputKind,
    Phase,
    Ref,
    TensorMeta,
)
from autopar.ir.precision_rules import (
    HALVES,
    PRECISIONS,
    PROMOTING,
    VIEWS,
    WHOLE_VIEWS,
    WIDE,
    Family,
    PrecisionRule,
    rule_of,
    short_name,
)
from autopar.ir.precision_values import (
    Gradients,
    argument_of_refs,
    fits,
    is_float,
    is_half,
    result_metas,
    wanted_parameters,
    widest,
    without_halves,
)

_CAST = "aten._to_copy.default"
_FULL = "aten.full.default"
_AS_CAPTURED = frozenset({"float64", "complex64", "complex128"})  # with these, nothing is changed
_LIVE_INPUTS = (InputKind.PARAM, InputKind.USER, InputKind.TANGENT)


def check_precision(word: object) -> str:
    """``word`` if it is one of those that ``precision=`` takes.

    Raises:
        ConfigError: It is not.
    """
    if not isinstance(word, str) or word not in PRECISIONS:
        known = ", ".join(map(repr, PRECISIONS))
        raise ConfigError(
            f"precision={word!r}: must be one of {known}, or left out for the model's own dtypes"
        )
    return word


def lower_precision(graph: Graph, precision: str) -> Graph:
    """``graph`` computed in a low precision; the casts in it have no stable names yet.

    Args:
        graph: A joint program, normalised.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        ConfigError: The word is unknown, the program reads no parameter that could be cast, or
            one in float64.
    """
    low = PRECISIONS[check_precision(precision)]
    floats = [i for i in graph.of_kind(InputKind.PARAM) if is_float(i.meta)]
    if not floats:
        raise ConfigError(
            f"precision={precision!r}: the model's forward reads no floating-point parameter, so "
            "that nothing can be computed in another precision; leave precision= out"
        )
    double = next((i for i in floats if i.meta and i.meta.dtype == "float64"), None)
    if double is not None:
        raise ConfigError(
            f"precision={precision!r}: parameter {double.param!r} is float64 and would lose digits "
            "as a float32 master; convert the model by .float(), or leave precision= out"
        )
    return _Lowering(graph, low).run()


def widen_gradients(graph: Graph) -> Graph:
    """``graph`` with the gradients of parameters in a low precision yielded in float32.

    They are summed over micro-batches and ranks, and become the parameter's dtype at the end.
    """
    metas = graph.metas()
    table = graph.node_map()
    casts: dict[str, Node] = {}
    outputs = []
    for output in graph.outputs:
        meta = metas[output.value.name] if output.value is not None else None
        if output.kind is OutputKind.GRAD and output.value is not None and is_half(meta):
            assert isinstance(meta, TensorMeta)
            source = output.value.name
            maker = table.get(source)
            casts[source] = Node(
                name=f"{source}~{WIDE}", op=_CAST, args=(output.value,),
                meta=replace(meta, dtype=WIDE), kwargs=(("dtype", Dtype(WIDE)),),
                phase=Phase.BACKWARD, twin=maker.twin if maker else None,
                scope=maker.scope if maker else "", source=maker.source if maker else "",
            )  # fmt: skip
            output = replace(output, value=Ref(casts[source].name))
        outputs.append(output)
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.append(node)
        if node.name in casts:
            nodes.append(casts.pop(node.name))
    return Graph(graph.inputs, (*nodes, *casts.values()), tuple(outputs))


class _Lowering:
    """The state of :func:`lower_precision` while it walks the program."""

    def __init__(self, graph: Graph, low: str) -> None:
        self.graph = graph
        self.low = low
        self.old = graph.metas()
        self.inputs = graph.input_map()
        self.gradients = Gradients(graph)
        self.nodes: list[Node] = []
        self.makers: dict[str, Node] = {}
        self.metas: dict[str, Meta] = {}
        self.live: set[str] = set()
        self.became: dict[str, str] = {}  # a cast of the model -> what stands for it
        self.outside: dict[str, str] = {}  # a gradient -> as operators beyond its twin's read it
        self.weak: dict[str, Node | Input] = {}  # made in the dtype of each reader
        self.made: dict[tuple[str, str], str] = {}
        self.casts: dict[tuple[str, str, Phase | None], str] = {}
        self.widened: dict[str, str] = {}  # a cast to a wider type -> its operand
        self.wants: dict[str, dict[str, str]] = {}  # parameter -> dtype -> name
        metas = [i.meta for i in graph.of_kind(InputKind.PARAM)]
        self.own_low = {m.dtype for m in metas if m is not None and m.dtype in HALVES}

    def run(self) -> Graph:
        for entry in self.graph.inputs:
            if is_float(entry.meta) and entry.kind in _LIVE_INPUTS:
                self.live.add(entry.name)
            if is_float(entry.meta) and entry.kind is InputKind.PARAM:
                self.weak[entry.name] = entry
            else:
                self.metas[entry.name] = entry.meta
        for node in self.graph.nodes:
            self._node(node)
        outputs = tuple(map(self._output, self.graph.outputs))
        inputs = tuple(
            replace(entry, meta=self.metas[entry.name])  # type: ignore[arg-type]
            if entry.kind is InputKind.TANGENT
            else entry
            for entry in self.graph.inputs
        )
        return wanted_parameters(Graph(inputs, tuple(self.nodes), outputs), self.wants)

    # -- operators ---------------------------------------------------------------------------------
    def _node(self, node: Node) -> None:
        refs = node.refs()
        for name in refs:
            entry = self.inputs.get(name)
            if entry is not None and entry.kind is InputKind.TANGENT:
                self._tangent(entry)
        if any(name in self.live for name in refs):
            self.live.add(node.name)
        is_view = short_name(node.op) in VIEWS and bool(refs) and refs[0] in self.weak
        if is_view or (node.op == _FULL and is_float(node.meta)):
            self.weak[node.name] = node
            return
        if node.op == "getitem":
            whole, index = self.metas[refs[0]], node.args[1]
            assert isinstance(whole, tuple)
            assert isinstance(index, int)
            self._append(replace(node, meta=whole[index]))
        elif node.op == _CAST and node.name in self.live:
            self._own_cast(node)
        else:
            rule = rule_of(node.op) if node.name in self.live else None
            dtype = None if rule is None else self._dtype_for(node, rule)
            if rule is None or dtype is None:
                self._as_captured(node)
            else:
                self._ruled(node, rule, dtype)
        self._return_gradient(node)

    def _tangent(self, entry: Input) -> None:
        """A tangent has the dtype of the output that it belongs to."""
        for output in self.graph.outputs:
            if output.target != entry.target or output.value is None:
                continue
            if output.kind in (OutputKind.LOSS, OutputKind.OUTPUT):
                assert entry.meta is not None
                value = self.metas.get(self.became.get(output.value.name, output.value.name))
                dtype = value.dtype if isinstance(value, TensorMeta) else entry.meta.dtype
                if output.kind is OutputKind.LOSS and dtype in HALVES:
                    dtype = WIDE
                self.metas[entry.name] = replace(entry.meta, dtype=dtype)

    def _own_cast(self, node: Node) -> None:
        """A cast that the model's code asks for."""
        (source,) = node.refs()
        new = node.meta
        assert isinstance(new, TensorMeta)
        if not (is_float(self.old[source]) and new.is_float):
            self._as_captured(node)
        elif new.dtype in self.own_low:
            is_weak = source in self.weak
            self.became[node.name] = (
                self._make(source, WIDE, node) if is_weak else self._read(source, node)
            )
        else:
            self.became[node.name] = self._cast(source, new.dtype, node)

    def _as_captured(self, node: Node) -> None:
        """Operands and results in the dtypes of the model's own program."""
        self._emit(node, [self._as_old(name, node) for name in node.refs()], node.meta)

    def _as_old(self, name: str, reader: Node) -> str:
        old = self.old[name]
        if isinstance(old, TensorMeta) and (old.is_float or old.dtype.startswith("complex")):
            return self._cast(name, old.dtype, reader)
        return self._read(name, reader)

    def _dtype_for(self, node: Node, rule: PrecisionRule) -> str | None:
        """The dtype that an operator computes in; None: as captured."""
        metas = (*map(self.old.get, node.refs()), *node.metas())
        dtypes = {m.dtype for m in metas if isinstance(m, TensorMeta)}
        if not dtypes.isdisjoint(_AS_CAPTURED):
            return None
        if rule.family is Family.FLOAT32:
            return WIDE
        dtype = self.low if rule.family is Family.LOW else self._widest(node)
        numbers = [node, *(w for r in node.refs() if isinstance(w := self.weak.get(r), Node))]
        return dtype if all(fits(n, dtype) for n in numbers) else WIDE

    def _widest(self, node: Node) -> str:
        """The widest dtype of the operands that decide: what is no parameter and no number."""
        strong = [self.metas[self._read(r, node)] for r in node.refs() if r not in self.weak]
        weak = [self.old[r] for r in node.refs() if r in self.weak]
        return widest(
            strong, has_weak_dims=any(isinstance(m, TensorMeta) and m.shape for m in weak)
        )

    def _ruled(self, node: Node, rule: PrecisionRule, dtype: str) -> None:
        mixes = rule.family is Family.FOLLOW and short_name(node.op) in PROMOTING
        asks = False
        operands: list[str] = []
        for name, position in zip(node.refs(), argument_of_refs(node), strict=True):
            is_cast = is_float(self.old[name]) and (
                rule.operands is None or position in rule.operands
            )
            if is_cast and rule.has_dtype and name not in self.weak:
                operands.append(self._read(name, node))
                asks = self._dtype(operands[-1]) != dtype
            elif is_cast and not (mixes and name not in self.weak):
                operands.append(self._cast(name, dtype, node))
            else:
                operands.append(self._read(name, node))
        if rule.family is Family.FLOAT32:
            node = without_halves(node)
        if asks:
            others = [(k, v) for k, v in node.kwargs if k != "dtype"]
            node = replace(node, kwargs=(*others, ("dtype", Dtype(dtype))))
        like = {r: self.metas[self._read(a.name, node)] for r, p in rule.mirrors
                if isinstance(a := node.args[p], Ref) and a.name not in self.weak}  # fmt: skip
        self._emit(node, operands, result_metas(node.meta, dtype, rule.wide_results, like))

    def _return_gradient(self, node: Node) -> None:
        """What leaves its twin's operators is not wider than what it is the gradient of."""
        if node.name not in self.live or not self.gradients.leaves(node):
            return
        name = self.became.get(node.name, node.name)
        found = {WIDE if o in self.weak else self._dtype(self.became.get(o, o))
                 for o in self.gradients.operands(node)}  # fmt: skip
        dtype = max(sorted(found), key=ITEM_BYTES.__getitem__, default="float64")
        if ITEM_BYTES[self._dtype(name)] > ITEM_BYTES[dtype]:
            self.outside[node.name] = self._cast_of(name, dtype, node)

    # -- values ------------------------------------------------------------------------------------
    def _dtype(self, name: str) -> str:
        meta = self.metas[name]
        assert isinstance(meta, TensorMeta), name
        return meta.dtype

    def _read(self, name: str, reader: Node) -> str:
        """The value as ``reader`` sees it, in the dtype that it has; weak ones as captured."""
        if name in self.weak:
            old = self.old[name]
            assert isinstance(old, TensorMeta)
            return self._make(name, old.dtype, reader)
        if name in self.outside and self.gradients.twin(name) != reader.twin:
            return self.outside[name]
        name = self.became.get(name, name)
        source = self.widened.get(name)
        if source is not None and reader.phase is Phase.BACKWARD:
            return self._cast_of(source, self._dtype(name), reader)
        return name

    def _cast(self, name: str, dtype: str, reader: Node) -> str:
        """The value in ``dtype``."""
        if name in self.weak:
            return self._make(name, dtype, reader)
        return self._cast_of(self._read(name, reader), dtype, reader)

    def _cast_of(self, name: str, dtype: str, reader: Node) -> str:
        meta = self.metas[name]
        assert isinstance(meta, TensorMeta), name
        if meta.dtype == dtype:
            return name
        source = self.widened.get(name)
        if source is not None and self._dtype(source) == dtype:
            return source
        widens = ITEM_BYTES[dtype] > ITEM_BYTES[meta.dtype]
        key = (name, dtype, reader.phase if widens else None)
        if key not in self.casts:
            made = f"{name}~{dtype}" + (f"~{reader.phase.value}" if widens else "")
            maker = self.makers.get(name)
            if not widens and maker is not None and short_name(maker.op) in WHOLE_VIEWS:
                base = self._cast_of(maker.refs()[0], dtype, reader)
                args, _ = maker.map_refs(lambda _: Ref(base))
                cast = replace(maker, args=args, phase=reader.phase)
            else:
                cast = Node(
                    name=made, op=_CAST, args=(Ref(name),), meta=meta,
                    kwargs=(("dtype", Dtype(dtype)),), phase=reader.phase, twin=reader.twin,
                    scope=reader.scope, source=reader.source,
                )  # fmt: skip
            self._append(replace(cast, name=made, meta=replace(meta, dtype=dtype)))
            self.casts[key] = made
            if widens:
                self.widened[made] = name
        return self.casts[key]

    def _make(self, name: str, dtype: str, reader: Node) -> str:
        """A parameter, a tensor of one number, or a view of either, in the dtype of its reader."""
        if (name, dtype) in self.made:
            return self.made[name, dtype]
        maker, meta = self.weak[name], self.old[name]
        assert isinstance(meta, TensorMeta)
        made = f"{name}~{dtype}"
        self.made[name, dtype] = made
        meta = replace(meta, dtype=dtype)
        if isinstance(maker, Input):
            self.wants.setdefault(name, {})[dtype] = made
            self.metas[made] = meta
        elif maker.op == _FULL:
            kwargs = (*((k, v) for k, v in maker.kwargs if k != "dtype"), ("dtype", Dtype(dtype)))
            self._append(replace(maker, name=made, meta=meta, kwargs=kwargs))
        else:
            base = self._make(maker.refs()[0], dtype, reader)
            args, _ = maker.map_refs(lambda _: Ref(base))
            self._append(replace(maker, name=made, args=args, meta=meta))
        return made

    def _emit(self, node: Node, operands: Sequence[str], meta: Meta) -> None:
        """Append ``node`` with its operands replaced, in their order."""
        supply = iter(operands)

        def change(_: str) -> Arg:
            return Ref(next(supply))

        args, kwargs = node.map_refs(change)
        self._append(replace(node, args=args, kwargs=kwargs, meta=meta))

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        self.makers[node.name] = node
        self.metas[node.name] = node.meta

    # -- outputs -----------------------------------------------------------------------------------
    def _output(self, output: Output) -> Output:
        if output.value is None or not is_float(self.old[output.value.name]):
            return output
        name = output.value.name
        backward = output.kind is OutputKind.GRAD
        end = Node(
            name="", op="", args=(), meta=None,
            phase=Phase.BACKWARD if backward else Phase.FORWARD, twin=self.gradients.twin(name),
        )  # fmt: skip
        if name in self.weak:
            old = self.old[name]
            assert isinstance(old, TensorMeta)
            return replace(output, value=Ref(self._make(name, old.dtype, end)))
        value = self._read(name, end)
        if output.kind is OutputKind.MUTATION:
            value = self._cast_of(value, self._buffer_dtype(output.target), end)
        elif (backward or output.kind is OutputKind.LOSS) and self._dtype(value) in HALVES:
            value = self._cast_of(value, WIDE, end)
        return replace(output, value=Ref(value))

    def _buffer_dtype(self, target: str) -> str:
        for entry in self.graph.of_kind(InputKind.BUFFER):
            if entry.target == target and entry.meta is not None:
                return entry.meta.dtype
        return WIDE
