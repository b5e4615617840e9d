"""The work of one micro-batch, which many shapes share.

What a micro-batch costs depends on the samples that a rank has in it and on ``tp``, not on how
these came about. Shapes with the same of both have one *body*: one list of options and prices, one
least work per block, one mixed-integer program. Only what runs once per step is priced per shape
(:func:`~autopar.solver.splits_build.with_parameters`).

Where data ranks exchange values inside a micro-batch (experts split over ``dp``, statistics over
the batch) their number counts too, and shapes with different ``dp`` have different bodies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import ShardingError
from autopar.sharding.lowerings import LOCAL_LOWERINGS
from autopar.sharding.propagation import AxisChoices
from autopar.sharding.signature import AxisStrategy
from autopar.sharding.stages import ancestors
from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import light_operators
from autopar.solver.lanes import NOW, Ahead, Lanes
from autopar.solver.pipeline_bound import Floor
from autopar.solver.recompute_blocks import Spare
from autopar.solver.saved_values import SavedValues
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import (
    Flow,
    Move,
    Pass,
    SplitsProblem,
    SplitsSolution,
    SplitVariable,
)
from autopar.solver.splits_structure import GroupKind, SplitsStructure
from autopar.solver.stages_problem import BlockMenu, Option

Sizes = tuple[int, int, int]

SCALAR_BYTES = 4096  # exchanges up to this are of counts and losses, once per step
REST_WEIGHT = 2e-4  # of what does not repeat along the chain, when its repeating unit is bounded
MOST = 0.8  # share of the work that the repeating part of a chain must have to be told apart


@dataclass(slots=True, eq=False)
class Body:
    """One micro-batch of some meshes.

    Attributes:
        sizes: Sizes of mb, dp, tp of the mesh whose problem stands for all of them.
        structure: Groups of operators.
        problem: Their options and flows at ZeRO level 0.
        least: Per block its relaxed menu: every operator at its cheapest, reshards free, saved
            values as small as any layout makes them, given up at the price of the operators that
            make them again.
        boundary_bytes: Per boundary the bytes of a message forward and of one backward, at least.
        floor: What its mixed-integer program adds to that, once it is solved.
        splits: Its solution, once it is solved.
        whole: The same without a rule of what is made again, where there is one.
        program: What stands for its splits until they are asked for, once it is begun.
    """

    sizes: Sizes
    structure: SplitsStructure
    problem: SplitsProblem
    least: tuple[BlockMenu, ...]
    boundary_bytes: tuple[tuple[int, int], ...]
    floor: Floor = field(default_factory=Floor)
    splits: SplitsSolution | None = None
    whole: Body | None = None
    program: _Begun | None = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A body's mixed-integer program on its way.

    Attributes:
        unit: As of :meth:`Bodies._unit_of`.
        rest_s: The most that can be paid for what hardly counts, as of :func:`_weighed`.
        found: Its solution.
    """

    unit: tuple[int, ...]
    rest_s: float
    found: Ahead[SplitsSolution]


