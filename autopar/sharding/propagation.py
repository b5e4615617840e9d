"""Placements over one data axis, followed through a graph operator by operator.

In execution order every operator takes the strategy that moves the fewest bytes given its operands'
placements; ties go to a split of the batch. Where a run of operators repeats along the graph
(:mod:`autopar.sharding.repeats`), the first run with the same placements around it is walked
through, and its likes take over what it came to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, Node, TensorMeta
from autopar.sharding.data_checks import distinct_signatures
from autopar.sharding.decisions import Choice
from autopar.sharding.dim_classes import (
    Place,
    Signatures,
    argument_only_values,
    dim_classes,
    factor_places,
    result_name,
    source_of,
)
from autopar.sharding.lowerings import LOCAL_LOWERINGS
from autopar.sharding.placement import Partial, Placement, R, Replicate, Routed, Shard, Varying
from autopar.sharding.repeats import Piece, find_pieces
from autopar.sharding.routing import ROUTE, exchanges_rows, splits_experts
from autopar.sharding.rules import MICROBATCH_STATISTICS
from autopar.sharding.signature import AxisStrategy, OpSignature, axis_strategies

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
    steps: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Per piece of the graph which answer it has; pieces of one kind with the same are alike."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What propagation through a piece adds: by place in the piece, so that its likes have it.

    Attributes:
        number: Tells the steps of one propagation apart.
        where: Places of the operators that have a strategy.
        strategies: These.
        placed: Placement of every result, as the piece lists them.
        prologue: References, as the piece numbers them.
    """

    number: int
    where: tuple[int, ...]
    strategies: tuple[Choice, ...]
    placed: tuple[Placement, ...]
    prologue: tuple[int, ...]
    moved_bytes: float
    unsplit_bytes: float


@dataclass(slots=True)
class _State:
    """Progress of one propagation."""

    axis: str
    size: int
    divides: Mapping[Pair, Mapping[str, int]]
    beside: AxisChoices
    statistics: bool
    exchanged: frozenset[str]
    place: dict[str, Placement] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    prologue: set[str] = field(default_factory=set)
    moved_bytes: float = 0.0
    unsplit_bytes: float = 0.0
    kept: dict[int, tuple[tuple[AxisStrategy, ...], tuple[AxisStrategy, ...]]] = field(
        default_factory=dict
    )
    known: dict[object, _Chosen] = field(default_factory=dict)
    steps: dict[object, _Step] = field(default_factory=dict)


_Chosen = tuple[Sequence[AxisStrategy], AxisStrategy | None, tuple[float, int, int]]
"""The options, kept so that their identity is theirs alone; the best of them, with its price."""
Parts = tuple[tuple[str, int], ...]
Pair = tuple[int, AxisStrategy]
"""Identity of a signature, and a strategy of its operators."""


