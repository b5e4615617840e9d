"""Finds sorting by expert in a captured program and writes it with the operators of ``capture.moe``.

Models sort slots by expert with general operators: a sort, indexing by what it gives, counts of
equal ids, a product per run. Seen one by one these have no split along the tokens, since each may
read anywhere. The pattern starts at a sort of a vector of integers whose values are counted for the
run lengths of a grouped product::

    values, order = sort(ids)                  order of the slots
    order // k                                 token of each row
    full.index_put(order, arange)              row of each slot (or a sort of ``order``)
    cumsum(histc(values))                      where the runs end

Each reader of these is replaced on its own, where it means the same:

====================================================  ==================================
``x[order // k]``, ``y[order]``                       ``moe_dispatch``
``rows[row of slot]``                                 ``moe_combine``
``zeros.index_put(order // k, rows, accumulate)``     ``moe_combine``
``zeros.index_add(0, order // k, rows)``              ``moe_combine``
``zeros.index_put(row of slot, y, accumulate)``       ``moe_dispatch``
``table[sorted ids]``, one entry per expert           ``moe_spread``
``zeros.index_put(sorted ids, rows, accumulate)``     ``moe_run_sums``
grouped products of transformers and of torch         ``grouped_mm``, ``grouped_mm_weight``
the sorted ids                                        ``moe_dispatch`` of the ids
====================================================  ==================================

Readers that fit nothing go on reading ``order``; then the slots are sorted whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.ir.graph import Arg, Graph, Meta, Node, Ref, TensorMeta

_SORTS = ("aten.sort.default", "aten.sort.stable")
_DIVISIONS = ("aten.floor_divide.default", "aten.div.Tensor_mode")
_FALLBACK = "transformers.grouped_mm_fallback"
_ALL_ROWS = 1.0


@dataclass(slots=True)
class _Sort:
    """A sort by expert.

    Attributes:
        node: The sort.
        ids: What is sorted.
        experts: How many experts there are.
        k: Slots per token.
        name: Stem of the new operators' names.
    """

    node: Node
    ids: str
    experts: int
    k: int
    name: str


@dataclass(frozen=True, slots=True)
class _Index:
    """An index tensor that follows from a sort: ``order // k``, or its inverse."""

    sort: str
    k: int
    is_inverse: bool = False


@dataclass(slots=True)
class _Found:
    """Values of a program that follow from sorts by expert.

    Attributes:
        sorts: By name of the sort operator.
        values: Sorted ids -> sort.
        indices: Index tensors.
        ends: Ends of the runs -> sort.
    """

    sorts: dict[str, _Sort] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    indices: dict[str, _Index] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)


def sort_by_expert(graph: Graph) -> Graph:
    """``graph`` with every sort by expert, and what reads it, written as neutral operators."""
    if not any(node.op in _SORTS for node in graph.nodes):
        return graph
    found = _find(graph)
    return _Writer(graph, found).run() if found.sorts else graph


def _find(graph: Graph) -> _Found:
    found = _Found()
    nodes, metas = graph.node_map(), graph.metas()
    counts: dict[str, tuple[str, int]] = {}
    for node in graph.nodes:
        if node.op in _SORTS:
            _find_sort(found, node, metas)
        elif node.op == "getitem" and node.refs()[0] in found.sorts:
            sort = node.refs()[0]
            if node.args[1] == 0:
                found.values[node.name] = sort
            else:
                found.indices[node.name] = _Index(sort, 1)
        elif node.op == "aten.histc.default":
            counted = _counted(found, node, nodes)
            if counted is not None:
                counts[node.name] = counted
        elif node.op == "aten.cumsum.default" and node.refs()[0] in counts:
            sort, experts = counts[node.refs()[0]]
            found.ends[node.name] = sort
            found.sorts[sort].experts = experts
        else:
            _find_index(found, node, nodes, metas)
    used = {found.ends[r] for n in graph.nodes for r in n.refs() if r in found.ends}
    kept = {name: s for name, s in found.sorts.items() if name in used and s.experts}
    return _Found(
        kept,
        {v: s for v, s in found.values.items() if s in kept},
        {v: i for v, i in found.indices.items() if i.sort in kept},
        {v: s for v, s in found.ends.items() if s in kept},
    )


