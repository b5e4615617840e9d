"""Seconds of local operators and reshards, found by emitting them on a scratch list.

What is priced is what the programs will run: the same emitter writes both. Answers are kept by
(operator, static arguments, shapes, strategy), so that a repeated layer costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ShardingError
from autopar.ir.graph import Arg, Meta, Node, Ref, TensorMeta
from autopar.sharding.emitter import Emitter
from autopar.sharding.placement import Layout, Replicate, Shard, local_shape
from autopar.sharding.signature import AxisStrategy, OpSignature
from autopar.solver.blocks import without_instance
from cost_models.base import CostModel
from cost_models.evaluate import collective_axis, payload_bytes

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
    _operators: dict[object, float | None] = field(default_factory=dict)
    _moves: dict[TensorMeta, dict[tuple[Layout, Layout], float | None]] = field(
        default_factory=dict
    )
    _nodes: dict[object, float] = field(default_factory=dict)

    def local(self, meta: TensorMeta, layout: Layout) -> TensorMeta:
        """A rank's block, padding included."""
        return TensorMeta(local_shape(meta.shape, layout, self.sizes), meta.dtype)

    def operator_s(
        self,
        node: Node,
        signature: OpSignature | None,
        strategies: Strategies,
        operands: Sequence[TensorMeta],
        used: frozenset[int],
    ) -> float | None:
        """Seconds of an operator whose operands are in the layouts that it wants.

        Args:
            node: The global operator.
            signature: Its named dims.
            strategies: One per axis.
            operands: Global metas of its operands.
            used: Results that somebody reads.

        Returns:
            None if there is no such local form.
        """
        count = iter(range(len(operands)))
        args, kwargs = node.map_refs(lambda _: Ref(str(next(count))))
        args = without_instance(node.op, args)
        key = (node.op, args, kwargs, node.meta, tuple(operands), strategies, used)
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

    def move_s(self, meta: TensorMeta, have: Layout, want: Layout) -> float | None:
        """Seconds of a reshard; None if there is no way."""
        if have == want:
            return 0.0
        known = self._moves.setdefault(meta, {})
        key = (have, want)
        if key not in known:
            known[key] = self._move(meta, have, want)
        return known[key]

    def _move(self, meta: TensorMeta, have: Layout, want: Layout) -> float | None:
        if not is_reachable(have, want):
            return None
        emitter = Emitter(self.axes, self.sizes)
        ref = emitter.bind("value", self.local(meta, have))
        try:
            emitter.reshard(ref, meta.shape, have, want)
        except ShardingError:
            return None
        return self.nodes_s(emitter.nodes, emitter.metas)

    def nodes_s(self, nodes: Sequence[Node], metas: Mapping[str, Meta]) -> float:
        """Seconds of local operators one after another."""
        return sum(self._node_s(node, metas) for node in nodes)

    def _node_s(self, node: Node, metas: Mapping[str, Meta]) -> float:
        operands = tuple(metas[name] for name in node.refs() if not name.startswith("coord_"))
        if node.op.startswith("comm."):
            axis = collective_axis(node)
            payload = payload_bytes(operands[:1], node.meta)
            key: object = (node.op, axis, payload)
            if key not in self._nodes:
                kind = node.op.removeprefix("comm.")
                ranks = self.groups.get(axis, (0,))
                self._nodes[key] = self.model.collective_time_s(kind, payload, ranks)
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
