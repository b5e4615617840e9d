"""Puts the batch outermost where a view merges it behind another dim.

``nn.MultiheadAttention`` works on ``(S, B, E)`` and flattens it to rows ``(S*B, E)`` for each
matmul. A block of samples is no block of those rows, so neither micro-batches nor data ranks could
take one. The order of rows means nothing to operators that treat each row alike or sum over them:
the rows are put into the order ``(B*S, E)`` by a permutation before the view that makes them and
one after the view that takes them apart. With ``batch_first=True`` both cancel against the
transpositions that torch makes.

It is done only if the graph can't be cut into micro-batches as it is, and can be afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.capture.rewrites.builder import Builder, Rule, Value, rebuilt
from autopar.ir.graph import Graph, InputKind, Node, TensorMeta
from autopar.sharding.build import signatures_of
from autopar.sharding.dim_classes import Place, PlaceClasses, dim_classes, result_name, source_of
from autopar.sharding.propagate import DataAxes
from autopar.sharding.signature import Dims, OpSignature

_VIEW = "aten.view.default"
_MAX_RANK = 64  # torch's own limit


def with_batch_outermost(graph: Graph) -> Graph:
    """``graph`` with rows in batch order, or ``graph`` itself if nothing is gained."""
    signatures = signatures_of(graph)
    if DataAxes(graph, signatures).can_be_cut():
        return graph
    rows = _Rows(graph, signatures)
    for root in rows.inner_roots():
        moves = rows.moves(root)
        if not moves:
            continue
        new = rebuilt(graph, _rules(moves).get)
        if DataAxes(new, signatures_of(new)).can_be_cut():
            return new
    return graph


@dataclass(frozen=True, slots=True)
class _Move:
    """How one view changes: factors ``start:middle`` and ``middle:stop`` change places.

    Attributes:
        sizes: Sizes of the factors of the unmerged side, outermost first.
        start: First factor ahead of the batch.
        middle: The batch.
        stop: First factor beyond the merged dim.
        is_merge: Whether the view merges them; else it takes them apart.
    """

    sizes: tuple[int, ...]
    start: int
    middle: int
    stop: int
    is_merge: bool

    @property
    def order(self) -> tuple[int, ...]:
        """Factors with the batch in front."""
        return (
            *range(self.start),
            *range(self.middle, self.stop),
            *range(self.start, self.middle),
            *range(self.stop, len(self.sizes)),
        )


def _sides(node: Node, signature: OpSignature) -> list[tuple[str, Dims, str, Dims]]:
    """Both sides of a view as (name, dims, name of the other side, its dims): result first."""
    operand = node.refs()[0]
    before, after = signature.inputs[0] or (), signature.outputs[0] or ()
    return [(node.name, after, operand, before), (operand, before, node.name, after)]


def _move(
    names: tuple[str, ...], inner: int, other: Dims, signature: OpSignature, *, is_merge: bool
) -> _Move:
    """The change of a view that merges ``names`` or takes them apart.

    Args:
        names: Factors of the merged dim.
        inner: Position of the batch among them.
        other: Dims of the other side, which has the same factors in the same order.
        signature: Of the view.
        is_merge: Whether the result is the merged side.
    """
    factors = [f for dim in other for f in dim]
    start = factors.index(names[0])
    sizes = tuple(signature.sizes[f] for f in factors)
    return _Move(sizes, start, start + inner, start + len(names), is_merge)


class _Rows:
    """Which views must change so that rows with a batch inside are in batch order."""

    def __init__(self, graph: Graph, signatures: Mapping[str, OpSignature | None]) -> None:
        self.graph, self.signatures = graph, signatures
        self.fixed = {i.name for i in graph.inputs}
        self.fixed |= {o.value.name for o in graph.outputs if o.value is not None}
        self.views = [
            (node, signature)
            for node in graph.nodes
            if node.op == _VIEW and (signature := signatures.get(node.name)) is not None
        ]
        self.alone = self._alone_classes()
        self.classes = dim_classes(graph, signatures)
        self._inner_places = self._tie_inner()

    def _tie_inner(self) -> list[Place]:
        """Tie dims that are merged into the same rows behind the same number of elements."""
        first: dict[tuple[Place, int], Place] = {}
        found: list[Place] = []
        for node, signature in self.views:
            for merged, dims, name, other in _sides(node, signature):
                starts = {f[0]: d for d, f in enumerate(other) if f}
                for dim, names in enumerate(dims):
                    for inner in range(1, len(names)):
                        if names[inner] not in starts:
                            continue
                        place = (name, starts[names[inner]])
                        ahead = prod(signature.sizes[f] for f in names[:inner])
                        key = (self.alone.find((merged, dim)), ahead)
                        self.classes.unite(first.setdefault(key, place), place)
                        found.append(place)
        return found

    def inner_roots(self) -> list[Place]:
        """Classes of an argument's dim that some view merges behind another dim."""
        given = {
            self.classes.find((i.name, d))
            for i in self.graph.of_kind(InputKind.USER)
            for d in range(len(i.meta.shape) if i.meta else 0)
        }
        roots = dict.fromkeys(self.classes.find(place) for place in self._inner_places)
        return [root for root in roots if root in given]

    def moves(self, root: Place) -> dict[str, _Move]:
        """By view; rows whose order something depends on are left out.

        Args:
            root: Class of the dim that is to come first.
        """
        found: dict[str, _Move] = {}
        broken: set[Place] = set()
        rows: dict[str, Place] = {}
        prefix: dict[Place, int] = {}
        for node, signature in self.views:
            for merged, dims, name, other in _sides(node, signature):
                for dim, names in enumerate(dims):
                    inner = self._inner(name, names, other, root)
                    if inner == 0 or not set(names) <= {f for d in other for f in d}:
                        continue
                    row = self.alone.find((merged, dim))
                    move = _move(names, inner, other, signature, is_merge=merged == node.name)
                    size = prod(signature.sizes[f] for f in names[:inner])
                    if node.name in rows:  # one change for each view
                        broken |= {row, rows[node.name]}
                    if prefix.setdefault(row, size) != size:
                        broken.add(row)
                    rows[node.name] = row
                    found[node.name] = move
        broken |= self._broken(set(prefix), rows)
        return {name: move for name, move in found.items() if rows[name] not in broken}

    def _inner(self, name: str, names: tuple[str, ...], other: Dims, root: Place) -> int:
        """Position of the batch among the factors of a merged dim; 0 if it is not behind others."""
        starts = {d[0]: i for i, d in enumerate(other) if d}
        for position, factor in enumerate(names):
            dim = starts.get(factor)
            if dim is not None and self.classes.find((name, dim)) == root:
                return position
        return 0

    def _alone_classes(self) -> PlaceClasses:
        """Dims tied together by factors that are the only one of their dim."""
        found = PlaceClasses()
        for node in self.graph.nodes:
            if node.op == "getitem":
                if isinstance(node.meta, TensorMeta):
                    for dim in range(len(node.meta.shape)):
                        found.unite((node.name, dim), (source_of(node), dim))
                continue
            signature = self.signatures.get(node.name)
            first: dict[str, Place] = {}
            for place, names in _places(node, signature):
                if len(names) == 1:
                    found.unite(first.setdefault(names[0], place), place)
        return found

    def _broken(self, rows: set[Place], changed: Mapping[str, Place]) -> set[Place]:
        """Rows whose order an operator, an input or an output depends on.

        Args:
            rows: All rows that are to be put in another order.
            changed: View that changes for it -> its rows.
        """
        broken = {
            row
            for name in self.fixed
            for dim in range(_MAX_RANK)
            if (row := self.alone.find((name, dim))) in rows
        }
        for node in self.graph.nodes:
            if node.op == "getitem":
                continue
            own = changed.get(node.name)
            signature = self.signatures.get(node.name)
            tied: dict[str, list[tuple[Place, tuple[str, ...]]]] = {}
            for place, names in _places(node, signature):
                row = self.alone.find(place)
                if row == own:
                    continue
                if row in rows and (len(names) != 1 or _is_ordered(signature, names[0])):
                    broken.add(row)
                for factor in names:
                    tied.setdefault(factor, []).append((place, names))
            for group in tied.values():  # a factor that is a row here and part of a dim there
                if own is None and any(len(names) > 1 for _, names in group):
                    broken |= {self.alone.find(place) for place, _ in group} & rows
        return broken