class Propagator:
    """Propagation through one graph; what does not depend on the sizes is found once.

    Args:
        graph: The joint graph.
        signatures: Named dims by operator.

    Attributes:
        classes: Dims that are split together.
        distinct: Signatures by identity.
        batch_factors: Operator -> its factors that are of the batch.
    """

    def __init__(self, graph: Graph, signatures: Signatures) -> None:
        self._graph, self._signatures = graph, signatures
        self._metas = graph.metas()
        self._refs = {n.name: n.refs() for n in graph.nodes}
        self._argument_only = argument_only_values(graph)
        self.classes = dim_classes(graph, signatures)
        self.distinct = distinct_signatures(graph, signatures)
        self.batch_factors: dict[str, frozenset[str]] = {}
        self._strategies: dict[tuple[int, int, Parts, str], tuple[AxisStrategy, ...]] = {}
        self._menus: dict[tuple[AxisStrategy, ...], tuple[AxisStrategy, ...]] = {}
        self._pieces, _ = find_pieces(graph.nodes, self._word)
        self._results = tuple(
            _results_of(graph.nodes[p.low : p.high]) if p.repeats else () for p in self._pieces
        )
        self._names = tuple(n.name for n in graph.nodes)
        self._marks: tuple[int, ...] = (0,) * len(self._pieces)
        self._by_root: dict[Place, dict[str, list[str]]] | None = None

    def _word(self, node: Node) -> object:
        """What propagation asks about an operator, whatever its operands' placements."""
        if node.op == "getitem":
            return ("getitem", node.args[1])
        refs = node.refs()
        return (
            id(self._signatures.get(node.name)),
            node.op == ROUTE,
            tuple([self._metas[ref] for ref in refs]),
            tuple([ref in self._argument_only for ref in refs]),
            node.meta,
        )

    def set_batch(self, roots: Sequence[Place]) -> None:
        """Note which factors of every operator are of the batch classes."""
        if self._by_root is None:
            self._by_root = self._factors_by_root()
        found: dict[str, frozenset[str]] = {}
        for root in roots:
            for name, factors in self._by_root.get(root, {}).items():
                found[name] = found.get(name, frozenset()).union(factors)
        self.batch_factors = found
        none: frozenset[str] = frozenset()
        marks: dict[tuple[frozenset[str], ...], int] = {}
        self._marks = tuple(
            marks.setdefault(
                tuple([found.get(n, none) for n in self._names[p.low : p.high]]), len(marks)
            )
            if p.repeats
            else 0
            for p in self._pieces
        )

    def _factors_by_root(self) -> dict[Place, dict[str, list[str]]]:
        """Class of dims -> operator -> its factors of that class."""
        table: dict[Place, dict[str, list[str]]] = {}
        for node in self._graph.nodes:
            signature = self._signatures.get(node.name)
            if signature is None or node.op == "getitem":
                continue
            for factor, places in factor_places(node, signature).items():
                root = self.classes.find(places[0])
                table.setdefault(root, {}).setdefault(node.name, []).append(factor)
        return table

    def propagate(
        self,
        axis: str,
        size: int,
        placements: Mapping[str, Placement],
        divides: Mapping[Pair, Mapping[str, int]],
        *,
        beside: AxisChoices | None = None,
        statistics: bool = False,
        exchanged: frozenset[str] = frozenset(),
    ) -> AxisChoices:
        """Follow the inputs' placements through the graph.

        Args:
            axis: ``"mb"`` or ``"dp"``.
            size: Parts along the axis.
            placements: Placement of the inputs that are not replicated.
            divides: Factor -> parts that the choices beside these cut it into, by signature and
                strategy.
            beside: Choices over ``mb``.
            statistics: Allow batch statistics per micro-batch.
            exchanged: Sorts by expert whose rows are sent to the ranks of their experts.
        """
        state = _State(axis, size, divides, beside or AxisChoices({}), statistics, exchanged)
        state.place = {i.name: placements.get(i.name, R) for i in self._graph.inputs}
        state.choices.update(placements)
        steps: list[int] = []
        for at, piece in enumerate(self._pieces):
            if not piece.repeats:
                self._walk(piece, state)
                steps.append(0)
                continue
            near = state.beside.steps
            key = (
                piece.kind,
                self._marks[at],
                near[at] if near else 0,
                tuple([n in exchanged for n in self._names[piece.low : piece.high]])
                if exchanged
                else (),
                tuple([state.place[name] for name in piece.outer]),
            )
            step = state.steps.get(key)
            if step is None:
                step = state.steps[key] = self._step(at, piece, state)
            else:
                self._repeat(at, piece, step, state)
            steps.append(step.number)
        return AxisChoices(
            state.choices, frozenset(state.prologue), state.moved_bytes, state.unsplit_bytes,
            tuple(steps),
        )  # fmt: skip

    def _walk(self, piece: Piece, state: _State) -> None:
        """Choose for the operators of a piece, one by one."""
        for node in self._graph.nodes[piece.low : piece.high]:
            if node.op == "getitem":
                state.place[node.name] = state.place[source_of(node)]
                continue
            options = self._options(node, state)
            if not state.statistics:
                kept = state.kept
                if id(options) not in kept:  # the options too, so that their identity stays theirs
                    free = tuple(s for s in options if s.factor != MICROBATCH_STATISTICS)
                    kept[id(options)] = (options, free)
                options = kept[id(options)][1]
            self._choose(node, options, state)

    def _step(self, at: int, piece: Piece, state: _State) -> _Step:
        """The same, and what it came to, for the piece's likes."""
        before = (state.prologue, state.moved_bytes, state.unsplit_bytes)
        state.prologue, state.moved_bytes, state.unsplit_bytes = set(), 0.0, 0.0
        self._walk(piece, state)
        names = self._names[piece.low : piece.high]
        chosen = [(i, c) for i, n in enumerate(names) if (c := state.choices.get(n)) is not None]
        number = {name: i for i, name in enumerate(names)}
        number.update((name, -1 - i) for i, name in enumerate(piece.outer))
        step = _Step(
            number=len(state.steps) + 1,
            where=tuple(i for i, _ in chosen),
            strategies=tuple(c for _, c in chosen),
            placed=tuple(state.place[name] for name in self._results[at]),
            prologue=tuple(number[name] for name in state.prologue),
            moved_bytes=state.moved_bytes,
            unsplit_bytes=state.unsplit_bytes,
        )
        prologue, moved_bytes, unsplit_bytes = before
        state.prologue |= prologue
        state.moved_bytes += moved_bytes
        state.unsplit_bytes += unsplit_bytes
        return step

    def _repeat(self, at: int, piece: Piece, step: _Step, state: _State) -> None:
        """What a step came to, at a piece of the same kind."""
        names = self._names[piece.low : piece.high]
        state.choices.update(zip([names[i] for i in step.where], step.strategies, strict=True))
        state.place.update(zip(self._results[at], step.placed, strict=True))
        state.prologue.update(names[i] if i >= 0 else piece.outer[-1 - i] for i in step.prologue)
        state.moved_bytes += step.moved_bytes
        state.unsplit_bytes += step.unsplit_bytes

    def _options(self, node: Node, state: _State) -> tuple[AxisStrategy, ...]:
        signature = self._signatures.get(node.name)
        if signature is None:
            count = len(self._refs[node.name])
            return (AxisStrategy((R,) * count, (R,) * len(node.metas())),)
        divide: Mapping[str, int] = {}
        near = state.beside.choices.get(node.name)
        if isinstance(near, AxisStrategy):
            divide = state.divides[id(signature), near]
        options = self.menu(signature, state.size, state.axis, divide)
        if node.op == ROUTE:  # experts are split over a data axis where that is asked for
            asked = node.name in state.exchanged
            options = tuple(s for s in options if exchanges_rows(s) == asked)
        return options

    def menu(
        self, signature: OpSignature, size: int, axis: str, divide: Mapping[str, int]
    ) -> tuple[AxisStrategy, ...]:
        """Legal splits of an operator over a data axis; equal menus are the same object."""
        key = (id(signature), size, tuple(divide.items()), axis)
        if key not in self._strategies:
            options = axis_strategies(signature, size, divide=dict(divide))
            if axis == "mb":
                kept = [s for s in options if not s.lowering or s.lowering in LOCAL_LOWERINGS]
            else:
                kept = [s for s in options if s.factor != MICROBATCH_STATISTICS]
            menu = tuple(s for s in kept if not splits_experts(s) or exchanges_rows(s))
            self._strategies[key] = self._menus.setdefault(menu, menu)
        return self._strategies[key]

    def _choose(self, node: Node, options: Sequence[AxisStrategy], state: _State) -> None:
        refs = self._refs[node.name]
        batch_factors = self.batch_factors.get(node.name, frozenset())
        key = (
            id(options),
            batch_factors,
            tuple([state.place[ref] for ref in refs]),
            tuple([self._metas[ref] for ref in refs]),
            tuple([ref in self._argument_only for ref in refs]),
            tuple([refs.index(ref) for ref in refs]),
        )
        if key not in state.known:
            state.known[key] = (options, *self._best(refs, batch_factors, options, state))
        _, best, best_price = state.known[key]
        if best is None:
            is_ruled = self._signatures.get(node.name) is not None
            raise ShardingError(_mixing_text(node, state, is_ruled=is_ruled))
        for ref, want in zip(refs, best.inputs, strict=True):
            have = state.place[ref]
            if state.axis == "mb" and have != want and not _is_free(have, want):
                state.prologue.add(ref)
        state.moved_bytes += best_price[0]
        if not any(isinstance(p, Shard | Routed) for p in (*best.outputs, *best.inputs)):
            state.unsplit_bytes += sum(m.bytes for m in node.metas() if m is not None)
        for index, placement in enumerate(best.outputs):
            state.place[result_name(node, index)] = placement
        if isinstance(node.meta, tuple):
            state.place[node.name] = R
        if not best.is_replicated:
            state.choices[node.name] = best

    def _best(
        self,
        refs: Sequence[str],
        batch_factors: frozenset[str],
        options: Sequence[AxisStrategy],
        state: _State,
    ) -> tuple[AxisStrategy | None, tuple[float, int, int]]:
        """The strategy that moves the fewest bytes, with its price."""
        best: AxisStrategy | None = None
        best_price = (_FORBIDDEN, 0, 0)
        for strategy in options:
            moved = 0.0
            seen: set[tuple[str, Placement]] = set()
            for ref, want in zip(refs, strategy.inputs, strict=True):
                if state.place[ref] != want and (ref, want) not in seen:
                    seen.add((ref, want))
                    moved += self._move_bytes(state, ref, want)
            if moved > best_price[0]:
                continue
            batch = strategy.factor in batch_factors or strategy.factor == MICROBATCH_STATISTICS
            pending = sum(isinstance(p, Partial) for p in strategy.outputs)
            price = (
                moved,
                0 if batch else 1,
                pending if batch or strategy.is_replicated else pending + 1,
            )
            if price < best_price:
                best, best_price = strategy, price
        return best, best_price

    def _move_bytes(self, state: _State, ref: str, want: Placement) -> float:
        have = state.place[ref]
        if _is_free(have, want):
            return 0.0
        if isinstance(have, Varying | Routed) or isinstance(want, Varying | Routed):
            return _FORBIDDEN
        if state.axis == "mb":
            if ref in self._argument_only and isinstance(want, Replicate):
                return 1e-3  # once per step; above zero so that a local way is preferred
            return _FORBIDDEN
        meta = self._metas[ref]
        amount = float(meta.bytes) if isinstance(meta, TensorMeta) else 0.0
        if isinstance(have, Partial):
            return amount if isinstance(want, Shard) and have.op == "sum" else 2 * amount
        if isinstance(want, Shard):
            return amount / state.size
        return amount if isinstance(want, Replicate) else 3 * amount


