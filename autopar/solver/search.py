"""From a graph and a cluster to a plan: the search over all shapes.

Shapes are taken in the order of their lower bounds. Each gets splits (mixed-integer program), cuts
and recompute (greedy first), and a surrogate time; the search ends when the least bound left is no
better than the best surrogate. The best few are cut again by CP-SAT, then localized, priced program
by program and simulated: that decides. A plan whose exact memory exceeds the limit is cut again
under a tighter one, then dropped.

The bound of the plan is the least lower bound over *all* shapes, those never opened included.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic

from autopar.cluster import Cluster
from autopar.errors import ConstraintError, InfeasibleError, ShardingError, Shortfall
from autopar.ir.graph import Graph
from autopar.plan.types import Plan
from autopar.sharding.build import localize
from autopar.sharding.decisions import Choice, Decisions
from autopar.solver.analysis import Analysis
from autopar.solver.assemble import Field, Outcome, assemble_plan
from autopar.solver.candidates import Shape, shapes
from autopar.solver.constraints import Constraints, check_constraints
from autopar.solver.exact import Setting, exact_figures
from autopar.solver.loosen import loosened
from autopar.solver.ranking import Misfit, Ranked, Ranker
from autopar.solver.splits import tp_choices
from autopar.solver.stages_problem import bounds
from autopar.units import format_bytes, format_time, round_up_bytes
from cost_models.base import CostModel

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

MAX_RANKED = 96  # work limit: shapes that get splits and cuts
MIN_RANKED = 4  # so that there are runners-up, and an estimate that flatters is found out
NUM_FINAL = 6  # shapes that are cut by CP-SAT
NUM_EXACT = 3  # shapes that are localized and simulated
TIGHTEN_TRIES = 3
NUM_SHORTFALLS = 6  # shapes whose least memory is worked out when nothing fits
SLACK = 1e-9
ROOM_PERCENT = (100, 105, 115, 130, 160, 200)  # of the estimated need, tried as a limit


@dataclass(slots=True)
class SearchStats:
    """How the search went; not part of the plan.

    Attributes:
        seconds: Wall-clock seconds by phase.
        num_shapes: Shapes of the declared space.
        num_ranked: Shapes that got splits and cuts.
        num_split_solves: Mixed-integer programs.
        num_stage_solves: Cut problems.
        num_columns: Columns of the largest mixed-integer program.
        stopped_by: ``""``, ``"work"`` or ``"time"``.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    num_shapes: int = 0
    num_ranked: int = 0
    num_split_solves: int = 0
    num_stage_solves: int = 0
    num_columns: int = 0
    stopped_by: str = ""


def solve(  # noqa: PLR0913  the whole question in one call
    graph: Graph,
    model_hash: str,
    cluster: Cluster,
    *,
    constraints: Constraints,
    optimizer: str,
    memory_limit_bytes: int | None,
    cost_model: CostModel,
    progress: Progress | None = None,
    time_limit_s: float | None = None,
) -> tuple[Plan, SearchStats]:
    """The best plan for a graph on a cluster.

    Args:
        graph: The joint graph.
        model_hash: Its hash, for the plan.
        cluster: Where it runs.
        constraints: What the user has fixed.
        optimizer: Assumed optimizer.
        memory_limit_bytes: Bytes that a plan may use on a device; what the cluster has if None.
        cost_model: Prices.
        progress: Called with a line of text now and then.
        time_limit_s: Wall-clock guard; a search that it stops says so.

    Raises:
        ConstraintError: The constraints contradict the model, the cluster or each other.
        InfeasibleError: Nothing fits; the shortfalls name the limit, both numbers and the remedy.
    """
    return _Search(
        graph=graph,
        model_hash=model_hash,
        cluster=cluster,
        constraints=constraints,
        optimizer=optimizer,
        limit_bytes=memory_limit_bytes or cluster.memory_bytes,
        model=cost_model,
        progress=progress or _silent,
        time_limit_s=time_limit_s,
    ).run()


def _silent(_: str) -> None:
    """No progress is wanted."""


