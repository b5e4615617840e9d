"""Prices of shapes: bounds, splits, stages. What the search loops over.

The bound of a shape is a lower bound on its simulated step. Let ``a`` be the least seconds per
micro-batch (forward and backward of the whole model on one rank's share), ``o`` the least seconds
once per step, ``p`` the pipeline ranks, ``M`` the micro-batches:

* one stage per rank: rank d works ``M t_d`` and idles at least ``sum_{s<d} t_s`` while the pipeline
  fills and drains. The least over all cuts of the largest such sum is found block by block; with
  work that divides freely it is ``a / (1 - (1 - 1/M)^p)``. Either way ``o / p`` comes on top;
* several stages per rank: ``max((M a + o) / p, a, M times the largest block)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import InfeasibleError
from autopar.plan.schedule import action_lists, compute_order, in_flight
from autopar.plan.types import ScheduleKind
from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import BlockTable, BlockTables
from autopar.solver.candidates import Shape
from autopar.solver.greedy_stages import first_choice, needed_bytes
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import Pass, SplitsProblem, SplitsSolution
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import (
    StageProblem,
    StageSolution,
    bounds,
    least_memory_bytes,
    memory_bytes,
    surrogate_s,
)
from cost_models.base import slowest_group
from cost_models.simulate import StageSeconds, simulate

Sizes = tuple[int, int, int]
BISECTIONS = 30
REOPEN_WORK_LIMIT = 0.5  # deterministic seconds: with its cuts given a problem is small


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A shape with splits, cuts and recompute chosen.

    Attributes:
        shape: Mesh, micro-batches, schedule.
        zero_level: Of all parameters.
        splits: The splits.
        problem: The problem that they solve.
        table: Menus under them.
        stage_problem: The problem of the cuts.
        stages: The cuts and options.
        estimate_s: Simulated seconds of a step, from the menus' figures.
    """

    shape: Shape
    zero_level: int
    splits: SplitsSolution
    problem: SplitsProblem
    table: BlockTable
    stage_problem: StageProblem
    stages: StageSolution
    estimate_s: float

    @property
    def surrogate_s(self) -> float:
        """Seconds of a step by the surrogate."""
        return self.stages.objective_s

    @property
    def recompute_words(self) -> tuple[str, ...]:
        """Chosen option of every block."""
        menus = zip(self.stage_problem.blocks, self.stages.options, strict=True)
        return tuple(menu.options[at].name for menu, at in menus)


@dataclass(frozen=True, slots=True)
class Misfit:
    """A shape that no cut and no recomputing makes fit.

    Attributes:
        shape: The shape.
        zero_level: The leanest level that was tried.
        problem: Its cut problem.
    """

    shape: Shape
    zero_level: int
    problem: StageProblem

    @property
    def least_bytes(self) -> int:
        """A lower bound of what its fullest device needs."""
        return least_memory_bytes(self.problem)

    def needed_bytes(self) -> int:
        """What its fullest device needs in the leanest choice that the greedy finds."""
        return needed_bytes(self.problem)


@dataclass(frozen=True, slots=True)
class Least:
    """The least work of a mesh.

    Attributes:
        block_s: Seconds per micro-batch of every block.
        once_s: Seconds per step of the parameters.
    """

    block_s: tuple[float, ...]
    once_s: float


