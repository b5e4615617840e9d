"""Splits over the data axes: micro-batches (``mb``) and data-parallel ranks (``dp``).

They follow from the batch dim of the inputs, operator by operator, with no search:

1. *Dim classes.* Dims that one factor ties together are united over the whole graph, so that the
   batch dim of every input is found from the graph and not assumed to be dim 0. A scale vector
   whose length happens to equal the batch size is in a class of its own.
2. *Batch class.* Of the classes that hold a dim of a call argument, the one whose split leaves the
   least unsplit work and moves the fewest bytes; with others of the same size where splitting them
   too is clearly better (the texts and images of a contrastive loss).
3. *Propagation.* In execution order every operator takes the strategy that moves the fewest bytes
   given its operands' placements; ties go to a split of the batch class.

On ``mb`` nothing can be moved between micro-batches. A value that is reduced over micro-batches but
depends on call arguments alone (a count of valid labels) is computed once per step on the whole
batch: it is listed in ``prologue``. Any other reduction over the batch makes micro-batches illegal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, InputKind, Node, TensorMeta
from autopar.sharding.data_checks import (
    check_results,
    distinct_signatures,
    size_of,
    smallest_factor,
)
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
from autopar.sharding.placement import (
    Partial,
    Placement,
    R,
    Replicate,
    Routed,
    Shard,
    Varying,
)
from autopar.sharding.routing import ROUTE, exchanges_rows, expert_weights, splits_experts
from autopar.sharding.rules import MICROBATCH_STATISTICS
from autopar.sharding.signature import (
    AxisStrategy,
    OpSignature,
    axis_strategies,
    parts_by_factor,
)

"""A value and a dim of it."""
_FORBIDDEN = float("inf")
_CLEAR_GAIN = 0.9  # a further class of dims counts as batch if it takes off a tenth of the cost


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


@dataclass(slots=True)
class _State:
    """Progress of one propagation."""

    axis: str
    size: int
    place: dict[str, Placement] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    prologue: set[str] = field(default_factory=set)
    exchanged: frozenset[str] = frozenset()
    moved_bytes: float = 0.0
    unsplit_bytes: float = 0.0
    known: dict[object, _Chosen] = field(default_factory=dict)


_Chosen = tuple[Sequence[AxisStrategy], AxisStrategy | None, tuple[float, int, int]]
"""The options, kept so that their identity is theirs alone; the best of them, with its price."""
Parts = tuple[tuple[str, int], ...]


class DataAxes:
    """Splits over the data axes of one graph; what does not depend on the sizes is found once.

    Args:
        graph: The joint graph.
        signatures: Named dims by operator.
        batch: Dims by input that are known to be of the batch, as from a call of other sizes; a
            class of dims with none of them is not the batch. None if nothing is known.

    Attributes:
        classes: Dims that are split together.
    """

    def __init__(
        self, graph: Graph, signatures: Signatures, *, batch: Mapping[str, int] | None = None
    ) -> None:
        self._graph, self._signatures, self._given = graph, signatures, batch
        self._metas = graph.metas()
        self._refs = {n.name: n.refs() for n in graph.nodes}
        self._argument_only = argument_only_values(graph)
        self.classes = dim_classes(graph, signatures)
        self._strategies: dict[tuple[int, int, Parts, str], tuple[AxisStrategy, ...]] = {}
        self._menus: dict[tuple[AxisStrategy, ...], tuple[AxisStrategy, ...]] = {}
        self._known: dict[object, AxisChoices] = {}
        self._none = AxisChoices({})
        self._distinct = distinct_signatures(graph, signatures)
        self._batch_factors: dict[str, frozenset[str]] = {}
        self._batch: dict[str, int] | None = None

    def can_be_cut(self) -> bool:
        """Whether the batch can be cut into micro-batches; True if it can't be cut at all.

        Batch statistics count as cuttable: the user may ask for them per micro-batch.
        """
        sizes = {size_of(self._graph.input_map()[n].meta, d) for n, d in self.batch_dims(1).items()}
        parts = min(map(smallest_factor, sizes), default=1)
        if parts == 1:
            return True
        try:
            self.split(num_microbatches=parts, dp=1, microbatch_statistics=True)
        except ShardingError:
            return False
        return True

    # -- the batch -------------------------------------------------------------------------------
    @property
    def batch_factors(self) -> Mapping[str, frozenset[str]]:
        """Operator -> its factors that are of the batch class."""
        if self._batch is None:
            self._batch = self._find_batch()
        return self._batch_factors

    def known_batch(self) -> dict[str, int]:
        """Batch dim of every call argument (and tangent) that has one, by input name."""
        if self._batch is None:
            self._batch = self._find_batch()
        return dict(self._batch)

    def batch_dims(self, parts: int) -> dict[str, int]:
        """Batch dim of every call argument (and tangent) that has one, by input name.

        Args:
            parts: Blocks that the batch must divide into.

        Raises:
            ShardingError: The batch can't be cut into ``parts``, or there is none.
        """
        batch = self.known_batch()
        inputs = self._graph.input_map()
        if parts == 1:
            return dict(batch)
        sizes = {n: size_of(inputs[n].meta, d) for n, d in batch.items()}
        if not sizes or any(size % parts for size in sizes.values()):
            found = ", ".join(
                f"{inputs[n].target!r} has {size} in dim {batch[n]}" for n, size in sizes.items()
            )
            raise ShardingError(
                f"the batch can't be cut into {parts} equal parts "
                f"({found or 'no call argument has a batch dim'}); "
                f"use a batch that {parts} divides, or fewer micro-batches and data ranks"
            )
        return batch

    def _find_batch(self) -> dict[str, int]:
        data = [i for i in self._graph.inputs if i.kind in (InputKind.USER, InputKind.TANGENT)]
        found: dict[Place, dict[str, int]] = {}
        for entry in data:
            for dim in range(len(entry.meta.shape) if entry.meta else 0):
                root = self.classes.find((entry.name, dim))
                found.setdefault(root, {}).setdefault(entry.name, dim)
        best: tuple[tuple[float, int], dict[str, int], list[Place]] | None = None
        for root, dims in sorted(found.items()):
            if self._given is not None and not dims.items() & self._given.items():
                continue
            trial = self._trial(dims, [root])
            # equally good: the outermost dim, as people write batches
            if trial is not None and (best is None or (trial, max(dims.values())) < best[0]):
                best = ((trial, max(dims.values())), dims, [root])
        if best is None:
            return {}
        (score, _), dims, roots = best
        # two towers that meet in a product of all pairs have a batch each
        for root, more in sorted(found.items()):
            if root in roots or more.keys() & dims.keys():
                continue
            trial = self._trial(dims | more, [*roots, root])
            if trial is not None and trial < _CLEAR_GAIN * score:
                score, dims, roots = trial, dims | more, [*roots, root]
        self._set_batch(roots)
        return dims

    def _trial(self, dims: Mapping[str, int], roots: Sequence[Place]) -> float | None:
        """What a split of these dims costs: bytes moved and computed whole; None if there is none.

        Args:
            dims: Dim of each argument; all must have one size.
            roots: Their classes.
        """
        inputs = self._graph.input_map()
        sizes = {size_of(inputs[n].meta, d) for n, d in dims.items()}
        users = any(inputs[n].kind is InputKind.USER for n in dims)
        parts = min(map(smallest_factor, sizes))
        if not users or parts == 1 or any(size % parts for size in sizes):
            return None
        if len(roots) > 1 and len(sizes) > 1:
            return None
        self._set_batch(roots)
        trial = self._propagate("dp", parts, {n: Shard(d) for n, d in dims.items()}, {})
        return 4 * trial.moved_bytes + trial.unsplit_bytes

    def _set_batch(self, roots: Sequence[Place]) -> None:
        """Note which factors of every operator are of the batch classes."""
        self._batch_factors = {}
        for node in self._graph.nodes:
            signature = self._signatures.get(node.name)
            if signature is None or node.op == "getitem":
                continue
            factors = frozenset(
                factor
                for factor, places in factor_places(node, signature).items()
                if self.classes.find(places[0]) in roots
            )
            if factors:
                self._batch_factors[node.name] = factors

    # -- propagation -----------------------------------------------------------------------------
    def split(
        self,
        *,
        num_microbatches: int,
        dp: int,
        microbatch_statistics: bool = False,
        experts: Mapping[str, int] | None = None,
    ) -> DataSplits:
        """Splits over ``mb`` and ``dp``.

        Args:
            num_microbatches: Parts along ``mb``.
            dp: Parts along ``dp``.
            microbatch_statistics: Allow batch statistics per micro-batch.
            experts: Parameter input -> its dim of experts, to split them over ``dp`` with all
                weights of the same experts; rows are then sent to the ranks of their experts.

        Raises:
            ShardingError: The batch can't be cut, samples of different micro-batches mix, or a
                parameter of ``experts`` has no experts that can be split so.
        """
        none = self._none
        if experts and dp == 1:
            target = self._graph.input_map()[min(experts)].target
            raise ShardingError(f"parameter {target!r} can't be split over dp=1; use 2 or more")
        if num_microbatches * dp == 1:
            return DataSplits(none, none)
        dims = self.batch_dims(num_microbatches * dp)
        placements: dict[str, Placement] = {n: Shard(d) for n, d in dims.items()}
        mb = none
        if num_microbatches > 1:
            try:
                mb = self._over_microbatches(num_microbatches, placements, microbatch_statistics)
            except ShardingError as error:
                raise self._single_sample(num_microbatches) or error from None
        if dp == 1:
            return DataSplits(mb, none)
        exchanged, split = self._exchanged(experts or {}, dp)
        placements.update(split)
        return DataSplits(mb, self._over_ranks(dp, mb, num_microbatches, placements, exchanged))

    def _over_microbatches(
        self, size: int, placements: Mapping[str, Placement], statistics: bool
    ) -> AxisChoices:
        """Splits over ``mb``; sizes that allow the same splits everywhere share them."""
        menus = tuple(self._menu(s, size, "mb", {}) for s in self._distinct.values())
        key = ("mb", statistics, tuple(map(id, menus)), tuple(sorted(placements)))
        found = self._known.get(key)
        if found is None:
            found = self._propagate("mb", size, placements, {}, statistics=statistics)
            check_results(self._graph, found.choices, size)
            found = self._known[key] = self._same(found)
        return found

    def _same(self, choices: AxisChoices) -> AxisChoices:
        """An equal one that is known already: sizes may rule out splits that nothing would take."""
        for known in self._known.values():
            if known.prologue == choices.prologue and known.choices == choices.choices:
                return known
        return choices

    def _over_ranks(
        self,
        dp: int,
        mb: AxisChoices,
        num_microbatches: int,
        placements: Mapping[str, Placement],
        exchanged: frozenset[str],
    ) -> AxisChoices:
        """Splits over ``dp`` beside those over ``mb``; likewise shared."""
        divides: dict[tuple[int, AxisStrategy], dict[str, int]] = {}
        divide: dict[str, Mapping[str, int]] = {}
        for name, strategy in mb.choices.items():
            signature = self._signatures.get(name)
            if isinstance(strategy, AxisStrategy) and signature is not None:
                pair = (id(signature), strategy)
                if pair not in divides:
                    divides[pair] = parts_by_factor(signature, [(strategy, num_microbatches)])
                divide[name] = divides[pair]
        by_id = {id(s): s for s in self._distinct.values()}
        menus = [self._menu(s, dp, "dp", {}) for s in self._distinct.values()]
        menus += [self._menu(by_id[at], dp, "dp", cut) for (at, _), cut in divides.items()]
        cuts = tuple((at, strategy) for at, strategy in divides)
        where = tuple((name, placements[name]) for name in sorted(placements))
        key = ("dp", cuts, tuple(map(id, menus)), where, exchanged)
        found = self._known.get(key)
        if found is None:
            found = self._propagate("dp", dp, placements, divide, exchanged=exchanged)
            found = self._known[key] = self._same(found)
        return found

    def _exchanged(
        self, experts: Mapping[str, int], dp: int
    ) -> tuple[frozenset[str], dict[str, Placement]]:
        """Groups whose rows are exchanged, and the placement of their weights."""
        if not experts:
            return frozenset(), {}
        known = expert_weights(self._graph, self._signatures)
        inputs = self._graph.input_map()
        for name, dim in experts.items():
            weight, meta = known.get(name), inputs[name].meta
            target = inputs[name].target
            if weight is None or not weight.is_free:
                raise ShardingError(
                    f"parameter {target!r} can't be split over dp: it has no experts, or their "
                    "rows are read by an operator that can't work on some of them; split it over tp"
                )
            if dim != weight.dim:
                raise ShardingError(
                    f"parameter {target!r} can't be split in dim {dim} over dp: its experts are in "
                    f"dim {weight.dim}; use 'S({weight.dim})@dp'"
                )
            if meta is None or meta.shape[weight.dim] % dp:
                size = meta.shape[weight.dim] if meta else 0
                raise ShardingError(
                    f"parameter {target!r} can't be split over dp={dp}: it has {size} experts, "
                    f"which {dp} does not divide; use a dp that does"
                )
        groups = frozenset(known[name].group for name in experts)
        placed: dict[str, Placement] = {
            name: Shard(w.dim) for name, w in known.items() if w.group in groups
        }
        return groups, placed

    def _single_sample(self, num_microbatches: int) -> ShardingError | None:
        """What is wrong if there is only one sample, so that another dim was taken for the batch.

        That is so if every argument whose dims were cut has a leading dim of size one.
        """
        inputs = self._graph.input_map()
        shapes = {inputs[n].target: m.shape for n in self._batch or {} if (m := inputs[n].meta)}
        if not shapes or any(shape[0] != 1 for shape in shapes.values()):
            return None
        name, shape = next(iter(shapes.items()))
        return ShardingError(
            f"a batch of 1 can't be cut into {num_microbatches} micro-batches: {name!r} has shape "
            f"{shape}, and its samples are not independent along another dim; use a batch that "
            f"{num_microbatches} divides, or num_microbatches=1"
        )

    def _propagate(
        self,
        axis: str,
        size: int,
        placements: Mapping[str, Placement],
        divide: Mapping[str, Mapping[str, int]],
        *,
        statistics: bool = False,
        exchanged: frozenset[str] = frozenset(),
    ) -> AxisChoices:
        """Follow the inputs' placements through the graph.

        Args:
            axis: ``"mb"`` or ``"dp"``.
            size: Parts along the axis.
            placements: Placement of the inputs that are not replicated.
            divide: Operator -> factor -> parts that other axes already cut it into.
            statistics: Allow batch statistics per micro-batch.
            exchanged: Sorts by expert whose rows are sent to the ranks of their experts.
        """
        state = _State(axis, size, exchanged=exchanged)
        state.place = {i.name: placements.get(i.name, R) for i in self._graph.inputs}
        state.choices.update(placements)
        kept: dict[int, tuple[tuple[AxisStrategy, ...], tuple[AxisStrategy, ...]]] = {}
        for node in self._graph.nodes:
            if node.op == "getitem":
                state.place[node.name] = state.place[source_of(node)]
                continue
            options = self._options(node, state, divide.get(node.name, {}))
            if not statistics:
                if id(options) not in kept:  # the options too, so that their identity stays theirs
                    free = tuple(s for s in options if s.factor != MICROBATCH_STATISTICS)
                    kept[id(options)] = (options, free)
                options = kept[id(options)][1]
            self._choose(node, options, state)
        return AxisChoices(
            state.choices, frozenset(state.prologue), state.moved_bytes, state.unsplit_bytes
        )

    def _options(
        self, node: Node, state: _State, divide: Mapping[str, int]
    ) -> tuple[AxisStrategy, ...]:
        signature = self._signatures.get(node.name)
        if signature is None:
            count = len(self._refs[node.name])
            return (AxisStrategy((R,) * count, (R,) * len(node.metas())),)
        options = self._menu(signature, state.size, state.axis, divide)
        if node.op == ROUTE:  # experts are split over a data axis where that is asked for
            asked = node.name in state.exchanged
            options = tuple(s for s in options if exchanges_rows(s) == asked)
        return options

    def _menu(
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
        batch_factors = self._batch_factors.get(node.name, frozenset())
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
    experts: Mapping[str, int] | None = None,
) -> DataSplits:
    """:meth:`DataAxes.split` for one pair of sizes."""
    return DataAxes(graph, signatures).split(
        num_microbatches=num_microbatches,
        dp=dp,
        microbatch_statistics=microbatch_statistics,
        experts=experts,
    )
