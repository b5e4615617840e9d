"""Splits over the data axes: micro-batches (``mb``) and data-parallel ranks (``dp``).

They follow from the batch dim of the inputs, operator by operator, with no search:

1. *Dim classes.* Dims that one factor ties together are united over the whole graph, so that the
   batch dim of every input is found from the graph and not assumed to be dim 0. A scale vector
   whose length happens to equal the batch size is in a class of its own.
2. *Batch class.* Of the classes that hold a dim of a call argument, the one whose split leaves the
   least unsplit work and moves the fewest bytes.
3. *Propagation.* In execution order every operator takes the strategy that moves the fewest bytes
   given its operands' placements; ties go to a split of the batch class.

On ``mb`` nothing can be moved between micro-batches. A value that is reduced over micro-batches but
depends on call arguments alone (a count of valid labels) is computed once per step on the whole
batch: it is listed in ``prologue``. Any other reduction over the batch makes micro-batches illegal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, InputKind, Meta, Node, OutputKind, TensorMeta
from autopar.sharding.decisions import Choice
from autopar.sharding.lowerings import LOCAL_LOWERINGS
from autopar.sharding.placement import P, Partial, Placement, R, Replicate, Shard, Varying
from autopar.sharding.rules import MICROBATCH_STATISTICS
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature, axis_strategies, parts_by_factor

Signatures = Mapping[str, OpSignature | None]
_FORBIDDEN = float("inf")


@dataclass(frozen=True, slots=True)
class AxisChoices:
    """Splits over one data axis.

    Attributes:
        choices: Operator -> strategy, input -> placement; what is replicated is left out.
        prologue: Values to compute once per step on the whole batch (only on ``mb``).
        moved_bytes: Bytes moved per step by the reshards that the choices imply.
        unsplit_bytes: Bytes of results that every rank computes whole.
    """

    choices: Mapping[str, Choice]
    prologue: frozenset[str] = frozenset()
    moved_bytes: float = 0.0
    unsplit_bytes: float = 0.0


class _Classes:
    """Union-find over (value, dim)."""

    def __init__(self) -> None:
        self._parent: dict[tuple[str, int], tuple[str, int]] = {}

    def find(self, key: tuple[str, int]) -> tuple[str, int]:
        root = key
        while self._parent.setdefault(root, root) != root:
            root = self._parent[root]
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def unite(self, left: tuple[str, int], right: tuple[str, int]) -> None:
        a, b = self.find(left), self.find(right)
        if a != b:
            self._parent[max(a, b)] = min(a, b)


def result_name(node: Node, index: int) -> str:
    """Key of one result: the operator's name, or ``name#index`` if it has several."""
    return f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name


def source_of(node: Node) -> str:
    """What a ``getitem`` picks, as a result key."""
    base, index = node.refs()[0], node.args[1]
    return f"{base}#{index}"


def dim_classes(graph: Graph, signatures: Signatures) -> _Classes:
    """Dims that one factor ties together, over the whole graph."""
    classes = _Classes()
    for node in graph.nodes:
        if node.op == "getitem":
            meta = node.meta
            if isinstance(meta, TensorMeta):
                for dim in range(len(meta.shape)):
                    classes.unite((node.name, dim), (source_of(node), dim))
            continue
        signature = signatures.get(node.name)
        if signature is None:
            continue
        for places in factor_places(node, signature).values():
            for place in places[1:]:
                classes.unite(places[0], place)
    return classes


def factor_places(node: Node, signature: OpSignature) -> dict[str, list[tuple[str, int]]]:
    """Factor -> (value, dim) pairs of which it is the outermost factor."""
    places: dict[str, list[tuple[str, int]]] = {}

    def add(name: str, dims: Dims | None) -> None:
        for dim, factors in enumerate(dims or ()):
            if factors:
                places.setdefault(factors[0], []).append((name, dim))

    for name, dims in zip(node.refs(), signature.inputs, strict=True):
        add(name, dims)
    for index, dims in enumerate(signature.outputs):
        add(result_name(node, index), dims)
    return places


def batch_dims(graph: Graph, signatures: Signatures, parts: int) -> dict[str, int]:
    """Batch dim of every call argument (and tangent) that has one.

    Args:
        graph: The joint graph.
        signatures: Named dims by operator.
        parts: Blocks that the batch must divide into.

    Raises:
        ShardingError: No class of dims of the call arguments can be cut into ``parts``.
    """
    classes = dim_classes(graph, signatures)
    data = [i for i in graph.inputs if i.kind in (InputKind.USER, InputKind.TANGENT)]
    found: dict[tuple[str, int], dict[str, int]] = {}
    for entry in data:
        shape = entry.meta.shape if entry.meta else ()
        for dim in range(len(shape)):
            found.setdefault(classes.find((entry.name, dim)), {}).setdefault(entry.name, dim)
    users = {i.name for i in data if i.kind is InputKind.USER}
    sizes = graph.input_map()
    best: tuple[float, dict[str, int]] | None = None
    refused: list[str] = []
    for root, dims in sorted(found.items()):
        if not users & dims.keys():
            continue
        if any(_size(sizes[n].meta, d) % parts for n, d in dims.items()):
            refused += [
                f"{sizes[n].target!r} dim {d} of {_size(sizes[n].meta, d)}" for n, d in dims.items()
            ]
            continue
        placements = {n: Shard(d) for n, d in dims.items()}
        chooser = partial(_is_batch, classes=classes, root=root)
        trial = propagate(graph, signatures, "dp", parts, placements, chooser)
        score = 4 * trial.moved_bytes + trial.unsplit_bytes
        if best is None or score < best[0]:
            best = (score, dims)
    if best is None:
        raise ShardingError(
            f"no dim of the call arguments can be cut into {parts} parts "
            f"({', '.join(refused) or 'there are none'}); "
            f"use a batch that {parts} divides, or fewer parts"
        )
    return best[1]