@dataclass(slots=True)
class Ranker:
    """Prices shapes and keeps what shapes share.

    Attributes:
        analysis: Model and cluster.
        limit_bytes: Memory of a device.
        num_split_solves: Mixed-integer programs solved so far.
        num_stage_solves: Cut problems solved so far.
        num_columns: Columns of the largest mixed-integer program.
        tables: Menus of blocks.
    """

    analysis: Analysis
    limit_bytes: int
    num_split_solves: int = 0
    num_stage_solves: int = 0
    num_columns: int = 0
    tables: BlockTables = field(init=False)
    _splits: dict[tuple[int, int, int, int], SplitsSolution] = field(default_factory=dict)
    _bounded: dict[tuple[Sizes, int, int], tuple[SplitsProblem, SplitsSolution] | None] = field(
        default_factory=dict
    )
    _least: dict[Sizes, Least] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tables = BlockTables(self.analysis)

    # -- bounds --------------------------------------------------------------------------------
    def bound_s(self, shape: Shape) -> float:
        """A lower bound of the simulated step; sharper once the splits have been solved."""
        return self.bound_from(shape, shape)

    def bound_from(self, shape: Shape, other: Shape) -> float:
        """A lower bound from the work of another shape with no more micro-batches.

        Cutting the batch further never makes the work of a step smaller.
        """
        least = self._least_seconds(other.sizes)
        p, count = shape.mesh.pp, shape.num_microbatches
        share = other.num_microbatches / count
        blocks = [time_s * share for time_s in least.block_s]
        total = sum(blocks)
        key = (*shape.sizes, self.split_level(shape))
        if key in self._splits and total > 0:
            # once-per-step work depends on the ZeRO level: its most is taken off the splits' bound
            rest_s = (self._splits[key].bound_s - self._most_once(key)) / count
            total = max(total, rest_s)
        if shape.mesh.virtual > 1:
            busy_s = max((count * total + least.once_s) / p, total)
            return max(busy_s, count * max(blocks))
        fill_s = total / (1.0 - (1.0 - 1.0 / count) ** p)
        return max(fill_s, _best_cut_s(blocks, p, count)) + least.once_s / p

    def _most_once(self, key: tuple[int, int, int, int]) -> float:
        """The most that parameters can cost once per step."""
        problem = self.analysis.problem(key[:3], key[3])
        total_s = sum(
            len(v.members) * max(o.time_s for o in v.options)
            for v in problem.variables
            if v.is_once
        )
        for flow in problem.flows:
            if any(reader.when is Pass.STEP for reader in flow.readers):
                total_s += flow.count * max((m.time_s for m in flow.moves.values()), default=0.0)
        return total_s

    def _least_seconds(self, sizes: Sizes) -> Least:
        """Every operator at its cheapest, reshards free."""
        if sizes not in self._least:
            problem = self.analysis.problem(sizes, 1 if sizes[1] > 1 else 0)
            block_of = self.analysis.chain.block_of
            block_s = [0.0] * len(self.analysis.chain.blocks)
            once_s = 0.0
            for variable in problem.variables:
                least = min(o.time_s for o in variable.options)
                if variable.is_once:
                    once_s += len(variable.members) * least
                    continue
                for name in variable.members if least else ():
                    block_s[block_of.get(name, 0)] += least / sizes[0]
            self._least[sizes] = Least(tuple(block_s), once_s)
        return self._least[sizes]

    # -- choices -------------------------------------------------------------------------------
    def split_level(self, shape: Shape) -> int:
        """ZeRO level under which the splits of a shape are chosen."""
        if self.analysis.constraints.zero is not None:
            return self.analysis.constraints.zero
        return 1 if shape.mesh.dp > 1 and self.analysis.trains else 0

    def splits(self, sizes: Sizes, level: int) -> SplitsSolution:
        """The splits of one mesh, found once."""
        key = (*sizes, level)
        if key not in self._splits:
            self.num_split_solves += 1
            found = solve_splits(self.analysis.problem(sizes, level))
            self.num_columns = max(self.num_columns, found.num_columns)
            self._splits[key] = found
        return self._splits[key]

    def refine(self, ranked: Ranked, limit_bytes: int) -> Ranked | Misfit:
        """The same shape, level and splits with cuts by CP-SAT under a limit.

        Args:
            ranked: From :meth:`rank`.
            limit_bytes: Memory of a device; it may be tighter than the real one.
        """
        problem = replace(ranked.stage_problem, limit_bytes=limit_bytes)
        self.num_stage_solves += 1
        stages = solve_stages(problem)
        if stages is None:
            return Misfit(ranked.shape, ranked.zero_level, problem)
        return self._estimated(replace(ranked, stage_problem=problem, stages=stages))

    def reopened(self, ranked: Ranked, limit_bytes: int) -> Ranked | Misfit:
        """The same cuts with options chosen anew under another limit, from the ones it has."""
        old, stages = ranked.stage_problem, ranked.stages
        problem = replace(old, limit_bytes=limit_bytes, fixed_starts=stages.starts)
        self.num_stage_solves += 1
        found = solve_stages(
            problem, work_limit=REOPEN_WORK_LIMIT, start=(stages.starts, stages.options)
        )
        problem = replace(problem, fixed_starts=old.fixed_starts)
        if found is None:
            return Misfit(ranked.shape, ranked.zero_level, problem)
        return self._estimated(replace(ranked, stage_problem=problem, stages=found))

    def rank(self, shape: Shape, *, limit_bytes: int = 0) -> Ranked | Misfit:
        """A good choice for a shape: cuts are greedy.

        Args:
            shape: The shape.
            limit_bytes: Memory of a device, if it is to be tighter than the real one.
        """
        limit = limit_bytes or self.limit_bytes
        best: Ranked | None = None
        least: Misfit | None = None
        for level in self._levels(shape):
            found = self._at_level(shape, level, limit)
            if isinstance(found, Misfit):
                if least is None or found.least_bytes < least.least_bytes:
                    least = found
                continue
            if best is None or found.estimate_s < best.estimate_s:
                best = found
            if set(found.recompute_words) == {"none"}:
                break  # memory does not bind: leaner levels only cost time
        if best is not None:
            return best
        assert least is not None
        return least

    def _levels(self, shape: Shape) -> tuple[int, ...]:
        """ZeRO levels to try, fastest first."""
        if self.analysis.constraints.zero is not None:
            return (self.analysis.constraints.zero,)
        if not self.analysis.trains:  # there is only the parameters' own memory to spread
            return (0, 3) if shape.mesh.dp > 1 else (0,)
        return (1, 0, 2, 3) if shape.mesh.dp > 1 else (0,)

    def at_other_level(self, ranked: Ranked) -> Ranked | Misfit | None:
        """Level 0 beside level 1: which is faster depends on sizes; None if there is no choice."""
        if self.analysis.constraints.zero is not None or ranked.zero_level != 1:
            return None
        return self._at_level(ranked.shape, 0, ranked.stage_problem.limit_bytes)

    def _at_level(self, shape: Shape, level: int, limit_bytes: int) -> Ranked | Misfit:
        chosen = self.splits(shape.sizes, self.split_level(shape))
        problem = self.analysis.problem(shape.sizes, level)
        found = self._with_splits(shape, level, limit_bytes, problem, chosen)
        if not isinstance(found, Misfit) or len(self.analysis.graph.inputs) == 0:
            return found
        leaner = self._leaner_splits(shape, level, limit_bytes)
        if leaner is None:
            return found
        return self._with_splits(shape, level, limit_bytes, *leaner)

    def _leaner_splits(
        self, shape: Shape, level: int, limit_bytes: int
    ) -> tuple[SplitsProblem, SplitsSolution] | None:
        """Splits under a bound of the states: what the fastest ones take is too much."""
        if shape.mesh.tp == 1:
            return None
        key = (shape.sizes, level, shape.mesh.pp)
        if key not in self._bounded:
            self._bounded[key] = None
            # half of the memory is left to what blocks save; stages share the rest evenly
            bound = limit_bytes // 2 * shape.mesh.pp
            problem = self.analysis.bounded_problem(
                shape.sizes, level, in_flight=0.0, limit_bytes=bound
            )
            try:
                self.num_split_solves += 1
                self._bounded[key] = (problem, solve_splits(problem))
            except InfeasibleError:
                pass
        return self._bounded[key]

    def _with_splits(
        self,
        shape: Shape,
        level: int,
        limit_bytes: int,
        problem: SplitsProblem,
        chosen: SplitsSolution,
    ) -> Ranked | Misfit:
        table = self.tables.table(shape.sizes, level, problem, chosen.options)
        stage_problem = self.stage_problem(shape, table, limit_bytes)
        stages = self._stages(stage_problem)
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
        return self._estimated(ranked)

    def _estimated(self, ranked: Ranked) -> Ranked:
        """With the simulated time of its estimated stages: surrogates flatter uneven stages."""
        return replace(
            ranked, estimate_s=simulated_s(ranked.shape, ranked.stage_problem, ranked.stages)
        )

    # -- stages --------------------------------------------------------------------------------
    def stage_problem(self, shape: Shape, table: BlockTable, limit_bytes: int) -> StageProblem:
        """The cut problem of a shape under given splits."""
        mesh, count = shape.mesh, shape.num_microbatches
        order = compute_order(shape.schedule, mesh.pp, mesh.virtual, count)
        boundary_s = (0.0,) * len(table.boundary_bytes)
        if mesh.pp > 1:
            ends = slowest_group(self.analysis.cluster, mesh, "pp")
            model = self.analysis.model
            boundary_s = tuple(
                sum(model.collective_time_s("p2p", b, ends) for b in pair) / 2
                for pair in table.boundary_bytes
            )
        return StageProblem(
            blocks=table.menus,
            boundary_s=boundary_s,
            pp=mesh.pp,
            virtual=mesh.virtual,
            num_microbatches=count,
            schedule=shape.schedule,
            in_flight=tuple(in_flight(order, s) for s in range(mesh.num_stages)),
            limit_bytes=limit_bytes,
            fixed_starts=self.analysis.boundary_starts,
        )

    def _stages(self, problem: StageProblem) -> StageSolution | None:
        if problem.fixed_starts is not None:
            self.num_stage_solves += 1
            return solve_stages(problem)
        if len(problem.blocks) < problem.num_stages:
            return None
        found = first_choice(problem)
        if found is None:
            return None
        starts, options = found
        return StageSolution(
            starts=starts,
            options=options,
            objective_s=surrogate_s(problem, starts, options),
            bound_s=0.0,
            memory_bytes=memory_bytes(problem, starts, options),
            is_optimal=False,
        )