@dataclass(slots=True)
class Bodies:
    """Bodies of a model on a cluster, made on first use.

    Attributes:
        analysis: Model and cluster.
        spares: By block a boundary's value that may be made again.
        lanes: Threads that programs are solved on.
        num_solves: Mixed-integer programs solved.
        num_columns: Columns of the largest.
    """

    analysis: Analysis
    spares: tuple[Spare | None, ...]
    lanes: Lanes = field(default_factory=Lanes)
    num_solves: int = 0
    num_columns: int = 0
    _whole: Bodies | None = None
    _bodies: dict[object, Body] = field(default_factory=dict)
    _keys: dict[Sizes, tuple[object, Sizes]] = field(default_factory=dict)
    _saved: dict[int, SavedValues] = field(default_factory=dict)
    _unit: tuple[int, ...] | None = None
    _outside: set[str] | None = None  # values that something reads that does not repeat
    _waited: frozenset[str] | None = None  # operators that the first boundary's gradient needs
    _hopes: list[tuple[float, Ahead[SplitsSolution]]] = field(default_factory=list)

    def on(self, analysis: Analysis) -> Bodies:
        """Those of another cluster: bodies whose mesh is priced as here are kept."""
        before = self.analysis
        kept = {
            key: body
            for key, body in self._bodies.items()
            if analysis.has_prices_of(before, body.sizes)
        }
        return replace(self, analysis=analysis, num_solves=0, _bodies=kept, _keys={}, _hopes=[])

    def under(self, analysis: Analysis) -> Bodies:
        """Those of the same model and cluster where some blocks may make nothing again."""
        return Bodies(analysis, self.spares, self.lanes, _whole=self)

    def body(self, sizes: Sizes) -> Body:
        """The body of a mesh.

        Raises:
            ShardingError: The batch can't be cut so.
            ConstraintError: A constraint leaves an operator without an option.
        """
        if sizes not in self._keys:
            self._keys[sizes] = self._key(sizes)
        key, common = self._keys[sizes]
        if key not in self._bodies:
            whole = self._whole
            self._bodies[key] = (
                self._make(common) if whole is None else self._ruled(whole.body(sizes))
            )
        return self._bodies[key]

    def _ruled(self, whole: Body) -> Body:
        """A body under a rule of what is made again: only its least menus are others."""
        least = tuple(
            replace(menu, key=f"{menu.key} none", options=menu.options[:1])
            if self.analysis.constraints.recompute_of(block.scope) == "none"
            else menu
            for menu, block in zip(whole.least, self.analysis.chain.blocks, strict=True)
        )
        return replace(whole, least=least, whole=whole)

    def solved(self, body: Body) -> SplitsSolution:
        """The best splits of a body; its floor is known from then on."""
        if body.splits is None and self._whole is not None and body.whole is not None:
            body.splits = self._whole.solved(body.whole)
            body.floor = body.whole.floor  # making nothing again is the least work of a block
            self.num_solves, self.num_columns = self._whole.num_solves, self._whole.num_columns
        elif body.splits is None:
            self._solve(body)
        assert body.splits is not None
        return body.splits

    def expect(self, body: Body, bound_s: float) -> None:
        """Start the program of a body whose best splits are likely to be asked for.

        Args:
            body: The body.
            bound_s: Of the shape that asks for it: shapes with the least bounds do first.
        """
        if self._whole is not None and body.whole is not None:
            self._whole.expect(body.whole, bound_s)
        elif body.splits is None and body.program is None and self.lanes.is_open:
            body.program = self._begun(body, bound_s)
            self._hopes.append((bound_s, body.program.found))

    def give_up(self, enough_s: float) -> None:
        """What only shapes with bounds from ``enough_s`` on would ask for is not to be begun."""
        if self._whole is not None:
            self._whole.give_up(enough_s)
        for hope in [hope for hope in self._hopes if hope[0] >= enough_s]:
            hope[1].drop()
            self._hopes.remove(hope)

    def saved(self, structure: SplitsStructure) -> SavedValues:
        """What backward needs of forward, block by block."""
        key = id(structure)
        if key not in self._saved:
            self._saved[key] = SavedValues(self.analysis, structure, self.spares)
        return self._saved[key]

    # -- who shares a body ---------------------------------------------------------------------
    def _key(self, sizes: Sizes) -> tuple[object, Sizes]:
        """What bodies are told apart by, and the mesh with the fewest data ranks that has it."""
        analysis, (count, dp, tp) = self.analysis, sizes
        data = analysis.data(count, dp)
        common = sizes
        if dp > 1 and count > 1 and not _exchanges(data.dp):
            parts = count * dp
            fewest = next(d for d in range(2, parts + 1) if parts % d == 0)
            common = (parts // fewest, fewest, tp) if parts > fewest else sizes
            try:
                other = analysis.data(common[0], common[1])
            except ShardingError:
                common = sizes
            else:
                if (other.mb, other.dp) != (data.mb, data.dp) or self._inner(common) != (
                    self._inner(sizes)
                ):
                    common = sizes
        return (common, id(data.mb), id(data.dp)), common

    def _inner(self, sizes: Sizes) -> object:
        """The link along ``tp``."""
        groups = self.analysis.prices(sizes).groups
        ranks = groups.get("tp")
        return None if ranks is None else self.analysis.cluster.link_for(ranks)

    # -- least work ----------------------------------------------------------------------------
    def _make(self, sizes: Sizes) -> Body:
        request = self.analysis.request(sizes, 0)
        problem = self.analysis.problem(sizes, 0)
        structure = request.structure
        least = self._least(structure, problem, sizes)
        boundaries = self.saved(structure).boundary_bytes(problem, self.analysis.prices(sizes))
        return Body(sizes, structure, problem, least, boundaries)

    def _least(
        self, structure: SplitsStructure, problem: SplitsProblem, sizes: Sizes
    ) -> tuple[BlockMenu, ...]:
        chain, count = self.analysis.chain, problem.num_microbatches
        forward = [0.0] * len(chain.blocks)
        backward = [0.0] * len(chain.blocks)
        waited = [0.0] * len(chain.blocks)
        operator_s: dict[int, float] = {}
        for at, (variable, group) in enumerate(
            zip(problem.variables, structure.groups, strict=True)
        ):
            if group.kind is not GroupKind.NODE:
                continue
            time_s = min(o.time_s - o.once_s for o in variable.options) / count
            operator_s[at] = time_s
            for name in variable.members if time_s > 0 else ():
                row = backward if name in structure.backward else forward
                row[chain.block_of[name]] += time_s
            for name in (
                self._waited_for(variable.members, structure.backward) if time_s > 0 else ()
            ):
                waited[chain.block_of[name]] += time_s
        saved = self.saved(structure)
        curves = saved.curves(problem, self.analysis.prices(sizes), operator_s)
        held = saved.held_bytes(problem, self.analysis.prices(sizes))
        menus: list[BlockMenu] = []
        known: dict[object, BlockMenu] = {}
        same: dict[object, BlockMenu] = {}  # by figures as they are, which is quicker to tell
        for block in chain.blocks:
            i = block.index
            raw = (block.key, forward[i], backward[i], waited[i], id(curves[i]), held[i])
            if raw not in same:
                seconds = (f"{time_s:.9e}" for time_s in raw[1:4])
                key = (block.key, *seconds, curves[i], held[i])
                if key not in known:
                    options = _relaxed(forward[i], backward[i], waited[i], curves[i], held[i])
                    known[key] = BlockMenu(key=str(len(known)), options=options, state_bytes=0)
                same[raw] = known[key]
            menus.append(same[raw])
        return tuple(menus)

    def _waited_for(self, names: Sequence[str], backward: Collection[str]) -> Sequence[str]:
        """Backward operators of a group that the stages before wait for, wherever they are cut.

        A gradient that reaches the chain's first boundary passes all boundaries on its way. Light
        operators are left out: the other half of a backward may make some of them again.
        """
        if self._waited is None:
            cuts = self.analysis.chain.backward_cuts[:1]
            sent = {n.partition("#")[0] for cut in cuts for n in cut}
            self._waited = ancestors(self.analysis.graph, sent)
        found = [n for n in names if n in self._waited and n in backward]
        return () if not found or light_operators(self.analysis, found[:1]) else found

    # -- the mixed-integer program -------------------------------------------------------------
    def _begun(self, body: Body, order: float = NOW) -> _Begun:
        unit = self._unit_of(body)
        repeats = sum(place == 0 for place in unit)
        inside = [self._inside(body, at, unit) for at in range(len(body.problem.variables))]
        counts = self._counts_inside(body, unit)
        problem, rest_s = _weighed(body.problem, inside, counts, repeats)
        return _Begun(unit, rest_s, self.lanes.ahead(partial(solve_splits, problem), order))

    def _solve(self, body: Body) -> None:
        begun, body.program = body.program or self._begun(body), None
        found, unit, rest_s = begun.found.result(), begun.unit, begun.rest_s
        count, repeats = body.problem.num_microbatches, sum(place == 0 for place in unit)
        self.num_solves += any(len(v.options) > 1 for v in body.problem.variables)
        self.num_columns = max(self.num_columns, found.num_columns)
        body.splits = found
        bound_s = max(0.0, found.bound_s - REST_WEIGHT * rest_s) / count
        if not unit:
            body.floor = Floor(total_s=bound_s)
            return
        least = [min(o.total_s for o in menu.options) for menu in body.least]
        inner_s = sum(t for t, place in zip(least, unit, strict=True) if place >= 0)
        gain_s = max(0.0, bound_s - inner_s) * (repeats - 1) / repeats
        body.floor = Floor(total_s=sum(least) + gain_s, unit_of=unit, unit_s=bound_s / repeats)

    def _unit_of(self, body: Body) -> tuple[int, ...]:
        """Per block its place in the unit that the chain repeats, -1 elsewhere.

        Nothing if that is not most of the chain's work.
        """
        if self._unit is None:
            self._unit = repeating_unit([b.key for b in self.analysis.chain.blocks])
        least = [min(o.total_s for o in menu.options) for menu in body.least]
        inner_s = sum(t for t, place in zip(least, self._unit, strict=True) if place >= 0)
        return self._unit if inner_s >= MOST * sum(least) else ()

    def _inside(self, body: Body, at: int, unit: tuple[int, ...]) -> float:
        """The share of a variable's operators in the repeating part; all of it if there is none.

        The first layer of a model is often no repeat, since its input is made otherwise, and yet
        most of its operators are decided together with those of all layers.
        """
        group = body.structure.groups[at]
        if group.kind is not GroupKind.NODE:
            return 0.0
        if not unit:
            return 1.0
        block_of = self.analysis.chain.block_of
        return sum(unit[block_of[name]] >= 0 for name in group.members) / len(group.members)

    def _counts_inside(self, body: Body, unit: tuple[int, ...]) -> list[int]:
        """How many values of every flow are read in the repeating part alone."""
        flows = body.structure.flows
        if not unit:
            return [flow.count for flow in flows]
        if self._outside is None:
            graph, keys = self.analysis.graph, self.analysis.value_keys
            inside = {n for n, at in self.analysis.chain.block_of.items() if unit[at] >= 0}
            rest = (node for node in graph.nodes if node.name not in inside)
            self._outside = {keys.get(ref, ref) for node in rest for ref in node.refs()}
        outside = self._outside
        return [sum(value not in outside for value in flow.values) for flow in flows]


def of_step(problem: SplitsProblem, share: float) -> SplitsProblem:
    """A body's problem with other numbers of micro-batches: their work is ``share`` of it."""
    variables = tuple(
        v
        if v.is_once or share == 1
        else replace(
            v,
            options=tuple(
                replace(o, time_s=o.once_s + share * (o.time_s - o.once_s)) for o in v.options
            ),
        )
        for v in problem.variables
    )
    return replace(problem, variables=variables)


def repeating_unit(keys: list[str]) -> tuple[int, ...]:
    """Per block its place in the longest part of a chain that repeats, -1 outside of it.

    >>> repeating_unit(["e", "a", "b", "a", "b", "h"])
    (-1, 0, 1, 0, 1, -1)
    """
    best = (0, 0, 0)  # blocks covered, start, size
    n = len(keys)
    for size in range(1, min(8, n // 2) + 1):
        start = 0
        while start + 2 * size <= n:
            end = start
            while end + size < n and keys[end] == keys[end + size]:
                end += 1
            covered = (end - start) // size * size + size
            if end - start >= size and covered > best[0]:
                best = (covered, start, size)
            start = max(start + 1, end - size + 2)
    covered, start, size = best
    return tuple(
        (i - start) % size if covered and start <= i < start + covered else -1 for i in range(n)
    )


def _exchanges(choices: AxisChoices) -> bool:
    """Whether data ranks exchange more than counts inside a micro-batch."""
    if choices.moved_bytes > SCALAR_BYTES:
        return True
    return any(
        isinstance(s, AxisStrategy) and s.lowering and s.lowering not in LOCAL_LOWERINGS
        for s in choices.choices.values()
    )


def _relaxed(
    forward_s: float,
    backward_s: float,
    waited_s: float,
    curve: tuple[int, tuple[tuple[int, float], ...]],
    held_bytes: int,
) -> tuple[Option, ...]:
    """The menu of a block from what it saves and what giving up parts of that costs.

    Its gradients of weights are at most what nothing of ``waited_s`` is.
    """
    saved, steps = curve
    options = [
        Option(
            name="none", forward_s=forward_s, backward_s=backward_s, saved_bytes=saved,
            transient_bytes=0, weight_s=max(0.0, backward_s - waited_s), held_bytes=held_bytes,
        )
    ]  # fmt: skip
    for less, seconds in steps:
        last = options[-1]
        options.append(
            replace(
                last,
                name=f"less{len(options)}",
                backward_s=last.backward_s + seconds,
                weight_s=last.weight_s + seconds,
                saved_bytes=last.saved_bytes - less,
            )
        )
    return tuple(options)


def _weighed(
    problem: SplitsProblem, inside: list[float], counts: list[int], repeats: int
) -> tuple[SplitsProblem, float]:
    """A body's problem in which what does not repeat hardly counts.

    Values between repeats are as many as repeats, less one; here they count as often as these, so
    that a whole number of units has its share.

    Args:
        problem: Of the body.
        inside: Per variable, which share of its operators repeats.
        counts: Per flow, how many of its values are read by what repeats alone.
        repeats: Of the unit; 0 if all counts.

    Returns:
        The problem, and the most that a choice can pay for what hardly counts, unweighed, in
        seconds per step.
    """
    rest_s = 0.0
    variables: list[SplitVariable] = []
    for variable, share in zip(problem.variables, inside, strict=True):
        rests = [o.once_s + (1 - share) * (o.time_s - o.once_s) for o in variable.options]
        rest_s += len(variable.members) * max(rests)
        options = tuple(
            replace(o, time_s=o.time_s - (1 - REST_WEIGHT) * rest)
            for o, rest in zip(variable.options, rests, strict=True)
        )
        variables.append(replace(variable, options=options))
    flows: list[Flow] = []
    for flow, count in zip(problem.flows, counts, strict=True):
        is_once = any(r.when in (Pass.STEP, Pass.PROLOGUE) for r in flow.readers)
        is_inside = all(inside[r.variable] > 0 for r in flow.readers) and not is_once
        if is_inside and count >= max(1, repeats - 1):
            is_between = repeats > 0 and count % repeats == repeats - 1
            flows.append(replace(flow, count=count + is_between))
            continue
        most_s = max((move.time_s for move in flow.moves.values()), default=0.0)
        rest_s += flow.count * most_s * sum(problem.weight(r.when) for r in flow.readers)
        moves = {
            pair: Move(REST_WEIGHT * move.time_s, move.is_shared)
            for pair, move in flow.moves.items()
        }
        flows.append(replace(flow, moves=moves))
    return replace(problem, variables=tuple(variables), flows=tuple(flows)), rest_s