def _size(meta: TensorMeta | None, dim: int) -> int:
    return meta.shape[dim] if meta else 0


def _is_batch(
    node: Node, signature: OpSignature, factor: str, *, classes: _Classes, root: tuple[str, int]
) -> bool:
    places = factor_places(node, signature).get(factor, [])
    return any(classes.find(p) == root for p in places)


@dataclass(slots=True)
class _State:
    """Progress of one propagation."""

    axis: str
    size: int
    metas: Mapping[str, Meta]
    place: dict[str, Placement] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    argument_only: set[str] = field(default_factory=set)
    prologue: set[str] = field(default_factory=set)
    moved_bytes: float = 0.0
    unsplit_bytes: float = 0.0


def argument_only_values(graph: Graph) -> set[str]:
    """Values that depend on call arguments, constants and unmutated buffers alone."""
    mutated = {o.target for o in graph.outputs_of(OutputKind.MUTATION)}
    known = {
        i.name
        for i in graph.inputs
        if i.kind in (InputKind.USER, InputKind.CONSTANT)
        or (i.kind is InputKind.BUFFER and i.target not in mutated)
    }
    for node in graph.nodes:
        if all(ref in known for ref in node.refs()):
            known.add(node.name)
    return known


def propagate(
    graph: Graph,
    signatures: Signatures,
    axis: str,
    size: int,
    placements: Mapping[str, Placement],
    is_batch: partial[bool],
    *,
    divide: Mapping[str, Mapping[str, int]] | None = None,
    microbatch_statistics: bool = False,
) -> AxisChoices:
    """Follow the inputs' placements through the graph.

    Args:
        graph: The joint graph.
        signatures: Named dims by operator.
        axis: ``"mb"`` or ``"dp"``.
        size: Parts along the axis.
        placements: Placement of the inputs that are not replicated.
        is_batch: ``is_batch(node, signature, factor)``: whether a factor is of the batch class.
        divide: Operator -> factor -> parts that other axes already cut it into.
        microbatch_statistics: Allow batch statistics per micro-batch.

    Raises:
        ShardingError: On ``mb``, an operator mixes samples of different micro-batches.
    """
    state = _State(axis, size, graph.metas())
    if axis == "mb":
        state.argument_only = argument_only_values(graph)
    for entry in graph.inputs:
        state.place[entry.name] = placements.get(entry.name, R)
    state.choices.update({n: p for n, p in placements.items() if p != R})
    for node in graph.nodes:
        if node.op == "getitem":
            state.place[node.name] = state.place[source_of(node)]
            continue
        signature = signatures.get(node.name)
        options = _options(node, signature, state, (divide or {}).get(node.name))
        if not microbatch_statistics:
            options = [s for s in options if s.factor != MICROBATCH_STATISTICS]
        _choose(node, signature, options, state, is_batch)
    return AxisChoices(
        state.choices, frozenset(state.prologue), state.moved_bytes, state.unsplit_bytes
    )


def _options(
    node: Node, signature: OpSignature | None, state: _State, divide: Mapping[str, int] | None
) -> list[AxisStrategy]:
    if signature is None:
        count = len(node.refs())
        return [AxisStrategy((R,) * count, (R,) * len(node.metas()))]
    options = axis_strategies(signature, state.size, divide=dict(divide or {}))
    if state.axis != "mb":
        return [s for s in options if s.factor != MICROBATCH_STATISTICS]
    return [s for s in options if not s.lowering or s.lowering in LOCAL_LOWERINGS]


