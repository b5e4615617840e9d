"""Writes sorting by expert in a captured program with the operators of ``capture.moe``.

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
``base.index_put(order // k, rows, accumulate)``      ``moe_combine``, added to ``base``
``base.index_put(row of slot, y, accumulate)``        ``moe_dispatch``, added to ``base``
``table[sorted ids]``, one entry per expert           ``moe_spread``
``base.index_put(sorted ids, rows, accumulate)``      ``moe_run_sums``, added to ``base``
grouped products of autopar, transformers and torch   ``grouped_mm``, ``grouped_mm_weight``
the sorted ids                                        ``moe_dispatch`` of the ids
====================================================  ==================================

and so are ``index_select`` and ``gather`` for indexing, ``index_add`` and ``scatter_add`` for
``index_put``. Readers that fit nothing go on reading ``order``; then the slots are sorted whole on
every rank.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.rewrites.moe_finder import SORTS, Finder, Found, Index, Sort, only_index
from autopar.ir.graph import Arg, Graph, Meta, Node, Ref, TensorMeta

_ALL_ROWS = 1.0


def sort_by_expert(graph: Graph) -> Graph:
    """``graph`` with every sort by expert, and what reads it, written as neutral operators."""
    if not any(node.op in SORTS for node in graph.nodes):
        return graph
    found = Finder(graph).run()
    return _Writer(graph, found).run() if found.sorts else graph


class _Writer:
    """Writes the new program; names are made stable afterwards by the caller."""

    def __init__(self, graph: Graph, found: Found) -> None:
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
        if index is not None and index.is_order:
            return self.results[index.sort][0]
        match node.op, node.args:
            case "aten.index.Tensor", (Ref() as x, _):
                return self._gather(node, x, only_index(node))
            case "aten.index_select.default", (Ref() as x, 0, Ref() as at):
                return self._gather(node, x, at)
            case "aten.gather.default", (Ref() as x, 0, Ref() as at, *_):
                return self._gather(node, x, at, wide=True)
            case "aten.index_put.default", (Ref() as base, _, Ref() as rows, *adds):
                at_one = only_index(node)
                return self._scatter(node, base, at_one, rows, adds=adds[:1] == [True])
            case "aten.index_add.default", (Ref() as base, 0, Ref() as at, Ref() as rows):
                return None if node.kwargs else self._scatter(node, base, at, rows)
            case "aten.scatter_add.default", (Ref() as base, 0, Ref() as at, Ref() as rows):
                return self._scatter(node, base, at, rows, wide=True)
            case "getitem", (Ref() as pair, int(result)) if pair.name in self.pairs:
                return self.pairs[pair.name][result]
        return self._product(node)

    def _route(self, sort: Sort) -> None:
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

    def _meta(self, value: Ref) -> TensorMeta:
        meta = self.metas[value.name]
        assert isinstance(meta, TensorMeta), value
        return meta

    def _position(self, at: Ref | None, shape: tuple[int, ...], *, wide: bool) -> Index | None:
        """The index at which rows of ``shape`` are read or written; None if it is no such index."""
        if at is None:
            return None
        if wide and len(shape) > 1:
            # a row is moved whole
            return self.found.wide.get(at.name) if self._meta(at).shape == shape else None
        return self.found.indices.get(at.name)

    def _moved(self, node: Node, value: Ref, index: Index, *, to_rows: bool) -> Ref:
        order, _, splits = self.results[index.sort]
        op = "autopar.moe_dispatch" if to_rows else "autopar.moe_combine"
        args: tuple[Arg, ...] = (self._new(value.name), order, splits, index.k)
        if not to_rows:
            assert isinstance(node.meta, TensorMeta)
            args = (*args, node.meta.shape)
        return self._emit(node, op, args, node.meta)

    def _gather(self, node: Node, x: Ref, at: Ref | None, *, wide: bool = False) -> Ref | None:
        meta, source = node.meta, self._meta(x)
        assert isinstance(meta, TensorMeta)
        sort = self.found.sorts.get(self.found.values.get(at.name, "") if at is not None else "")
        if sort is not None and source.shape[:1] == (sort.experts,) and not wide:
            order, counts, _ = self.results[sort.node.name]
            args = (self._new(x.name), counts, order)
            return self._emit(node, "autopar.moe_spread", args, meta)
        index = self._position(at, meta.shape, wide=wide)
        if index is None or source.shape[1:] != meta.shape[1:]:
            return None
        if source.shape[0] * index.k != self.found.sorts[index.sort].slots:
            return None
        return self._moved(node, x, index, to_rows=not index.is_inverse)

    def _scatter(
        self,
        node: Node,
        base: Ref,
        at: Ref | None,
        rows: Ref,
        *,
        adds: bool = True,
        wide: bool = False,
    ) -> Ref | None:
        """Additions at positions that a sort gives."""
        meta, source = self._meta(base), self._meta(rows)
        if at is None or source.dtype != meta.dtype or source.shape[1:] != meta.shape[1:]:
            return None
        zeros = self.old.get(base.name)
        is_zero = zeros is not None and zeros.op == "aten.full.default" and zeros.args[1] == 0
        sort = self.found.sorts.get(self.found.values.get(at.name, ""))
        if sort is not None and adds and not wide and meta.shape[0] == sort.experts:
            args = (self._new(rows.name), self.results[sort.node.name][1])
            return self._plus(
                node, base, self._emit(node, "autopar.moe_run_sums", args, meta), is_zero
            )
        index = self._position(at, source.shape, wide=wide)
        if index is None:
            return None
        if not source.shape[0] == self.found.sorts[index.sort].slots == meta.shape[0] * index.k:
            return None
        if not adds and not (is_zero and index.k == 1):
            return None  # only without repeats, to set is to add to zeros
        return self._plus(
            node, base, self._moved(node, rows, index, to_rows=index.is_inverse), is_zero
        )

    def _plus(self, node: Node, base: Ref, added: Ref, is_zero: bool) -> Ref:
        if is_zero:
            return added
        return self._emit(node, "aten.add.Tensor", (self._new(base.name), added), node.meta)

    def _product(self, node: Node) -> Ref | None:
        """A grouped product whose runs end where a sort says."""
        kind, refs = node.op.removesuffix(".default"), node.refs()
        match kind:
            case "transformers.grouped_mm_fallback_backward":
                rows, weight, ends, dy = map(Ref, refs)
                return self._gradients(node, rows, weight, ends, dy)
            case "autopar.grouped_mm_ends_backward":
                dy, rows, weight, ends = map(Ref, refs)
                return self._gradients(node, rows, weight, ends, dy)
            case (
                "transformers.grouped_mm_fallback" | "autopar.grouped_mm_ends" | "aten._grouped_mm"
            ):
                pass
            case _:
                return None
        counts = self._counts(refs[2]) if len(refs) == 3 else None
        if counts is None:
            return None
        left, right = self._meta(Ref(refs[0])), self._meta(Ref(refs[1]))
        args = (self._new(refs[0]), self._new(refs[1]), counts, _ALL_ROWS)
        if (len(left.shape), len(right.shape)) == (2, 3):
            return self._emit(node, "autopar.grouped_mm", args, node.meta)
        turned = self.old.get(refs[0])
        is_turned = turned is not None and turned.op == "aten.permute.default"
        if turned is not None and is_turned and (len(left.shape), len(right.shape)) == (2, 2):
            args = (self._new(turned.refs()[0]), *args[1:])
            return self._emit(node, "autopar.grouped_mm_weight", args, node.meta)
        return None

    def _counts(self, ends: str) -> Ref | None:
        """Run lengths in the place of their ends, if a sort that is written already gives them."""
        sort = self.found.ends.get(ends)
        if sort is None or sort not in self.results:
            return None
        return self.results[sort][1]

    def _gradients(self, node: Node, rows: Ref, weight: Ref, ends: Ref, dy: Ref) -> Ref | None:
        """Both gradients of a grouped product as two products."""
        counts = self._counts(ends.name)
        if counts is None:
            return None
        rows, new_weight, dy = (self._new(r.name) for r in (rows, weight, dy))
        drows, dweight = node.metas()
        meta = self._meta(weight)
        experts, k, n = meta.shape
        turned = self._emit(
            node,
            "aten.permute.default",
            (new_weight, (0, 2, 1)),
            replace(meta, shape=(experts, n, k)),
        )
        self.pairs[node.name] = (
            self._emit(node, "autopar.grouped_mm", (dy, turned, counts, _ALL_ROWS), drows),
            self._emit(node, "autopar.grouped_mm_weight", (rows, dy, counts, _ALL_ROWS), dweight),
        )
        return self.pairs[node.name][0]
