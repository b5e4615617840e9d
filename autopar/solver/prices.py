"""Seconds of local operators and reshards, found by emitting them on a scratch list.

What is priced is what the programs will run: the same emitter writes both. Answers are kept by
(operator, static arguments, shapes, strategy), so that a repeated layer costs nothing.

What moves once per step shares a bucket with others (:mod:`autopar.sharding.buckets`); which ones
is not known before all is decided. It is charged its share of a full bucket: all that a bucket
costs, by bytes. Of a program whose buckets are not full that is too little, by less than the start
of one collective and of two copies for each of its kinds of buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ShardingError
from autopar.ir.graph import Arg, Graph, Meta, Node, Ref, TensorMeta
from autopar.sharding.buckets import full_bucket
from autopar.sharding.emitter import Emitter
from autopar.sharding.placement import Layout, Replicate, Shard, local_shape
from autopar.sharding.signature import AxisStrategy, OpSignature
from autopar.solver.blocks import without_instance
from cost_models.base import CostModel
from cost_models.evaluate import collective_axis, collective_s

Strategies = tuple[AxisStrategy | None, ...]


@dataclass(slots=True)
class PriceList:
    """Prices on one mesh.

    Attributes:
        model: Where the seconds come from.
        axes: Axes that split, outermost first.
        sizes: Their sizes.
        groups: Ranks along each axis in space, the slowest such group.
    """

    model: CostModel
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: Mapping[str, Sequence[int]]
    _words: dict[object, int] = field(default_factory=dict)
    _operators: dict[object, float | None] = field(default_factory=dict)
    _moves: dict[TensorMeta, dict[tuple[Layout, Layout, bool], float | None]] = field(
        default_factory=dict
    )
    _nodes: dict[object, float] = field(default_factory=dict)
    _buckets: dict[object, tuple[Graph, float] | None] = field(default_factory=dict)

    def local(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        """A rank's block, padding included."""
        return TensorMeta(local_shape(meta.shape, layout, self.sizes), meta.dtype)

    def word(self, node: Node, operands: Sequence[TensorMeta], used: frozenset[int]) -> int:
        """A number, equal for operators that cost the same under equal strategies.

        Args:
            node: The global operator.
            operands: Global metas of its operands.
            used: Results that somebody reads.
        """
        count = iter(range(len(operands)))
        args, kwargs = node.map_refs(lambda _: Ref(str(next(count))))
        args = without_instance(node.op, args)
        key = (node.op, args, kwargs, node.meta, tuple(operands), used)
        return self._words.setdefault(key, len(self._words))

    def operator_s(
        self,
        node: Node,
        signature: OpSignature | None,
        strategies: Strategies,
        operands: Sequence[TensorMeta],
        used: frozenset[int],
        word: int | None = None,
    ) -> float | None:
        """Seconds of an operator whose operands are in the layouts that it wants.

        Args:
            node: The global operator.
            signature: Its named dims.
            strategies: One per axis.
            operands: Global metas of its operands.
            used: Results that somebody reads.
            word: From :meth:`word`, if that was asked.

        Returns:
            None if there is no such local form.
        """
        key = (self.word(node, operands, used) if word is None else word, strategies)
        if key not in self._operators:
            self._operators[key] = self._operator(node, signature, strategies, operands, used)
        return self._operators[key]

    def _operator(
        self,
        node: Node,
        signature: OpSignature | None,
        strategies: Strategies,
        operands: Sequence[TensorMeta],
        used: frozenset[int],
    ) -> float | None:
        emitter = Emitter(self.axes, self.sizes)
        refs = []
        for index, meta in enumerate(operands):
            layout = operand_layout(strategies, index)
            refs.append(emitter.bind(f"operand{index}", self.local(meta, layout)))
        try:
            results = emitter.operator(node, signature, strategies, refs, operands)
        except ShardingError:
            return None
        wanted = {r.name for i, r in enumerate(results) if r is not None and i in used}
        return self.nodes_s(_alive(emitter.nodes, wanted), emitter.metas)

    def move_s(
        self, meta: TensorMeta, have: Layout, want: Layout, *, in_bucket: bool = False
    ) -> float | None:
        """Seconds of a reshard; None if there is no way.

        Args:
            meta: True shape and dtype of the value.
            have: Its layout.
            want: The layout wanted.
            in_bucket: Whether its program runs once per step.
        """
        if have == want:
            return 0.0
        known = self._moves.setdefault(meta, {})
        key = (have, want, in_bucket)
        if key not in known:
            known[key] = self._move(meta, have, want, in_bucket)
        return known[key]

    def _move(self, meta: TensorMeta, have: Layout, want: Layout, in_bucket: bool) -> float | None:
        if not is_reachable(have, want):
            return None
        emitter = Emitter(self.axes, self.sizes)
        ref = emitter.bind("value", self.local(meta, have))
        try:
            emitter.reshard(ref, meta.shape, have, want)
        except ShardingError:
            return None
        if in_bucket:
            return sum(self._shared_s(node, emitter.metas) for node in emitter.nodes)
        return self.nodes_s(emitter.nodes, emitter.metas)

    def _shared_s(self, node: Node, metas: Mapping[str, Meta]) -> float:
        """Seconds of an operator, of a collective its share of a full bucket."""
        operand = metas[node.refs()[0]]
        full = self._bucket(node, operand) if isinstance(operand, TensorMeta) else None
        if full is None:
            return self._node_s(node, metas)
        bucket, part = full
        return part * self.nodes_s(bucket.nodes, bucket.metas())

    def nodes_s(self, nodes: Sequence[Node], metas: Mapping[str, Meta]) -> float:
        """Seconds of local operators one after another."""
        return sum(self._node_s(node, metas) for node in nodes)

    def _bucket(self, node: Node, operand: TensorMeta) -> tuple[Graph, float] | None:
        """A program of a bucket full of such collectives, and the part that one has in it.

        None if it goes alone.
        """
        key = (node.op, node.args[1:], operand)
        if key not in self._buckets:
            sizes = dict(zip(self.axes, self.sizes, strict=True))
            self._buckets[key] = full_bucket(node, operand, sizes)
        return self._buckets[key]

    def _node_s(self, node: Node, metas: Mapping[str, Meta]) -> float:
        operands = tuple(metas[name] for name in node.refs() if not name.startswith("coord_"))
        if node.op.startswith("comm."):
            axis = collective_axis(node)
            static = tuple(a for a in node.args if not isinstance(a, Ref))
            key: object = (node.op, static, operands[0], node.meta)
            if key not in self._nodes:
                ranks = self.groups.get(axis, (0,))
                self._nodes[key] = collective_s(node, operands[0], self.model, ranks)
            return self._nodes[key]
        every = [None if n.startswith("coord_") else metas[n] for n in node.refs()]
        args: tuple[Arg, ...] = node.args
        return self.model.op_time_s(node.op, args, every, node.meta)