def _choose(
    node: Node,
    signature: OpSignature | None,
    options: Sequence[AxisStrategy],
    state: _State,
    is_batch: partial[bool],
) -> None:
    refs = node.refs()
    metas = state.metas

    def price(strategy: AxisStrategy) -> tuple[float, int, int]:
        moved = sum(
            _move_bytes(state, ref, want, metas.get(ref))
            for ref, want in dict.fromkeys(zip(refs, strategy.inputs, strict=True))
        )
        batch = bool(
            signature is not None
            and strategy.factor
            and (
                strategy.factor == MICROBATCH_STATISTICS
                or is_batch(node, signature, strategy.factor)
            )
        )
        pending = sum(isinstance(p, Partial) for p in strategy.outputs)
        return moved, 0 if batch else 1, pending if strategy.is_replicated or batch else pending + 1

    best = min(options, key=price)
    cost = price(best)[0]
    if cost == _FORBIDDEN:
        raise ShardingError(_mixing_text(node, state))
    for ref, want in zip(refs, best.inputs, strict=True):
        have = state.place[ref]
        if state.axis == "mb" and have != want and not _is_free(have, want):
            state.prologue.add(ref)
    state.moved_bytes += cost
    results = node.metas()
    if not any(isinstance(p, Shard) for p in (*best.outputs, *best.inputs)):
        state.unsplit_bytes += sum(m.bytes for m in results if m is not None)
    for index, placement in enumerate(best.outputs):
        state.place[result_name(node, index)] = placement
    if isinstance(node.meta, tuple):
        state.place[node.name] = R
    if not best.is_replicated:
        state.choices[node.name] = best


def _is_free(have: Placement, want: Placement) -> bool:
    """Whether the change needs no other rank."""
    return have == want or (isinstance(have, Replicate) and not isinstance(want, Varying))


def _move_bytes(state: _State, ref: str, want: Placement, meta: Meta) -> float:
    have = state.place[ref]
    if _is_free(have, want):
        return 0.0
    if isinstance(have, Varying) or isinstance(want, Varying):
        return _FORBIDDEN
    if state.axis == "mb":
        if ref in state.argument_only and isinstance(want, Replicate):
            return 1e-3  # once per step; above zero so that a local way is preferred
        return _FORBIDDEN
    amount = float(meta.bytes) if isinstance(meta, TensorMeta) else 0.0
    if isinstance(have, Partial):
        return amount if isinstance(want, Shard) and have.op == "sum" else 2 * amount
    if isinstance(want, Shard):
        return amount / state.size
    return amount if isinstance(want, Replicate) else 3 * amount


def _mixing_text(node: Node, state: _State) -> str:
    where = f" ({node.source})" if node.source else ""
    have = ", ".join(f"%{r}: {state.place[r]}" for r in node.refs())
    return (
        f"{node.name}: {node.op}{where} mixes samples of different micro-batches (operands over "
        f"'mb' of size {state.size}: {have}); use num_microbatches=1, or "
        "microbatch_statistics=True for a batch norm whose statistics may be per micro-batch"
    )


@dataclass(frozen=True, slots=True)
class DataSplits:
    """Splits over both data axes, ready for :class:`~autopar.sharding.decisions.Decisions`."""

    mb: AxisChoices
    dp: AxisChoices

    @property
    def choices(self) -> dict[str, Mapping[str, Choice]]:
        """By axis."""
        return {"mb": self.mb.choices, "dp": self.dp.choices}


def split_data_axes(
    graph: Graph,
    signatures: Signatures,
    *,
    num_microbatches: int,
    dp: int,
    microbatch_statistics: bool = False,
) -> DataSplits:
    """Splits over ``mb`` and ``dp`` that follow from the batch dim.

    Raises:
        ShardingError: The batch can't be cut, or samples of different micro-batches mix.
    """
    parts = num_microbatches * dp
    none = AxisChoices({})
    if parts == 1:
        return DataSplits(none, none)
    dims = batch_dims(graph, signatures, parts)
    placements: dict[str, Placement] = {n: Shard(d) for n, d in dims.items()}
    classes = dim_classes(graph, signatures)
    root = classes.find(next(iter(dims.items())))
    is_batch = partial(_is_batch, classes=classes, root=root)
    mb = none
    if num_microbatches > 1:
        mb = propagate(
            graph,
            signatures,
            "mb",
            num_microbatches,
            placements,
            is_batch,
            microbatch_statistics=microbatch_statistics,
        )
        _check_results(graph, mb, num_microbatches)
    if dp == 1:
        return DataSplits(mb, none)
    divide = {}
    for name, strategy in mb.choices.items():
        signature = signatures.get(name)
        if isinstance(strategy, AxisStrategy) and signature is not None:
            divide[name] = parts_by_factor(signature, [(strategy, num_microbatches)])
    return DataSplits(
        mb, propagate(graph, signatures, "dp", dp, placements, is_batch, divide=divide)
    )


def _check_results(graph: Graph, mb: AxisChoices, size: int) -> None:
    """Losses and gradients must be sums over micro-batches, or not depend on them."""
    nodes = graph.node_map()
    for output in graph.outputs:
        if output.value is None or output.kind not in (OutputKind.LOSS, OutputKind.GRAD):
            continue
        node = nodes.get(output.value.name)
        if node is None:
            continue
        base = nodes[node.refs()[0]] if node.op == "getitem" else node
        choice = mb.choices.get(base.name)
        index = node.args[1] if node.op == "getitem" else 0
        have = (
            choice.outputs[index]
            if isinstance(choice, AxisStrategy) and isinstance(index, int)
            else R
        )
        if have not in (P, R):
            raise ShardingError(
                f"{output.kind.value} {output.target!r} is {have} over {size} micro-batches, "
                "not a sum over them; use num_microbatches=1"
            )