def _results_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """All values that operators make, by the names under which they have a placement."""
    names: list[str] = []
    for node in nodes:
        if node.op != "getitem":
            names += [result_name(node, i) for i in range(len(node.metas()))]
        if node.op == "getitem" or isinstance(node.meta, tuple):
            names.append(node.name)
    return tuple(names)


def _is_free(have: Placement, want: Placement) -> bool:
    """Whether the change needs no other rank."""
    return have == want or (isinstance(have, Replicate) and not isinstance(want, Varying | Routed))


def _mixing_text(node: Node, state: _State, *, is_ruled: bool) -> str:
    where = f" ({node.source})" if node.source else ""
    have = ", ".join(f"%{r}: {state.place[r]}" for r in node.refs())
    operands = f"(operands over 'mb' of size {state.size}: {have})"
    if not is_ruled:
        return (
            f"{node.name}: {node.op}{where} has no sharding rule and can't be given the samples of "
            f"one micro-batch alone {operands}; use num_microbatches=1, or describe the operator "
            "with autopar.register_op"
        )
    remedy = "use num_microbatches=1"
    if "batch_norm" in node.op:
        remedy += ", or microbatch_statistics=True for statistics per micro-batch"
    return (
        f"{node.name}: {node.op}{where} mixes samples of different micro-batches {operands}; "
        f"{remedy}"
    )
