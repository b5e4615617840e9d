"""Prices of shapes: bounds, splits, stages. What the search loops over.

The bound of a shape is a lower bound on its simulated step, sharper with more effort:

0. every operator at its cheapest on the whole batch (cutting it never makes the work of a step
   smaller), once-per-step work left out;
1. the same with once-per-step work and memory, over all cuts and all recomputing
   (:mod:`autopar.solver.pipeline_bound`);
2. the same with operators on its own micro-batches;
3. the same with what its mixed-integer program adds: no choice of splits has less work;
4. the same with how long ranks wait for each other in its orders
   (:mod:`autopar.solver.order_bound`), as sharp as is asked for; with each level from here on more
   of its paths.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.plan.types import ScheduleKind
from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import BlockTable, BlockTables
from autopar.solver.bodies import Bodies, Body, of_step
from autopar.solver.candidates import Shape
from autopar.solver.chain_sums import Chain
from autopar.solver.cuts import better_stages
from autopar.solver.lanes import Lanes
from autopar.solver.master import LEFT_OUT
from autopar.solver.order_bound import TO_BEGIN, Begun, OrderBound
from autopar.solver.own_splits import OwnSplits, are_alike
from autopar.solver.parameter_costs import ParameterCost, parameter_costs
from autopar.solver.pipeline_bound import NO_FLOOR, Floor, PipelineBound
from autopar.solver.ranked import Misfit, Ranked, in_order, part_of, with_costs
from autopar.solver.repair import repaired
from autopar.solver.schedule_choice import (
    best_order,
    is_open_order,
    may_split_backward,
    plain_order,
)
from autopar.solver.shape_problems import ShapeProblems
from autopar.solver.splits import solve_splits
from autopar.solver.splits_build import with_parameters
from autopar.solver.splits_problem import SplitsProblem, SplitsSolution
from autopar.solver.stages_problem import (
    BlockMenu,
    StageProblem,
    StageSolution,
    least_memory_bytes,
)
from autopar.solver.state_forms import alike, useful
from autopar.solver.work import Work

Sizes = tuple[int, int, int]
EARLY_EFFORTS = 4
EFFORTS = EARLY_EFFORTS + 256
WORK = 1 << 15  # of adding paths, for each effort beyond the early ones
NEAR = LEFT_OUT  # plans that are slower than a known one by more are not worked out
MOST_GROWN = 2.0  # times the samples of known menus that others may be guessed from
LEAN = 1.02  # states within this of the least are as lean as can be


@dataclass(slots=True)
class Ranker:
    """Prices shapes and keeps what shapes share.

    Attributes:
        analysis: Model and cluster.
        limit_bytes: Memory of a device.
        num_stage_solves: Cut problems solved so far.
        bodies: Work of micro-batches.
        tables: Menus of blocks.
        lanes: Threads beside the search.
        own: Splits of single meshes.
        problems: Cut problems.
    """

    analysis: Analysis
    limit_bytes: int
    num_stage_solves: int = 0
    bodies: Bodies = field(init=False)
    tables: BlockTables = field(init=False)
    lanes: Lanes = field(init=False)
    own: OwnSplits = field(init=False)
    problems: ShapeProblems = field(init=False)
    _bounded: dict[tuple[Sizes, int, int], SplitsSolution | None] = field(default_factory=dict)
    _parameters: dict[object, SplitsProblem] = field(default_factory=dict)
    _known: dict[int, dict[float, BlockTable]] = field(default_factory=dict)
    _outlooks: dict[Shape, dict[int, float]] = field(default_factory=dict)
    _uncut: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    _least: dict[object, Chain] = field(default_factory=dict)
    _forms: dict[object, tuple[Chain, ...]] = field(default_factory=dict)
    _begun: dict[Shape, Begun] = field(default_factory=dict)
    _costs: dict[object, list[ParameterCost]] = field(default_factory=dict)
    _cut_bytes: dict[object, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        work = Work.of(self.analysis)
        self.bodies, self.tables, self.lanes = work.bodies, work.tables, work.lanes
        self.own = OwnSplits(self.analysis, self.bodies)
        self.problems = ShapeProblems(self.analysis)

    # -- bounds --------------------------------------------------------------------------------
    def bound_s(self, shape: Shape, effort: int, enough_s: float = math.inf) -> float:
        """A lower bound of the simulated step; infinite if the shape can't fit.

        Args:
            shape: The shape.
            effort: From 0 to ``EFFORTS - 1``.
            enough_s: A bound from here on need not be sharper.

        Raises:
            ShardingError: The batch can't be cut so.
            ConstraintError: A constraint leaves an operator without an option.
        """
        if effort == 0:
            return self._quick_s(shape)
        if effort == 1:
            body = self.bodies.body((1, self._fewest(shape.mesh.dp), shape.mesh.tp))
            share = body.sizes[1] / (shape.num_microbatches * shape.mesh.dp)
            found_s = self._least_s(shape, body, share)
            if found_s < enough_s:  # its program is most likely the next to be solved
                self.bodies.expect(self.bodies.body(shape.sizes), found_s)
            return found_s
        body = self.bodies.body(shape.sizes)
        if effort > 2:
            self.bodies.solved(body)
        if effort >= EARLY_EFFORTS:
            return self._waiting_s(shape, body, enough_s)
        found_s = self._least_s(shape, body, floor=body.floor if effort > 2 else NO_FLOOR)
        self.bodies.give_up(enough_s)
        return found_s

    def _least_s(
        self, shape: Shape, body: Body, share: float = 1.0, floor: Floor = NO_FLOOR
    ) -> float:
        return self._pipeline(shape, self._free_levels(shape, body, share), floor).least_s()

    def _waiting_s(self, shape: Shape, body: Body, enough_s: float) -> float:
        """With what ranks wait for each other in the orders of a shape."""
        if shape.mesh.pp == 1:
            return 0.0
        if shape not in self._begun:
            orders = self._orders(shape, self._free_levels(shape, body))
            self._begun[shape] = replace(orders, floor=body.floor, knows_halves=False).begun()
        return self._begun[shape].more_s(WORK, enough_s)

    def spent(self, shape: Shape) -> float:
        """Work on a shape's bound beyond the early efforts: of beginning one, as a unit."""
        begun = self._begun.get(shape)
        return 0.0 if begun is None else begun.spent / TO_BEGIN

    def _quick_s(self, shape: Shape) -> float:
        mesh, count = shape.mesh, shape.num_microbatches
        whole = self._fewest(mesh.dp) if self.analysis.experts else 1
        if (whole, mesh.tp) not in self._uncut:
            menus = self.bodies.body((1, whole, mesh.tp)).least
            times = [whole * menu.options[0].total_s for menu in menus]
            self._uncut[whole, mesh.tp] = (sum(times), max(times))
        total, largest = (time_s / (count * mesh.dp) for time_s in self._uncut[whole, mesh.tp])
        splits = may_split_backward(shape.schedule, mesh, self.analysis.constraints)
        if mesh.virtual > 1 or splits:
            return max(count * total / mesh.pp, 0.0 if splits else total, count * largest)
        return total / (1.0 - (1.0 - 1.0 / count) ** mesh.pp)

    def _relaxed(self, shape: Shape, level: int, body: Body, share: float = 1.0) -> StageProblem:
        """The cut problem of a shape with the least that any splits can give.

        Args:
            shape: The shape.
            level: ZeRO level.
            body: Its body, or one with more samples.
            share: Of the samples of the body that a micro-batch has.
        """
        menus = self._least_menus(shape, level, body, share)
        return self._relaxed_problem(shape, menus, body, share)

    def _free_levels(self, shape: Shape, body: Body, share: float = 1.0) -> StageProblem:
        """The same with the choice of a ZeRO level for every stage."""
        levels = self.analysis.zero_levels(shape.mesh.dp)
        reduces = shape.num_microbatches if max(levels) >= 2 else 1
        key = (body.sizes, shape.mesh.dp, levels, reduces, share)
        if key not in self._forms:
            rows = [self._least_menus(shape, level, body, share) for level in levels]
            self._forms[key] = alike(useful(rows))
        menus = self._forms[key]
        problem = self._relaxed_problem(shape, menus[0], body, share)
        return problem if len(menus) == 1 else replace(problem, forms=menus)

    def _least_menus(self, shape: Shape, level: int, body: Body, share: float) -> Chain:
        """The least that blocks can cost at a level, kept for other shapes."""
        reduces = shape.num_microbatches if level >= 2 else 1
        key = (body.sizes, shape.mesh.dp, level, reduces, share)
        if key not in self._least:
            costs = self._least_costs(shape, level, body)
            menus = body.least if share == 1 else part_of(body.least, share)
            self._least[key] = with_costs(menus, costs, reduces, reduces)
        return self._least[key]

    def _relaxed_problem(
        self, shape: Shape, menus: Chain, body: Body, share: float
    ) -> StageProblem:
        boundary_bytes = body.boundary_bytes
        if share != 1:
            cut = (body.sizes, share)
            if cut not in self._cut_bytes:
                self._cut_bytes[cut] = tuple(
                    (int(share * a), int(share * b)) for a, b in boundary_bytes
                )
            boundary_bytes = self._cut_bytes[cut]
        return self.problems.problem(shape, menus, boundary_bytes, self.limit_bytes)

    def _fewest(self, dp: int) -> int:
        """The fewest data ranks that split the batch as ``dp`` does."""
        if dp == 1 or self.analysis.experts:
            return dp  # experts are split over just so many ranks
        batch = self.analysis.batch_size
        fewest = next(n for n in range(2, dp + 1) if batch % n == 0)
        same = self.analysis.data(1, fewest).dp is self.analysis.data(1, dp).dp
        return fewest if same else dp

    def _least_costs(self, shape: Shape, level: int, body: Body) -> list[ParameterCost]:
        """The least that parameters cost, with gradients that are reduced once."""
        count = 1 if body.sizes[0] == 1 else shape.num_microbatches
        sizes = (count, *shape.sizes[1:])
        key = self._parameters_key(sizes, level, body)
        if key not in self._costs:
            problem = replace(self.parameters(sizes, level, body), num_reduces=1)
            owners = self.tables.owners(body.structure)
            self._costs[key] = parameter_costs(problem, None, owners)
        return self._costs[key]

    def outlook_s(self, shape: Shape, best_s: float, levels: Sequence[int] = ()) -> float:
        """Seconds of the plan that a shape is likely to have; infinite if none seems to fit.

        Greedy cuts of relaxed menus, whose work is that of the best splits. It is no bound: other
        cuts may be better, and what the splits choose may be worse.

        Args:
            shape: The shape.
            best_s: Seconds of a plan that is known; beyond it an outlook is less certain.
            levels: ZeRO levels that are looked at; all that there are if left out.
        """
        body = self.bodies.body(shape.sizes)
        menus, more = self._likely_menus(shape, body)
        found: dict[int, tuple[float, StageProblem, StageSolution]] = {}
        leaner_s = math.inf  # bound of a level that holds less than 0
        for level in levels or self.analysis.zero_levels(shape.mesh.dp):
            relaxed = self._relaxed(shape, level, body)
            pipeline = self._pipeline(shape, relaxed, body.floor)
            if not pipeline.may_beat(NEAR * best_s):
                continue
            if shape.mesh.virtual > 1 and level < 2:  # both reduce once: 0 had better be faster
                if level == 0 and leaner_s < pipeline.least_s():
                    continue
                leaner_s = pipeline.least_s()
            costs = self._least_costs(shape, level, body)
            reduces = shape.num_microbatches if level >= 2 else 1
            problem = replace(relaxed, blocks=with_costs(menus, costs, reduces, reduces))
            stages = self.problems.first_stages(problem)
            if stages is None:
                continue
            found[level] = more * stages.objective_s, problem, stages
            if all(option == 0 for option in stages.options):
                break  # memory does not bind: leaner levels only cost time
        self._outlooks[shape] = {level: row[0] for level, row in found.items()}
        if not found:
            return math.inf
        likely_s, problem, stages = min(found.values(), key=lambda row: row[0])
        if likely_s <= best_s:
            order = best_order(
                shape.schedule, shape.warmup, shape.mesh, problem, stages, self.analysis.constraints
            )
            likely_s = more * order.time_s
        return likely_s

    def _likely_menus(self, shape: Shape, body: Body) -> tuple[Sequence[BlockMenu], float]:
        """Menus of a body as they are likely to be, and what their seconds are to be times.

        Those of the nearest number of samples whose splits are known; relaxed ones with the work
        of the body's own splits if there are none. Work on few samples is dearer for each than
        that on many, so that menus are not taken for much larger ones.
        """
        samples = 1 / (shape.num_microbatches * shape.mesh.dp)
        known = self._known.get(shape.mesh.tp, {})
        known = {own: table for own, table in known.items() if samples <= MOST_GROWN * own}
        if known:
            nearest = min(known, key=lambda other: (abs(math.log(samples / other)), other))
            return part_of(known[nearest].menus, samples / nearest), 1.0
        self.bodies.solved(body)
        least_s = sum(min(o.total_s for o in menu.options) for menu in body.least)
        return body.least, max(1.0, body.floor.total_s / least_s) if least_s > 0 else 1.0

    def _hopeful(self, shape: Shape, best_s: float) -> tuple[int, ...]:
        """ZeRO levels that are worth working out beside a plan that is known."""
        levels = self.analysis.zero_levels(shape.mesh.dp)
        outlooks = self._outlooks.get(shape)
        if outlooks is None or math.isinf(best_s):
            return levels
        near_s = NEAR * max(best_s, min(outlooks.values(), default=math.inf))
        return tuple(level for level in levels if outlooks.get(level, math.inf) <= near_s)

    def least_bytes(self, shape: Shape) -> int:
        """Bytes that the fullest device needs, at least."""
        body = self.bodies.body(shape.sizes)
        levels = self.analysis.zero_levels(shape.mesh.dp)
        return min(least_memory_bytes(self._relaxed(shape, level, body)) for level in levels)

    def model_bound_s(self, ranked: Ranked, enough_s: float = math.inf) -> float:
        """A lower bound of the estimate of a shape under its splits, as sharp as ``enough_s``."""
        shape, problem = ranked.shape, ranked.stage_problem
        if is_open_order(shape.schedule, shape.mesh, self.analysis.constraints):
            shape = replace(shape, schedule=ScheduleKind.ONE_F_ONE_B, warmup=None)
            alive, together = self.problems.alive(shape)  # what the leanest of its orders holds
            kind = shape.schedule
            problem = replace(problem, schedule=kind, in_flight=alive, together=together)
        return self._orders(shape, problem).least_s(enough_s)

    def _orders(self, shape: Shape, problem: StageProblem) -> OrderBound:
        """The bound over the orders of a shape."""
        wish = self.analysis.constraints
        return OrderBound(
            problem=problem,
            is_open=is_open_order(shape.schedule, shape.mesh, wish),
            may_split=may_split_backward(shape.schedule, shape.mesh, wish),
            warmup=shape.warmup,
        )

    def _pipeline(
        self, shape: Shape, problem: StageProblem, floor: Floor = NO_FLOOR
    ) -> PipelineBound:
        """The bound over all cuts and orders of a shape that needs no paths."""
        return replace(self._orders(shape, problem), floor=floor).quick()

    # -- choices -------------------------------------------------------------------------------
    def parameters(self, sizes: Sizes, level: int, body: Body) -> SplitsProblem:
        """The problem of a body with the parameters of a mesh and a ZeRO level."""
        key = self._parameters_key(sizes, level, body)
        if key not in self._parameters:
            request = self.analysis.request(sizes, level)
            made = with_parameters(body.problem, request, self.analysis.prices(sizes))
            self._parameters[key] = made
        count = sizes[0]
        return replace(
            self._parameters[key],
            num_microbatches=count,
            num_reduces=count if level >= 2 else 1,
        )

    def _parameters_key(self, sizes: Sizes, level: int, body: Body) -> object:
        """What parameters' costs depend on: not on how many micro-batches there are."""
        return (sizes[0] > 1, *sizes[1:], level, id(body.structure))

    def rank(
        self,
        shape: Shape,
        *,
        limit_bytes: int = 0,
        best_s: float = math.inf,
        levels: Sequence[int] = (),
    ) -> Ranked | Misfit | None:
        """A good choice for a shape: splits of its body, greedy cuts.

        Args:
            shape: The shape.
            limit_bytes: Memory of a device, if it is to be another than the real one.
            levels: ZeRO levels to try, with the splits that are known; all that are hopeful, and
                leaner splits where nothing fits, if left out.
            best_s: Seconds of a plan that is known: slower levels need no better splits.

        Returns:
            None if no cuts under these splits come near to the plan that is known.
        """
        limit = limit_bytes or self.limit_bytes
        body = self.bodies.body(shape.sizes)
        chosen = self.bodies.solved(body)
        best: Ranked | None = None
        found: Ranked | Misfit | None
        misfits: list[Misfit] = []
        is_roomy = False
        for level in levels or self._hopeful(shape, best_s):
            if is_roomy and level >= 2:
                break  # memory does not bind: leaner levels only cost time
            parameters = self.parameters(shape.sizes, level, body)
            # the body has no ZeRO: gradients may not reach the shards that this level stores
            options = repaired(parameters, chosen.options)
            if options is None:
                found = self._cut_own(shape, level, limit, exact=math.isinf(best_s))
            else:
                known_s = min(best_s, best.estimate_s) if best is not None else best_s
                own = chosen if options == chosen.options else replace(chosen, options=options)
                found = self._with_splits(shape, level, limit, body, own, parameters, known_s)
            if found is None:
                continue
            if isinstance(found, Misfit):
                misfits.append(found)
                continue
            if best is None or found.estimate_s < best.estimate_s:
                best = found
            is_roomy |= set(found.recompute_words) == {"none"}
        if best is not None:
            return best
        for misfit in misfits if not levels else ():
            known_s = min(best_s, best.estimate_s) if best is not None else best_s
            found = self._leaner(misfit, body, limit, known_s)
            if isinstance(found, Ranked) and (best is None or found.estimate_s < best.estimate_s):
                best = found
        return best or min(misfits, key=lambda m: m.least_bytes, default=None)

    def _leaner(
        self, misfit: Misfit, body: Body, limit_bytes: int, best_s: float
    ) -> Ranked | Misfit:
        """Splits under a bound of the states: what the fastest ones take is too much."""
        shape, level = misfit.shape, misfit.zero_level
        if shape.mesh.tp == 1 or not self.analysis.graph.inputs:
            return misfit
        relaxed = replace(self._relaxed(shape, level, body), limit_bytes=limit_bytes)
        states, least = (
            sum(b.state_bytes for b in problem.blocks) for problem in (misfit.problem, relaxed)
        )
        pairs = zip(misfit.problem.blocks, relaxed.blocks, strict=True)
        most = max(b.state_bytes - r.state_bytes for b, r in pairs)  # an embedding's may count
        if states <= LEAN * least and most <= (LEAN - 1) * limit_bytes:
            return misfit  # no splits have smaller states
        if not math.isinf(best_s) and not self._may_fit(misfit, relaxed.blocks):
            return misfit
        bound = self._pipeline(shape, relaxed, body.floor)
        if not (bound.least_s() < math.inf if math.isinf(best_s) else bound.may_beat(best_s)):
            return misfit
        key = (shape.sizes, level, shape.mesh.pp)
        if key not in self._bounded:
            self._bounded[key] = None
            # half of the memory is left to what blocks save; stages share the rest evenly
            room = limit_bytes // 2 * shape.mesh.pp
            share = shape.num_microbatches / body.problem.num_microbatches
            problem = of_step(self.parameters(shape.sizes, level, body), share)
            problem = replace(problem, limit_bytes=room)
            try:
                self.own.num_solves += 1
                self._bounded[key] = solve_splits(problem)
            except InfeasibleError:
                pass
        chosen = self._bounded[key]
        if chosen is None:
            return misfit
        parameters = self.parameters(shape.sizes, level, body)
        found = self._with_splits(shape, level, limit_bytes, body, chosen, parameters, best_s)
        return misfit if found is None else found

    def _may_fit(self, misfit: Misfit, relaxed: Sequence[BlockMenu]) -> bool:
        """Whether a misfit would fit with states as lean as can be, and all else as it is."""
        pairs = zip(misfit.problem.blocks, relaxed, strict=True)
        blocks = [replace(b, key=f"{b.key} {r.key}", state_bytes=r.state_bytes) for b, r in pairs]
        lean = replace(misfit.problem, blocks=Chain(blocks))
        return self.problems.first_stages(lean) is not None

    def _with_splits(
        self,
        shape: Shape,
        level: int,
        limit_bytes: int,
        body: Body,
        chosen: SplitsSolution,
        parameters: SplitsProblem,
        best_s: float,
    ) -> Ranked | Misfit | None:
        """A shape with given splits of its body, None if it can't come near what is known.

        Menus are made only where least work and the splits' own parameters leave hope.
        """
        if not math.isinf(best_s):
            owners = self.tables.owners(body.structure)
            costs = parameter_costs(parameters, chosen.options, owners)
            menus = with_costs(body.least, costs, 1, parameters.num_reduces)
            least = self.problems.problem(shape, menus, body.boundary_bytes, limit_bytes)
            bound = self._pipeline(shape, least, body.floor)
            if not bound.may_beat(NEAR * best_s):
                fits = bound.may_beat(sys.float_info.max)
                return None if fits else Misfit(shape, level, least)
        found: Ranked | Misfit | None = None
        for exact in (False, True):
            table = self.tables.table(
                body.sizes, body.problem, chosen.options, parameters, exact=exact
            )
            found = self._cut(shape, level, limit_bytes, table, parameters, chosen, best_s=best_s)
            # while nothing is known to fit, menus that were taken over must not be the reason
            if table.is_exact or not (isinstance(found, Misfit) and math.isinf(best_s)):
                break
        return found

    def polish(self, ranked: Ranked) -> Ranked:
        """The same shape and level with the best splits for just this mesh, if they are better."""
        limit = ranked.stage_problem.limit_bytes
        better = self._cut_own(ranked.shape, ranked.zero_level, limit, exact=True)
        return better if isinstance(better, Ranked) else ranked

    def sharpened(self, ranked: Ranked) -> Ranked:
        """The same shape, level and splits with menus of least seconds for their bytes."""
        table, limit = ranked.table, ranked.stage_problem.limit_bytes
        if table.is_exact:
            return ranked
        options = ranked.splits.options
        exact = self.tables.table(table.sizes, table.problem, options, ranked.problem)
        shape, level = ranked.shape, ranked.zero_level
        found = self._cut(shape, level, limit, exact, ranked.problem, ranked.splits)
        is_better = isinstance(found, Ranked) and found.estimate_s < ranked.estimate_s
        return found if isinstance(found, Ranked) and is_better else ranked

    def _cut_own(
        self, shape: Shape, level: int, limit_bytes: int, *, exact: bool = False
    ) -> Ranked | Misfit | None:
        """A shape with the best splits for just its mesh and level."""
        body, problem = self.bodies.body(shape.sizes), self.analysis.problem(shape.sizes, level)
        is_alike = are_alike(problem, self.parameters(shape.sizes, level, body))
        chosen = self.own.solved((shape.sizes, level), body, is_alike=is_alike)
        # what the body's meshes share is not made for each of them
        sizes, work = (body.sizes, body.problem) if is_alike else (shape.sizes, problem)
        table = self.tables.table(sizes, work, chosen.options, problem, exact=exact)
        return self._cut(shape, level, limit_bytes, table, problem, chosen)

    def refine(self, ranked: Ranked, limit_bytes: int, *, anew: bool = False) -> Ranked | Misfit:
        """The same shape, level and splits with better cuts under a limit.

        Args:
            ranked: From :meth:`rank`.
            limit_bytes: Memory of a device; it may be tighter than the real one.
            anew: Whether blocks are moved from other cuts too, not only from the known ones.
        """
        problem = replace(ranked.stage_problem, limit_bytes=limit_bytes)
        self.num_stage_solves += 1
        others = self.problems.likely_cuts(problem) if anew else ()
        stages = better_stages(problem, ranked.stages.starts, *others)
        if stages is None:
            return Misfit(ranked.shape, ranked.zero_level, problem)
        return self.estimated(replace(ranked, stage_problem=problem, stages=stages))

    def _cut(
        self,
        shape: Shape,
        level: int,
        limit_bytes: int,
        table: BlockTable,
        problem: SplitsProblem,
        chosen: SplitsSolution,
        *,
        best_s: float = math.inf,
    ) -> Ranked | Misfit | None:
        stage_problem = self.problems.problem(shape, table.menus, table.boundary_bytes, limit_bytes)
        if not math.isinf(best_s):
            bound = self._pipeline(shape, stage_problem)
            if not bound.may_beat(NEAR * best_s):
                fits = bound.may_beat(sys.float_info.max)
                return None if fits else Misfit(shape, level, stage_problem)
        samples = 1 / (shape.num_microbatches * shape.mesh.dp)
        self._known.setdefault(shape.mesh.tp, {}).setdefault(samples, table)
        stages = self.problems.first_stages(stage_problem)
        if stages is None:
            return Misfit(shape, level, stage_problem)
        ranked = Ranked(
            shape=shape,
            zero_level=level,
            splits=chosen,
            problem=problem,
            table=table,
            stage_problem=stage_problem,
            stages=stages,
            estimate_s=stages.objective_s,
        )
        return self.estimated(ranked, best_s)

    def estimated(self, ranked: Ranked, best_s: float = math.inf) -> Ranked:
        """In its best order, with its simulated time: surrogates flatter uneven stages."""
        shape = ranked.shape
        found = best_order(
            shape.schedule, shape.warmup, shape.mesh, ranked.stage_problem, ranked.stages,
            self.analysis.constraints, is_promising=lambda: self._may_beat(ranked, best_s),
        )  # fmt: skip
        return in_order(ranked, found)

    def _may_beat(self, ranked: Ranked, best_s: float) -> bool:
        """Whether another order of a shape can be better than a plan that is known."""
        return math.isinf(best_s) or self._pipeline(ranked.shape, ranked.stage_problem).may_beat(
            best_s
        )

    def in_plain_order(self, ranked: Ranked) -> Ranked | None:
        """The same cuts as plain 1F1B, which holds less; None if they are, or must not be."""
        shape = ranked.shape
        if not is_open_order(shape.schedule, shape.mesh, self.analysis.constraints):
            return None
        found = plain_order(shape.mesh, ranked.stage_problem, ranked.stages)
        plain = in_order(ranked, found)
        return None if plain.shape == shape else plain