def _find_sort(found: _Found, node: Node, metas: dict[str, Meta]) -> None:
    ids = node.refs()[0]
    meta = metas[ids]
    if not isinstance(meta, TensorMeta) or len(meta.shape) != 1 or meta.is_float:
        return
    if meta.dtype == "bool" or node.args[-1] is True:
        return  # descending
    inverted = found.indices.get(ids)
    if inverted is not None and inverted.k == 1 and not inverted.is_inverse:
        return  # a sort of the order: its second result is the inverse, found as an index
    found.sorts[node.name] = _Sort(node, ids, 0, 1, f"moe_{len(found.sorts)}")


def _counted(found: _Found, node: Node, nodes: dict[str, Node]) -> tuple[str, int] | None:
    """``histc(ids or sorted ids, experts, 0, experts - 1)``: the sort, and the number of experts."""
    bins, low, high = node.args[1:4] if len(node.args) == 4 else (None, None, None)
    if not isinstance(bins, int) or low != 0 or high != bins - 1:
        return None
    name = node.refs()[0]
    source = nodes.get(name)
    if source is not None and source.op == "aten._to_copy.default":
        name = source.refs()[0]
    if name in found.values:
        return found.values[name], bins
    same = [s.node.name for s in found.sorts.values() if s.ids == name]
    return (same[0], bins) if same else None


def _find_index(
    found: _Found, node: Node, nodes: dict[str, Node], metas: dict[str, Meta]
) -> None:
    if node.op in _DIVISIONS:
        base = found.indices.get(node.refs()[0]) if len(node.refs()) == 1 else None
        k = node.args[1]
        rounds_down = node.op == _DIVISIONS[0] or dict(node.kwargs).get("rounding_mode") == "floor"
        if base is not None and base.k == 1 and not base.is_inverse and rounds_down:
            meta = node.meta
            if isinstance(k, int) and k > 0 and isinstance(meta, TensorMeta):
                if meta.shape[0] % k == 0:
                    found.indices[node.name] = _Index(base.sort, k)
                    sort = found.sorts[base.sort]
                    sort.k = max(sort.k, k)
    elif node.op == "aten.index_put.default" and len(node.refs()) == 3:
        _, index, values = node.refs()
        base = found.indices.get(index)
        if (
            base is not None
            and base == _Index(base.sort, 1)
            and _only_index(node) is not None
            and _is_count(nodes.get(values), metas[index])
            and node.meta == metas[index]
        ):
            found.indices[node.name] = _Index(base.sort, 1, is_inverse=True)
    elif node.op == "getitem" and node.args[1] == 1:
        base_node = nodes.get(node.refs()[0])
        if base_node is not None and base_node.op in _SORTS and base_node.args[-1] is not True:
            base = found.indices.get(base_node.refs()[0])
            if base is not None and base == _Index(base.sort, 1):
                found.indices[node.name] = _Index(base.sort, 1, is_inverse=True)


def _is_count(node: Node | None, meta: Meta) -> bool:
    """Whether ``node`` is 0, 1, 2, ... of the length of ``meta``."""
    return (
        node is not None
        and isinstance(meta, TensorMeta)
        and node.op == "aten.arange.start_step"
        and node.args[:3] == (0, meta.shape[0], 1)
    )


def _only_index(node: Node) -> str | None:
    """The one index tensor of ``index(x, [i])`` or ``index_put(x, [i], ...)``, along dim 0."""
    indices = node.args[1]
    if isinstance(indices, tuple) and len(indices) == 1 and isinstance(indices[0], Ref):
        return indices[0].name
    return None


