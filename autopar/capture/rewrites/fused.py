"""Takes fused projections apart: one matmul per slice of its result.

``split(x @ W + b)``, as in the joint query, key and value projection of GPT-2 or the joint gate and
up projection of Phi-3, hides the dims that could be split: a block of columns of the fused result
holds unlike parts of query, key and value. Written as one matmul per slice, with the slices of
``W`` and ``b`` as inputs of their own (:class:`~autopar.ir.graph.Part`), each can be split by
columns as any projection can. The numbers stay the same; the parameter stays one.

A projection is taken apart only if every reader of it and of its gradient fits the pattern::

    forward   y = view(mm(x, W) + b);  every reader of y is a slice along the last dim
    backward  V = view(cat(dy_0, dy_1, ...));  dx = V W^T, dW = x^T V, db = sum(V)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopar.ir.graph import (
    Arg,
    Graph,
    Input,
    InputKind,
    Node,
    Output,
    OutputKind,
    Part,
    Phase,
    Ref,
    TensorMeta,
)

_PERMUTE, _VIEW, _MM = "aten.permute.default", "aten.view.default", "aten.mm.default"
_SLICE, _ADD, _CAT = "aten.slice.Tensor", "aten.add.Tensor", "aten.cat.default"
_SUM = "aten.sum.dim_IntList"


@dataclass(slots=True)
class _Fused:
    """One projection that fits.

    Attributes:
        weight: The fused weight; ``dim`` is the one that is sliced.
        chain: Forward operators from the matmul to what is sliced, in order.
        tiles: (start, stop) of the slices, in order.
        slices: Slice operator -> index of its tile.
        gradient: The operator that joins the slices' gradients, and its flat view if there is one.
        uses: Backward readers of the joined gradient, by name.
    """

    weight: Input
    dim: int
    chain: list[Node]
    tiles: list[tuple[int, int]]
    slices: dict[str, int]
    bias: Input | None = None
    gradient: list[Node] = field(default_factory=list)
    uses: dict[str, Node] = field(default_factory=dict)


class _Facts:
    """Look-ups over a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.node_map()
        self.inputs = graph.input_map()
        self.users = graph.users()
        self.metas = graph.metas()
        self.outputs: dict[str, list[Output]] = {}
        for output in graph.outputs:
            if output.value is not None:
                self.outputs.setdefault(output.value.name, []).append(output)

    def readers(self, name: str) -> list[Node]:
        return [self.nodes[u] for u in self.users[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        meta = self.metas[name]
        return meta.shape if isinstance(meta, TensorMeta) else ()

    def param(self, name: str) -> Input | None:
        entry = self.inputs.get(name)
        if entry is None or entry.kind is not InputKind.PARAM or entry.aliases or entry.part:
            return None
        return entry


def split_fused_projections(graph: Graph) -> Graph:
    """``graph`` with every fused projection that fits taken apart."""
    facts = _Facts(graph)
    found = [f for f in _candidates(facts) if _match_backward(facts, f)]
    return _Rewriter(facts, found).run() if found else graph


def _candidates(facts: _Facts) -> Iterator[_Fused]:
    for node in facts.graph.nodes:
        # a layer on joined features mirrors the pattern: its dx is sliced, its input is a cat
        if node.op != _MM or node.phase is not Phase.FORWARD or node.name in facts.outputs:
            continue
        source = node.refs()[1]
        turned = facts.nodes.get(source)
        if turned is not None and turned.op == _PERMUTE:
            source = turned.refs()[0]
        weight = facts.param(source)
        if weight is None or len(node.refs()) != 2:
            continue
        fused = _forward(facts, node, weight, 1 if turned is None else 0)
        if fused is not None:
            yield fused


def _forward(facts: _Facts, node: Node, weight: Input, dim: int) -> _Fused | None:
    """Follow the matmul to its slices."""
    chain, bias, width = [node], None, facts.shape(node.name)[-1]
    while True:
        readers = facts.readers(chain[-1].name)
        if readers and all(_is_last_slice(facts, r) for r in readers):
            break
        if len(readers) != 1 or readers[0].name in facts.outputs:
            return None
        step = readers[0]
        if step.op == _ADD and bias is None and step.refs()[0] == chain[-1].name:
            other = facts.param(step.refs()[1]) if len(step.refs()) == 2 else None
            if other is None or facts.shape(other.name) != (width,):
                return None
            bias = other
        elif step.op != _VIEW or facts.shape(step.name)[-1] != width:
            return None
        chain.append(step)
    bounds = {r.name: _bounds(r, width) for r in readers}
    tiles = sorted(set(bounds.values()))
    joined = [0, *(stop for _, stop in tiles)]
    if len(tiles) < 2 or joined[:-1] != [start for start, _ in tiles] or joined[-1] != width:
        return None
    slices = {name: tiles.index(b) for name, b in bounds.items()}
    return _Fused(weight, dim, chain, tiles, slices, bias)


def _is_last_slice(facts: _Facts, node: Node) -> bool:
    if node.op != _SLICE or node.name in facts.outputs:
        return False
    rank = len(facts.shape(node.refs()[0]))
    dim = node.args[1] if len(node.args) > 1 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    return isinstance(dim, int) and dim % rank == rank - 1 and step == 1


def _bounds(node: Node, size: int) -> tuple[int, int]:
    start, stop = (node.args[i] if len(node.args) > i else None for i in (2, 3))
    low = start if isinstance(start, int) else 0
    high = stop if isinstance(stop, int) else size
    low, high = (b + size if b < 0 else b for b in (low, high))
    return low, min(high, size)


def _match_backward(facts: _Facts, fused: _Fused) -> bool:
    """Whether every other reader of the weight and bias is of the pattern."""
    readers: list[Node] = []
    for reader in facts.readers(fused.weight.name):
        if reader.op == _PERMUTE:
            readers += facts.readers(reader.name)
        else:
            readers.append(reader)
    joined: set[str] = set()
    for reader in readers:
        if reader is fused.chain[0]:
            continue
        if reader.op != _MM or len(reader.refs()) != 2 or reader.refs()[0] == fused.weight.name:
            return False
        joined.add(reader.refs()[0])
    outputs = [
        o for o in facts.graph.outputs_of(OutputKind.GRAD) if o.target == fused.weight.target
    ]
    for output in outputs:
        value = output.value
        product = facts.nodes.get(value.name) if value is not None else None
        if product is None or product.op != _MM:
            return value is None and not joined
        joined.add(_other_side(facts, fused, product))
    if fused.bias is not None and not _only_reader(facts, fused):
        return False
    if not joined:
        return not outputs and _bias_gradient(facts, fused) is None
    if len(joined) != 1:
        return False
    return _joined(facts, fused, joined.pop())


def _only_reader(facts: _Facts, fused: _Fused) -> bool:
    assert fused.bias is not None
    names = {n.name for n in fused.chain}
    return all(r.name in names for r in facts.readers(fused.bias.name))


def _other_side(facts: _Facts, fused: _Fused, product: Node) -> str:
    """The operand of ``dW = x^T V`` (or ``V^T x``) that is V."""
    name = product.refs()[1 if fused.dim == 1 else 0]
    node = facts.nodes.get(name)
    if fused.dim == 0 and node is not None and node.op == _PERMUTE:
        return node.refs()[0]
    return name


def _bias_gradient(facts: _Facts, fused: _Fused) -> Node | None:
    if fused.bias is None:
        return None
    for output in facts.graph.outputs_of(OutputKind.GRAD):
        if output.target == fused.bias.target and output.value is not None:
            return facts.nodes.get(output.value.name)
    return None


def _joined(facts: _Facts, fused: _Fused, name: str) -> bool:
    """Check that ``name`` is the joined gradient and note its readers."""
    node = facts.nodes.get(name)
    flat: list[Node] = []
    if node is not None and node.op == _VIEW:
        flat = [node]
        node = facts.nodes.get(node.refs()[0])
        if node is not None and len(facts.readers(node.name)) != 1:
            return False
    if node is None or node.op != _CAT or facts.shape(node.name)[-1] != fused.tiles[-1][1]:
        return False
    widths = [facts.shape(r)[-1] for r in node.refs()]
    rank = len(facts.shape(node.name))
    dim = node.args[1] if len(node.args) > 1 else 0
    if not isinstance(dim, int) or dim % rank != rank - 1:
        return False
    if widths != [stop - start for start, stop in fused.tiles]:
        return False
    fused.gradient = [node, *flat]
    allowed = {fused.weight.target, fused.bias.target if fused.bias is not None else ""}
    for reader in facts.readers(name):
        for final in facts.readers(reader.name) if reader.op == _PERMUTE else [reader]:
            fused.uses[final.name] = final
            if not _fits(facts, fused, final, name, allowed):
                return False
    return name not in facts.outputs


def _fits(facts: _Facts, fused: _Fused, node: Node, joined: str, allowed: set[str]) -> bool:
    targets = {o.target for o in facts.outputs.get(node.name, ())}
    if node.op == _MM:
        right = facts.nodes.get(node.refs()[1])
        source = right.refs()[0] if right is not None and right.op == _PERMUTE else node.refs()[1]
        if node.refs()[0] == joined and source == fused.weight.name:
            return not targets
        return targets == {fused.weight.target} and not facts.readers(node.name)
    if node.op != _SUM or node.args[1] != (0,) or fused.bias is None:
        return False
    views = facts.readers(node.name)
    if targets == {fused.bias.target} and not views:
        return True
    return (
        not targets
        and len(views) == 1
        and views[0].op == _VIEW
        and {o.target for o in facts.outputs.get(views[0].name, ())} <= allowed
        and not facts.readers(views[0].name)
    )


class _Rewriter:
    """Builds the new graph; names are made stable afterwards by the caller."""

    def __init__(self, facts: _Facts, found: list[_Fused]) -> None:
        self.facts = facts
        self.nodes: list[Node] = []
        self.inputs: dict[str, list[Input]] = {}
        self.replaced: dict[str, Ref] = {}
        self.grads: dict[str, list[Output]] = {}
        self.pieces: dict[str, list[Ref]] = {}
        self.starts = {f.chain[0].name: f for f in found}
        self.joins = {f.gradient[-1].name: f for f in found if f.gradient}
        self.uses = {name: f for f in found for name in f.uses}
        self.twins: dict[str, str] = {}
        self.count = 0

    def run(self) -> Graph:
        for node in self.facts.graph.nodes:
            if node.name in self.starts:
                self._forward(self.starts[node.name])
            fused = self.uses.get(node.name)
            if fused is not None:
                self._use(fused, node)
                continue
            args, kwargs = node.map_refs(lambda name: self.replaced.get(name, Ref(name)))
            self.nodes.append(replace(node, args=args, kwargs=kwargs, twin=self._twin(node)))
            if node.name in self.joins:
                self._join(self.joins[node.name])
        inputs = tuple(p for i in self.facts.graph.inputs for p in self.inputs.get(i.name, [i]))
        outputs = tuple(
            p for o in self.facts.graph.outputs
            for p in (self.grads.get(o.target, [o]) if o.kind is OutputKind.GRAD else [o])
        )  # fmt: skip
        return Graph(inputs, tuple(self.nodes), outputs)

    def _emit(self, like: Node, op: str, args: tuple[Arg, ...], shape: tuple[int, ...]) -> Ref:
        meta = like.meta
        assert isinstance(meta, TensorMeta)
        name = f"fused_{self.count}"
        self.count += 1
        self.nodes.append(
            replace(
                like,
                name=name,
                op=op,
                args=args,
                meta=TensorMeta(shape, meta.dtype),
                twin=self._twin(like),
            )
        )
        return Ref(name)

    def _twin(self, node: Node) -> str | None:
        return None if node.twin is None else self.twins.get(node.twin, node.twin)

    def _parts(self, entry: Input, dim: int, tiles: list[tuple[int, int]]) -> list[Input]:
        if entry.name not in self.inputs:
            assert entry.meta is not None
            shape = entry.meta.shape
            parts = []
            for index, (start, stop) in enumerate(tiles):
                part = Part(entry.target, dim, start, stop)
                meta = TensorMeta((*shape[:dim], stop - start, *shape[dim + 1 :]), entry.meta.dtype)
                parts.append(
                    replace(
                        entry,
                        name=f"{entry.name}_part{index}",
                        target=str(part),
                        meta=meta,
                        part=part,
                    )
                )
            self.inputs[entry.name] = parts
        return self.inputs[entry.name]

    def _forward(self, fused: _Fused) -> None:
        matmul = fused.chain[0]
        rows = self.facts.shape(matmul.name)[0]
        x = self.replaced.get(matmul.refs()[0], Ref(matmul.refs()[0]))
        weights = self._parts(fused.weight, fused.dim, fused.tiles)
        biases = self._parts(fused.bias, 0, fused.tiles) if fused.bias is not None else []
        values: list[Ref] = []
        for index, (start, stop) in enumerate(fused.tiles):
            width = stop - start
            weight = Ref(weights[index].name)
            if fused.dim == 0:
                depth = self.facts.shape(fused.weight.name)[1]
                weight = self._emit(matmul, _PERMUTE, (weight, (1, 0)), (depth, width))
            value = self._emit(matmul, _MM, (x, weight), (rows, width))
            self.twins[matmul.name] = value.name
            for step in fused.chain[1:]:
                shape = (*self.facts.shape(step.name)[:-1], width)
                if step.op == _ADD:
                    value = self._emit(step, _ADD, (value, Ref(biases[index].name)), shape)
                else:
                    value = self._emit(step, _VIEW, (value, shape), shape)
                self.twins[step.name] = value.name
            values.append(value)
        for name, index in fused.slices.items():
            self.replaced[name] = values[index]

    def _join(self, fused: _Fused) -> None:
        join = fused.gradient[0]
        last = fused.gradient[-1]
        pieces = []
        for ref in join.refs():
            value = self.replaced.get(ref, Ref(ref))
            if last is not join:
                shape = (*self.facts.shape(last.name)[:-1], self.facts.shape(ref)[-1])
                value = self._emit(last, _VIEW, (value, shape), shape)
            pieces.append(value)
        self.pieces[last.name] = pieces

    def _use(self, fused: _Fused, node: Node) -> None:
        pieces = self.pieces[fused.gradient[-1].name]
        weights = self.inputs[fused.weight.name]
        targets = {o.target for o in self.facts.outputs.get(node.name, ())}
        if node.op == _SUM:
            self._bias_gradient(fused, node, pieces)
        elif fused.weight.target in targets:
            self.grads[fused.weight.target] = [
                Output(
                    OutputKind.GRAD, part.target, self._weight_gradient(fused, node, piece, part)
                )
                for piece, part in zip(pieces, weights, strict=True)
            ]
        else:
            total: Ref | None = None
            shape = self.facts.shape(node.name)
            for piece, part in zip(pieces, weights, strict=True):
                weight = Ref(part.name)
                if fused.dim == 1 and part.meta is not None:
                    turned = part.meta.shape[::-1]
                    weight = self._emit(node, _PERMUTE, (weight, (1, 0)), turned)
                term = self._emit(node, _MM, (piece, weight), shape)
                total = term if total is None else self._emit(node, _ADD, (total, term), shape)
            assert total is not None
            self.replaced[node.name] = total

    def _weight_gradient(self, fused: _Fused, node: Node, piece: Ref, part: Input) -> Ref:
        assert part.meta is not None
        if fused.dim == 1:
            x = node.refs()[0]
            return self._emit(node, _MM, (self.replaced.get(x, Ref(x)), piece), part.meta.shape)
        width, depth = part.meta.shape
        x = node.refs()[1]
        rows = self.facts.shape(x)[0]
        turned = self._emit(node, _PERMUTE, (piece, (1, 0)), (width, rows))
        return self._emit(node, _MM, (turned, self.replaced.get(x, Ref(x))), (width, depth))

    def _bias_gradient(self, fused: _Fused, node: Node, pieces: list[Ref]) -> None:
        assert fused.bias is not None
        outputs = []
        for piece, part in zip(pieces, self.inputs[fused.bias.name], strict=True):
            width = part.meta.shape[0] if part.meta is not None else 0
            shape = (*self.facts.shape(node.name)[:-1], width)
            total = self._emit(node, _SUM, (piece, *node.args[1:]), shape)
            if len(shape) > 1:
                total = self._emit(node, _VIEW, (total, (width,)), (width,))
            outputs.append(Output(OutputKind.GRAD, part.target, total))
        self.grads[fused.bias.target] = outputs