def simulated_s(shape: Shape, problem: StageProblem, solution: StageSolution) -> float:
    """Simulated seconds of a step from the menus' figures; once-per-step work is added last."""
    mesh = shape.mesh
    runs = bounds(solution.starts, len(problem.blocks))
    chosen = [b.options[o] for b, o in zip(problem.blocks, solution.options, strict=True)]
    seconds = [
        StageSeconds(
            forward_s=sum(o.forward_s for o in chosen[low:high]),
            backward_s=sum(o.backward_s for o in chosen[low:high]),
        )
        for low, high in runs
    ]
    step = [sum(b.step_s for b in problem.blocks[low:high]) for low, high in runs]
    order = compute_order(shape.schedule, mesh.pp, mesh.virtual, shape.num_microbatches)
    ahead = [(s - 1, s) for s in range(1, mesh.num_stages)]
    back = [(s, s - 1) for s in range(1, mesh.num_stages)]
    lists = action_lists(order, mesh, forward_edges=ahead, backward_edges=back)
    links = {}
    ways = 1 if shape.schedule is not ScheduleKind.FORWARD else 2  # a message is the mean of both
    for s, start in enumerate(solution.starts, 1):
        links[s - 1, s] = links[s, s - 1] = ways * problem.boundary_s[start - 1]
    run = simulate(lists, seconds, p2p_s=links)
    return run.makespan_s + max(sum(step[d :: mesh.pp]) for d in range(mesh.pp))


def _best_cut_s(blocks: Sequence[float], stages: int, count: int) -> float:
    """Least over all cuts of the largest ``M t_s + sum of t before s``, from below.

    A stage takes as many blocks as a limit allows: for a given limit that is the best it can do.
    """
    low, high = count * max(blocks, default=0.0), count * sum(blocks)
    if stages == 1:
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        done, used, at = 0.0, 0.0, 0
        for _ in range(stages):
            used = 0.0
            while at < len(blocks) and count * (used + blocks[at]) + done <= middle:
                used += blocks[at]
                at += 1
            done += used
        low, high = (low, middle) if at == len(blocks) else (middle, high)
    return low