def _places(node: Node, signature: OpSignature | None) -> list[tuple[Place, tuple[str, ...]]]:
    """Every dim of every operand and result, with its factors; none if there is no rule."""
    operands = list(zip(node.refs(), signature.inputs if signature else (), strict=False))
    results = [
        (result_name(node, index), dims)
        for index, dims in enumerate(signature.outputs if signature else ())
    ]
    if signature is None:
        return [
            ((name, dim), ("", ""))
            for name in (*node.refs(), *(result_name(node, i) for i in range(len(node.metas()))))
            for dim in range(_MAX_RANK)
        ]
    return [
        ((name, dim), names)
        for name, dims in (*operands, *results)
        for dim, names in enumerate(dims or ())
    ]


def _is_ordered(signature: OpSignature | None, factor: str) -> bool:
    """Whether the order of a factor's elements means something to the operator."""
    return signature is None or factor in signature.whole


def _rules(moves: Mapping[str, _Move]) -> Mapping[str, Rule]:
    def view(b: Builder, node: Node) -> Value:
        assert isinstance(node.meta, TensorMeta)
        move, shape = moves.get(node.name), node.meta.shape
        if move is None:
            return b.view(node.args[0], shape)
        order = move.order
        if move.is_merge:
            return b.view(b.permute(b.view(node.args[0], move.sizes), order), shape)
        apart = b.view(node.args[0], [move.sizes[i] for i in order])
        back = b.permute(apart, [order.index(i) for i in range(len(order))])
        return b.view(back, shape)

    def permute(b: Builder, node: Node) -> Value:
        order = node.args[1]
        assert isinstance(order, Sequence)
        return b.permute(node.args[0], [d for d in order if isinstance(d, int)])

    return {_VIEW: view, "aten.permute.default": permute}
