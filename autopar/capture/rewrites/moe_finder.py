"""Where sorts by expert are in a captured program, and what follows from each.

Reads only; :mod:`autopar.capture.rewrites.moe` writes. Index tensors are followed through views,
casts between integers and expansions; counts of ids are known in the forms that people write:
``histc``, a sum of one-hot rows, additions of ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.graph import Arg, Graph, Node, Ref, TensorMeta

SORTS = ("aten.sort.default", "aten.sort.stable")
_DIVISIONS = ("aten.floor_divide.default", "aten.div.Tensor_mode")
_CAST, _VIEW, _FULL = "aten._to_copy.default", "aten.view.default", "aten.full.default"


@dataclass(slots=True)
class Sort:
    """A sort by expert.

    Attributes:
        node: The sort.
        ids: What is sorted, (slots,).
        root: What ``ids`` is a view of.
        slots: How many slots there are.
        experts: How many experts there are.
        k: Slots per token.
    """

    node: Node
    ids: str
    root: str
    slots: int
    experts: int = 0
    k: int = 1


@dataclass(frozen=True, slots=True)
class Index:
    """A tensor of positions that follows from a sort: ``order // k``, or the inverse of ``order``.

    Attributes:
        sort: Name of the sort.
        k: Slots per position.
        is_inverse: The row of each slot, instead of the slot (or token) of each row.
    """

    sort: str
    k: int
    is_inverse: bool = False

    @property
    def is_order(self) -> bool:
        """Whether it is the order itself."""
        return self.k == 1 and not self.is_inverse


@dataclass(slots=True)
class Found:
    """Values of a program that follow from sorts by expert.

    Attributes:
        sorts: By name of the sort operator.
        values: Sorted ids -> sort.
        indices: Index tensors (slots,).
        wide: Index tensors that are repeated along further dims.
        ends: Ends of the runs -> sort.
    """

    sorts: dict[str, Sort] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    indices: dict[str, Index] = field(default_factory=dict)
    wide: dict[str, Index] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)


class Finder:
    """Looks through one program."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = graph.node_map()
        self.metas = graph.metas()
        self.found = Found()
        self._columns: dict[str, Index] = {}  # positions as (slots, 1)

    def run(self) -> Found:
        """Sorts whose runs some operator reads, and what follows from them."""
        for node in self.graph.nodes:
            self._index(node)
        counts: dict[str, tuple[str, int]] = {}
        for node in self.graph.nodes:
            self._ends(node, counts)
        found = self.found
        kept = {name: s for name, s in found.sorts.items() if name in set(found.ends.values())}
        return Found(
            kept,
            {v: s for v, s in found.values.items() if s in kept},
            {v: i for v, i in found.indices.items() if i.sort in kept},
            {v: i for v, i in found.wide.items() if i.sort in kept},
            found.ends,
        )

    def _shape(self, name: str) -> tuple[int, ...]:
        meta = self.metas.get(name)
        return meta.shape if isinstance(meta, TensorMeta) else ()

    def _root(self, name: str) -> str:
        """What a value is a view or a cast of."""
        node = self.nodes.get(name)
        while node is not None and node.op in (_VIEW, _CAST):
            name = node.refs()[0]
            node = self.nodes.get(name)
        return name

    # -- index tensors -------------------------------------------------------------------------
    def _index(self, node: Node) -> None:
        found = self.found
        if node.op in SORTS:
            self._sort(node)
        elif node.op == "getitem" and node.refs()[0] in found.sorts:
            if node.args[1] == 0:
                found.values[node.name] = node.refs()[0]
            else:
                found.indices[node.name] = Index(node.refs()[0], 1)
        elif node.op == "getitem" and node.args[1] == 1:
            base = self._order_that_is_sorted(self.nodes[node.refs()[0]])
            if base is not None:
                found.indices[node.name] = Index(base.sort, 1, is_inverse=True)
        elif node.op in _DIVISIONS:
            self._division(node)
        elif node.op in ("aten.index_put.default", "aten.scatter.src"):
            self._inverse(node)
        elif node.op == _VIEW:
            self._view(node)
        elif node.op == "aten.expand.default" and node.refs()[0] in self._columns:
            found.wide[node.name] = self._columns[node.refs()[0]]

    def _sort(self, node: Node) -> None:
        ids = node.refs()[0]
        meta, options = self.metas[ids], dict(node.kwargs)
        if not isinstance(meta, TensorMeta) or len(meta.shape) != 1 or meta.is_float:
            return
        if meta.dtype == "bool" or options.get("descending") is True or node.args[-1] is True:
            return
        if self._order_that_is_sorted(node) is None:
            self.found.sorts[node.name] = Sort(node, ids, self._root(ids), meta.shape[0])

    def _order_that_is_sorted(self, node: Node) -> Index | None:
        """The order of a sort that this other sort sorts: its second result is the inverse."""
        if node.op not in SORTS or node.args[-1] is True:
            return None
        base = self.found.indices.get(node.refs()[0])
        return base if base is not None and base.is_order else None

    def _division(self, node: Node) -> None:
        base = self.found.indices.get(node.refs()[0]) if len(node.refs()) == 1 else None
        k, mode = node.args[1], dict(node.kwargs).get("rounding_mode")
        if base is None or not base.is_order or not isinstance(k, int) or k < 1:
            return
        sort = self.found.sorts[base.sort]
        if (node.op == _DIVISIONS[0] or mode == "floor") and sort.slots % k == 0:
            self.found.indices[node.name] = Index(base.sort, k)
            sort.k = max(sort.k, k)

    def _inverse(self, node: Node) -> None:
        """``index_put(x, [order], arange)`` or ``scatter(x, 0, order, arange)``."""
        if node.op == "aten.scatter.src":
            at = node.args[2] if node.args[1] in (0, -1) else None
            source = node.args[3]
        else:
            at, source = only_index(node), node.args[2]
        base = self.found.indices.get(at.name) if isinstance(at, Ref) else None
        made = self.nodes.get(source.name) if isinstance(source, Ref) else None
        if base is None or not base.is_order or made is None:
            return
        slots = self.found.sorts[base.sort].slots
        counts_up = made.op == "aten.arange.start_step" and made.args[:3] == (0, slots, 1)
        adds = node.op == "aten.index_put.default" and node.args[3:4] == (True,)
        if counts_up and not adds and self._shape(node.name) == (slots,):
            self.found.indices[node.name] = Index(base.sort, 1, is_inverse=True)

    def _view(self, node: Node) -> None:
        base = self.found.indices.get(node.refs()[0])
        before, shape = self._shape(node.refs()[0]), self._shape(node.name)
        if base is not None and len(shape) > 1 and shape == (*before, *(1 for _ in shape[1:])):
            self._columns[node.name] = base

    # -- counts --------------------------------------------------------------------------------
    def _ends(self, node: Node, counts: dict[str, tuple[str, int]]) -> None:
        """Ends of runs are sums of the counts so far."""
        counted = self._counted(node)
        if counted is not None:
            counts[node.name] = counted
        elif node.op == _CAST and node.refs()[0] in counts:
            counts[node.name] = counts[node.refs()[0]]
        elif node.op == _CAST and node.refs()[0] in self.found.ends:
            self.found.ends[node.name] = self.found.ends[node.refs()[0]]
        elif node.op == "aten.cumsum.default" and node.refs()[0] in counts:
            sort, experts = counts[node.refs()[0]]
            known = self.found.sorts[sort]
            if known.experts in (0, experts) and node.args[1] in (0, -1):
                known.experts = experts
                self.found.ends[node.name] = sort

    def _counted(self, node: Node) -> tuple[str, int] | None:
        """The sort whose ids are counted, and the number of experts."""
        shape = self._shape(node.name)
        if len(shape) != 1:
            return None
        experts, source = shape[0], None
        match node.op:
            case "aten.histc.default" if node.args[1:4] == (experts, 0, experts - 1):
                source = node.refs()[0]
            case "aten.sum.dim_IntList":
                source = self._one_hot(node, experts)
            case "aten.scatter_add.default" if self._is_full(node.args[0], 0):
                source = node.refs()[1] if self._is_full(node.args[3], 1) else None
            case "aten.index_put.default" if self._is_full(node.args[0], 0):
                at = only_index(node)
                adds = node.args[3:4] == (True,) and self._is_full(node.args[2], 1)
                source = at.name if at is not None and adds else None
        if source is None:
            return None
        if source in self.found.values:
            return self.found.values[source], experts
        root = self._root(source)
        if root in self.found.values:
            return self.found.values[root], experts
        same = [s.node.name for s in self.found.sorts.values() if s.root == root]
        return (same[0], experts) if same else None

    def _one_hot(self, node: Node, experts: int) -> str | None:
        """``sum(one_hot(ids, experts))`` over all dims but the last."""
        hot = self.nodes.get(node.refs()[0])
        while hot is not None and hot.op in (_CAST, _VIEW):
            hot = self.nodes.get(hot.refs()[0])
        if hot is None or hot.op != "aten.eq.Tensor" or len(hot.refs()) != 2:
            return None
        ids, classes = hot.refs()
        made, shape = self.nodes.get(classes), self._shape(hot.name)
        rank = len(self._shape(node.refs()[0]))
        if made is None or made.op != "aten.arange.start_step" or made.args[:3] != (0, experts, 1):
            return None
        if node.args[1] != tuple(range(rank - 1)) or self._shape(ids) != (*shape[:-1], 1):
            return None
        return ids if shape[-1] == experts else None

    def _is_full(self, value: Arg, number: int) -> bool:
        node = self.nodes.get(value.name) if isinstance(value, Ref) else None
        return node is not None and node.op == _FULL and node.args[1] == number


def only_index(node: Node) -> Ref | None:
    """The one index tensor of ``index(x, [i])`` or ``index_put(x, [i], ...)``, along dim 0."""
    indices = node.args[1]
    if isinstance(indices, tuple) and len(indices) == 1 and isinstance(indices[0], Ref):
        return indices[0]
    return None