def operand_layout(strategies: Strategies, index: int) -> Layout:
    """Layout in which an operand is wanted."""
    return tuple(_R if s is None else s.inputs[index] for s in strategies)


def result_layout(strategies: Strategies, index: int) -> Layout:
    """Layout of a result."""
    return tuple(_R if s is None else s.outputs[index] for s in strategies)


def is_reachable(have: Layout, want: Layout) -> bool:
    """Whether a reshard is sound: an outer axis must not change under an inner shard of its dim.

    >>> is_reachable((Shard(0), Shard(0)), (Replicate(), Shard(0)))
    False
    """
    for outer, (old, new) in enumerate(zip(have, want, strict=True)):
        if old == new:
            continue
        dims = {p.dim for p in (old, new) if isinstance(p, Shard)}
        for under, target in zip(have[outer + 1 :], want[outer + 1 :], strict=True):
            if isinstance(under, Replicate) and isinstance(old, Replicate):
                continue
            if any(isinstance(p, Shard) and p.dim in dims for p in (under, target)):
                return False
    return True


def _alive(nodes: Sequence[Node], wanted: set[str]) -> list[Node]:
    """What ``wanted`` depends on."""
    alive = []
    for node in reversed(nodes):
        if node.name in wanted:
            alive.append(node)
            wanted.update(node.refs())
    return alive[::-1]


_R = Replicate()