class _Writer:
    """Writes the new program; names are made stable afterwards by the caller."""

    def __init__(self, graph: Graph, found: _Found) -> None:
        self.graph, self.found = graph, found
        self.old = graph.node_map()
        self.metas = graph.metas()
        self.nodes: list[Node] = []
        self.values: dict[str, Ref] = {}
        self.results: dict[str, tuple[Ref, Ref, Ref]] = {}
        self.twins: dict[str, str] = {}
        self.pairs: dict[str, tuple[Ref, Ref]] = {}
        self.count = 0

    def run(self) -> Graph:
        for node in self.graph.nodes:
            written = self._write(node)
            if written is not None:
                self.values[node.name] = written
                self.twins[node.name] = written.name
                continue
            args, kwargs = node.map_refs(lambda name: self._new(name))
            self.nodes.append(replace(node, args=args, kwargs=kwargs, twin=self._twin(node)))
        outputs = tuple(
            replace(o, value=None if o.value is None else self._new(o.value.name))
            for o in self.graph.outputs
        )
        return Graph(self.graph.inputs, tuple(self.nodes), outputs)

    def _new(self, name: str) -> Ref:
        return self.values.get(name, Ref(name))

    def _twin(self, node: Node) -> str | None:
        return None if node.twin is None else self.twins.get(node.twin, node.twin)

    def _emit(self, like: Node, op: str, args: tuple[Arg, ...], meta: Meta) -> Ref:
        name = f"routed_{self.count}"
        self.count += 1
        self.nodes.append(
            replace(like, name=name, op=op, args=args, kwargs=(), meta=meta, twin=self._twin(like))
        )
        return Ref(name)

    def _write(self, node: Node) -> Ref | None:
        """What stands for ``node``; None if it stays as it is."""
        if node.name in self.found.sorts:
            self._route(self.found.sorts[node.name])
            return None  # nothing reads the sort itself any more
        if node.name in self.found.values:
            sort = self.found.sorts[self.found.values[node.name]]
            order, _, splits = self.results[sort.node.name]
            return self._emit(
                node, "autopar.moe_dispatch", (self._new(sort.ids), order, splits, 1), node.meta
            )
        index = self.found.indices.get(node.name)
        if index is not None and node.op == "getitem" and not index.is_inverse:
            return self.results[index.sort][0]
        if node.op == "aten.index.Tensor":
            return self._gather(node)
        if node.op in ("aten.index_put.default", "aten.index_add.default"):
            return self._scatter(node)
        if node.op == "getitem" and node.refs()[0] in self.pairs:
            return self.pairs[node.refs()[0]][int(node.args[1] == 1)]
        return self._product(node)

    def _route(self, sort: _Sort) -> None:
        meta = self.metas[sort.ids]
        assert isinstance(meta, TensorMeta)
        metas = (
            TensorMeta(meta.shape, "int64"),
            TensorMeta((sort.experts,), "int64"),
            TensorMeta((2, sort.experts), "int64"),
        )
        args = (self._new(sort.ids), sort.experts, sort.k)
        whole = self._emit(sort.node, "autopar.moe_route", args, metas)
        self.twins[sort.node.name] = whole.name
        order, counts, splits = (
            self._emit(sort.node, "getitem", (whole, i), m) for i, m in enumerate(metas)
        )
        self.results[sort.node.name] = order, counts, splits

    def _moved(self, node: Node, value: Arg, index: _Index, *, to_rows: bool) -> Ref:
        order, _, splits = self.results[index.sort]
        op = "autopar.moe_dispatch" if to_rows else "autopar.moe_combine"
        return self._emit(node, op, (value, order, splits, index.k), node.meta)

    def _gather(self, node: Node) -> Ref | None:
        name, value = _only_index(node), node.args[0]
        meta = self.metas[value.name] if isinstance(value, Ref) else None
        if name is None or not isinstance(value, Ref) or not isinstance(meta, TensorMeta):
            return None
        sort = self.found.sorts.get(self.found.values.get(name, ""))
        if sort is not None and meta.shape[0] == sort.experts:
            order, counts, _ = self.results[sort.node.name]
            args = (self._new(value.name), counts, order)
            return self._emit(node, "autopar.moe_spread", args, node.meta)
        index = self.found.indices.get(name)
        if index is None or meta.shape[0] * index.k != self._slots(index):
            return None
        return self._moved(node, self._new(value.name), index, to_rows=not index.is_inverse)

    def _scatter(self, node: Node) -> Ref | None:
        """Additions to zeros at positions that a sort gives."""
        if node.op == "aten.index_put.default":
            name, value, adds = _only_index(node), node.args[2], node.args[3:4] == (True,)
        else:
            at = node.args[2]
            name = at.name if isinstance(at, Ref) and node.args[1] == 0 else None
            value, adds = node.args[3], not node.kwargs
        base, meta = node.args[0], node.meta
        if name is None or not isinstance(value, Ref) or not isinstance(base, Ref):
            return None
        zeros, source = self.old.get(base.name), self.metas[value.name]
        if zeros is None or zeros.op != "aten.full.default" or zeros.args[1] != 0:
            return None
        if not isinstance(meta, TensorMeta) or not isinstance(source, TensorMeta):
            return None
        if source.dtype != meta.dtype or source.shape[1:] != meta.shape[1:]:
            return None
        sort = self.found.sorts.get(self.found.values.get(name, ""))
        if sort is not None and adds and meta.shape[0] == sort.experts:
            args = (self._new(value.name), self.results[sort.node.name][1])
            return self._emit(node, "autopar.moe_run_sums", args, meta)
        index = self.found.indices.get(name)
        if index is None or not source.shape[0] == self._slots(index) == meta.shape[0] * index.k:
            return None
        if not adds and index.k > 1:
            return None  # without repeats, to set is to add to zeros
        return self._moved(node, self._new(value.name), index, to_rows=index.is_inverse)

    def _slots(self, index: _Index) -> int:
        meta = self.metas[self.found.sorts[index.sort].ids]
        assert isinstance(meta, TensorMeta)
        return meta.shape[0]

    def _product(self, node: Node) -> Ref | None:
        """A grouped product whose runs end where a sort says."""
        kind = node.op.removesuffix(".default")
        if kind not in (_FALLBACK, f"{_FALLBACK}_backward", "aten._grouped_mm"):
            return None
        refs = node.refs()
        sort = self.found.ends.get(refs[2]) if len(refs) in (3, 4) else None
        if sort is None:
            return None
        counts = self.results[sort][1]
        left, right = self._new(refs[0]), self._new(refs[1])
        shapes = [m.shape for m in map(self.metas.get, refs[:2]) if isinstance(m, TensorMeta)]
        experts = self.found.sorts[sort].experts
        if kind == f"{_FALLBACK}_backward":
            self.pairs[node.name] = self._gradients(node, counts)
            return self.pairs[node.name][0]
        if len(shapes[1]) == 3 and len(shapes[0]) == 2 and shapes[1][0] == experts:
            return self._emit(
                node, "autopar.grouped_mm", (left, right, counts, _ALL_ROWS), node.meta
            )
        turned = self.old.get(refs[0])
        if len(shapes[0]) == len(shapes[1]) == 2 and turned is not None:
            if turned.op == "aten.permute.default":
                rows = self._new(turned.refs()[0])
                args = (rows, right, counts, _ALL_ROWS)
                return self._emit(node, "autopar.grouped_mm_weight", args, node.meta)
        return None

    def _gradients(self, node: Node, counts: Ref) -> tuple[Ref, Ref]:
        """``grouped_mm_fallback_backward(rows, weight, ends, dy)`` as two products."""
        rows, weight, _, dy = (self._new(r) for r in node.refs())
        drows, dweight = node.metas()
        meta = self.metas[node.refs()[1]]
        assert isinstance(meta, TensorMeta)
        experts, k, n = meta.shape
        turned = self._emit(
            node, "aten.permute.default", (weight, (0, 2, 1)), replace(meta, shape=(experts, n, k))
        )
        return (
            self._emit(node, "autopar.grouped_mm", (dy, turned, counts, _ALL_ROWS), drows),
            self._emit(node, "autopar.grouped_mm_weight", (rows, dy, counts, _ALL_ROWS), dweight),
        )
