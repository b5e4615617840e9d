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
from dataclasses import dataclass

from autopar.errors import ShardingError
from autopar.ir.graph import Graph, InputKind
from autopar.sharding.data_checks import check_results, size_of, smallest_factor
from autopar.sharding.decisions import Choice
from autopar.sharding.dim_classes import Place, Signatures
from autopar.sharding.placement import Placement, Shard
from autopar.sharding.propagation import AxisChoices, Pair, Propagator
from autopar.sharding.routing import expert_weights
from autopar.sharding.signature import AxisStrategy, parts_by_factor

_CLEAR_GAIN = 0.9  # a further class of dims counts as batch if it takes off a tenth of the cost


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
        self._walker = Propagator(graph, signatures)
        self.classes = self._walker.classes
        self._known: dict[object, AxisChoices] = {}
        self._none = AxisChoices({})
        self._cut_pairs: dict[int, tuple[AxisChoices, tuple[Pair, ...]]] = {}
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
        return self._walker.batch_factors

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
        self._walker.set_batch(roots)
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
        self._walker.set_batch(roots)
        trial = self._walker.propagate("dp", parts, {n: Shard(d) for n, d in dims.items()}, {})
        return 4 * trial.moved_bytes + trial.unsplit_bytes

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
        menus = tuple(self._walker.menu(s, size, "mb", {}) for s in self._walker.distinct.values())
        key = ("mb", statistics, tuple(map(id, menus)), tuple(sorted(placements)))
        found = self._known.get(key)
        if found is None:
            found = self._walker.propagate("mb", size, placements, {}, statistics=statistics)
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
        divides = {
            pair: parts_by_factor(self._walker.distinct[pair[0]], [(pair[1], num_microbatches)])
            for pair in self._pairs(mb)
        }
        by_id = self._walker.distinct
        menus = [self._walker.menu(s, dp, "dp", {}) for s in self._walker.distinct.values()]
        menus += [self._walker.menu(by_id[at], dp, "dp", cut) for (at, _), cut in divides.items()]
        cuts = tuple((at, strategy) for at, strategy in divides)
        where = tuple((name, placements[name]) for name in sorted(placements))
        key = ("dp", cuts, tuple(map(id, menus)), where, exchanged)
        found = self._known.get(key)
        if found is None:
            found = self._walker.propagate(
                "dp", dp, placements, divides, beside=mb, exchanged=exchanged
            )
            found = self._known[key] = self._same(found)
        return found

    def _pairs(self, mb: AxisChoices) -> tuple[Pair, ...]:
        """Signatures, by identity, with the strategies over ``mb`` that their operators have."""
        key = id(mb)
        if key not in self._cut_pairs:  # the choices too, so that their identity stays theirs
            pairs = dict.fromkeys(
                (id(signature), strategy)
                for name, strategy in mb.choices.items()
                if isinstance(strategy, AxisStrategy)
                and (signature := self._signatures.get(name)) is not None
            )
            self._cut_pairs[key] = (mb, tuple(pairs))
        return self._cut_pairs[key][1]

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