@dataclass(slots=True, kw_only=True)
class _Search:
    graph: Graph
    model_hash: str
    cluster: Cluster
    constraints: Constraints
    optimizer: str
    limit_bytes: int
    model: CostModel
    progress: Progress
    time_limit_s: float | None
    gives_remedy: bool = True
    stats: SearchStats = field(default_factory=SearchStats)
    ranked: list[Ranked] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    queue: list[tuple[float, int, bool, Shape]] = field(default_factory=list)
    opened_s: list[float] = field(default_factory=list)
    _begin_s: float = field(default_factory=monotonic)
    _mark_s: float = field(default_factory=monotonic)

    def run(self) -> tuple[Plan, SearchStats]:
        check_constraints(self.graph, self.constraints, self.cluster.num_devices)
        analysis = Analysis(self.graph, self.cluster, self.model, self.constraints, self.optimizer)
        self._phase("analysis")
        self.progress(f"{len(analysis.chain.blocks)} blocks, {len(analysis.chain.classes)} kinds")
        ranker = Ranker(analysis, self.limit_bytes)
        self._fill_queue(shapes(analysis), ranker)
        outcomes: list[Outcome] = []
        while not any(o.fits for o in outcomes):
            fresh = self._rank_more(ranker)
            self._phase("ranking")
            if not fresh:
                break
            outcomes += self._decide(analysis, ranker, fresh)
            self._phase("exact")
        self.stats.num_split_solves = ranker.num_split_solves
        self.stats.num_stage_solves = ranker.num_stage_solves
        self.stats.num_columns = ranker.num_columns
        fitting = [o for o in outcomes if o.fits]
        winner = min(fitting, key=lambda o: _rank_key(o.figures.step_s, o.ranked), default=None)
        if winner is None:
            if not self.gives_remedy:
                raise InfeasibleError("no plan fits")
            raise self._infeasible(outcomes)
        if not self._is_late():
            first, winner = (
                winner,
                loosened(
                    winner,
                    evaluate=lambda ranked: self._evaluate(analysis, ranked),
                    ranker=ranker,
                    limit_bytes=self.limit_bytes,
                ),
            )
            outcomes = [winner if o is first else o for o in outcomes]
            self._phase("exact")
        self.ranked.sort(key=_preference)
        field_ = Field(
            outcomes=outcomes,
            ranked=self.ranked,
            misfits=self.misfits,
            limit_bytes=self.limit_bytes,
            bound_s=self._bound_s(),
            stopped_by=self.stats.stopped_by,
        )
        plan = assemble_plan(analysis, winner, field_, model_hash=self.model_hash)
        logger.info("plan found: %s, step %s, bound %s", plan.mesh, plan.time_s, plan.bound_s)
        return plan, self.stats

    def _phase(self, name: str) -> None:
        now_s = monotonic()
        self.stats.seconds[name] = self.stats.seconds.get(name, 0.0) + now_s - self._mark_s
        self._mark_s = now_s

    def _is_late(self) -> bool:
        return self.time_limit_s is not None and monotonic() - self._begin_s > self.time_limit_s

    # -- ranking -------------------------------------------------------------------------------
    def _fill_queue(self, candidates: tuple[Shape, ...], ranker: Ranker) -> None:
        """Bounds of all shapes: from the fewest micro-batches of each mesh, which come first."""
        self.stats.num_shapes = len(candidates)
        first: dict[tuple[object, ...], Shape] = {}
        for index, shape in enumerate(candidates):
            base = first.setdefault((shape.mesh, shape.schedule), shape)
            bound_s = self._sharpened(shape, base, ranker)
            if bound_s is not None:
                heapq.heappush(self.queue, (bound_s, index, base is shape, shape))

    def _sharpened(self, shape: Shape, base: Shape, ranker: Ranker) -> float | None:
        """A bound of a shape, or None if the shape is not possible."""
        try:
            return ranker.bound_from(shape, base)
        except (ShardingError, ConstraintError) as error:
            self.errors.append(f"{shape}: {error}")
            return None

    def _rank_more(self, ranker: Ranker) -> list[Ranked]:
        """Rank shapes, best bound first, until none left can be better than the best of them."""
        fresh: list[Ranked] = []
        best_s = float("inf")
        num_seen = 0
        while self.queue:
            bound_s, index, is_sharp, shape = self.queue[0]
            if bound_s > best_s * (1 + SLACK) and num_seen >= MIN_RANKED:
                break
            if self.stats.num_ranked >= MAX_RANKED or (self.ranked and self._is_late()):
                self.stats.stopped_by = "time" if self._is_late() else "work"
                break
            heapq.heappop(self.queue)
            if not is_sharp:
                sharp_s = self._sharpened(shape, shape, ranker)
                if sharp_s is not None:
                    heapq.heappush(self.queue, (max(bound_s, sharp_s), index, True, shape))
                continue
            num_seen += 1
            found = self._rank(shape, ranker)
            if isinstance(found, Ranked):
                fresh.append(found)
                best_s = min(best_s, found.estimate_s)
                self.opened_s.append(max(bound_s, ranker.bound_s(shape)))
        return fresh

    def _bound_s(self) -> float:
        """The least bound of all shapes that may fit, those never opened included."""
        waiting = [entry[0] for entry in self.queue[:1]]
        return min([*self.opened_s, *waiting], default=0.0)

    def _rank(self, shape: Shape, ranker: Ranker) -> Ranked | Misfit | None:
        self.stats.num_ranked += 1
        try:
            found = ranker.rank(shape)
        except (ShardingError, ConstraintError, InfeasibleError) as error:
            self.errors.append(f"{shape}: {error}")
            return None
        if isinstance(found, Ranked):
            self.ranked.append(found)
            self.progress(f"{shape}: about {format_time(found.estimate_s)}")
        else:
            self.misfits.append(found)
            self.progress(f"{shape}: does not fit")
        return found

    # -- deciding ------------------------------------------------------------------------------
    def _decide(self, analysis: Analysis, ranker: Ranker, fresh: list[Ranked]) -> list[Outcome]:
        """Cut the best shapes by CP-SAT, then localize and simulate the best of them."""
        fresh.sort(key=_preference)
        finals: list[Ranked] = []
        for ranked in fresh[:NUM_FINAL]:
            other = ranker.at_other_level(ranked)
            best = min((r for r in (ranked, other) if isinstance(r, Ranked)), key=_preference)
            found = ranker.refine(best, self.limit_bytes)
            found = found if isinstance(found, Ranked) else best
            finals.append(min(best, found, key=_preference))
        finals.sort(key=_preference)
        waiting = finals + fresh[NUM_FINAL:]
        outcomes: list[Outcome] = []
        for ranked in waiting:
            fitting = sum(o.fits for o in outcomes)
            if fitting >= NUM_EXACT or (fitting and len(outcomes) >= 2 * NUM_EXACT):
                break
            if fitting and self._is_late():
                break
            outcomes.append(self._exact(analysis, ranker, ranked))
        return outcomes

    def _exact(self, analysis: Analysis, ranker: Ranker, ranked: Ranked) -> Outcome:
        """Exact figures; cut again under a tighter limit while memory is exceeded."""
        limit = self.limit_bytes
        outcome = self._evaluate(analysis, ranked)
        for _ in range(TIGHTEN_TRIES):
            if outcome.fits:
                break
            excess = max(
                real - estimate
                for real, estimate in zip(
                    outcome.figures.rank_bytes, outcome.ranked.stages.memory_bytes, strict=True
                )
            )
            limit = min(limit - max(0, excess), limit - (outcome.figures.peak_bytes - limit))
            if limit <= 0:
                break
            found = ranker.refine(outcome.ranked, limit)
            if isinstance(found, Misfit):
                found = ranker.rank(ranked.shape, limit_bytes=limit)
            if isinstance(found, Misfit):
                break
            outcome = self._evaluate(analysis, found)
        self.progress(
            f"{ranked.shape}: {format_time(outcome.figures.step_s)}, "
            f"{format_bytes(outcome.figures.peak_bytes)}"
        )
        return outcome

    def _evaluate(self, analysis: Analysis, ranked: Ranked) -> Outcome:
        decisions = decisions_for(analysis, ranked)
        programs = localize(analysis.graph, decisions, analysis.signatures)
        setting = Setting(
            cluster=analysis.cluster,
            model=analysis.model,
            mesh=ranked.shape.mesh,
            schedule=ranked.shape.schedule,
            num_microbatches=ranked.shape.num_microbatches,
            zero_levels=decisions.zero_levels,
            optimizer=analysis.optimizer,
            optimizer_s_per_byte=analysis.optimizer_s_per_byte,
        )
        figures = exact_figures(programs, setting)
        fits = figures.peak_bytes <= self.limit_bytes
        return Outcome(ranked=ranked, decisions=decisions, figures=figures, fits=fits)

    # -- nothing fits --------------------------------------------------------------------------
    def _infeasible(self, outcomes: list[Outcome]) -> InfeasibleError:
        """What is closest to fitting, and the cheapest way out."""
        rows = [(o.figures.peak_bytes, o.ranked.shape) for o in outcomes]
        nearest = sorted(self.misfits, key=lambda m: (m.least_bytes, str(m.shape)))
        rows += [(m.needed_bytes(), m.shape) for m in nearest[:NUM_SHORTFALLS]]
        rows = sorted(rows, key=lambda row: (row[0], str(row[1])))[:3]
        limit = format_bytes(self.limit_bytes)
        text = f"no plan fits {self.cluster} with {limit} per device"
        if not rows and self.errors:
            text = f"no plan is possible: {self.errors[0]}"
        remedy = self._remedy(*rows[0]) if rows else ""
        shortfalls = [
            Shortfall(
                what=f"memory of a device with {shape}",
                needed=needed,
                available=self.limit_bytes,
                unit="bytes",
                remedy=remedy,
            )
            for needed, shape in rows
        ]
        return InfeasibleError(text, tuple(shortfalls))

    def _remedy(self, needed: int, shape: Shape) -> str:
        wish = self.constraints
        if wish.recompute in ("none", "selective"):
            return f"allow recompute (now {wish.recompute!r})"
        if wish.zero in (0, 1, 2) and shape.mesh.dp > 1:
            return f"allow zero=3 (now {wish.zero})"
        for name in ("tp", "pp", "num_microbatches"):
            if getattr(wish, name) is not None:
                return f"free {name} (now {getattr(wish, name)})"
        enough = self._enough(needed, shape)
        if enough is None:
            return "use more devices, or devices with more memory"
        return f"a plan fits {format_bytes(enough)} per device; use such devices, or more of them"

    def _enough(self, needed: int, shape: Shape) -> int | None:
        """Bytes per device, a number that reads exactly so, for which a plan of ``shape`` exists.

        What a shape needs was estimated under another limit: it is tried before it is promised.
        """
        fixed = replace(
            self.constraints,
            dp=shape.mesh.dp,
            tp=shape.mesh.tp,
            pp=shape.mesh.pp,
            virtual=shape.mesh.virtual,
            num_microbatches=shape.num_microbatches,
        )
        for percent in ROOM_PERCENT:
            limit_bytes = round_up_bytes(needed * percent // 100)
            trial = replace(
                self, constraints=fixed, limit_bytes=limit_bytes, gives_remedy=False,
                progress=_silent, stats=SearchStats(), ranked=[], misfits=[], errors=[], queue=[],
                opened_s=[], _begin_s=monotonic(), _mark_s=monotonic(),
            )  # fmt: skip
            try:
                trial.run()
            except (InfeasibleError, ConstraintError):
                continue
            return limit_bytes
        return None


def _preference(ranked: Ranked) -> tuple[float, int, int, int, str]:
    return _rank_key(ranked.estimate_s, ranked)


def _rank_key(time_s: float, ranked: Ranked) -> tuple[float, int, int, int, str]:
    """By time; among equals fewer devices, fewer stages, less splitting."""
    mesh = ranked.shape.mesh
    rounded = float(f"{time_s:.6e}")  # sums in another order differ in the last digits
    return rounded, mesh.num_ranks, mesh.num_stages, mesh.tp, str(ranked.shape)


def decisions_for(analysis: Analysis, ranked: Ranked) -> Decisions:
    """What localize needs to know about a ranked shape."""
    shape, chain = ranked.shape, analysis.chain
    choices: dict[str, Mapping[str, Choice]] = dict(
        analysis.data(shape.num_microbatches, shape.mesh.dp).choices
    )
    choices["tp"] = tp_choices(ranked.problem, ranked.splits.options)
    recompute = {
        name
        for block, word in zip(ranked.table.recompute, ranked.recompute_words, strict=True)
        for name in block[word]
    }
    starts = [low for low, _ in bounds(ranked.stages.starts, len(chain.blocks))][1:]
    return Decisions(
        axis_sizes=shape.sizes,
        choices=choices,
        firsts=tuple(chain.first(i) for i in starts),
        recompute=frozenset(recompute),
        zero_levels=(ranked.zero_level,) * shape.mesh.num_stages,
        gather_outputs=analysis.gathered,
    )
