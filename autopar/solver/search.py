"""From a graph and a cluster to a plan: the search over all shapes.

:mod:`autopar.solver.master` has the order of things; here is what it searches. A shape's bound and
estimate are of :mod:`autopar.solver.ranking`. Judging localizes a plan, prices it program by
program and simulates it. A plan whose exact memory exceeds the limit is cut again under a tighter
one, then dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import monotonic

from autopar.cluster import Cluster
from autopar.errors import ConstraintError, InfeasibleError, ShardingError
from autopar.garbage import no_collections
from autopar.ir.graph import Graph
from autopar.plan.types import Plan
from autopar.sharding.build import KeptBodies, localize
from autopar.sharding.decisions import Decisions
from autopar.sharding.programs import LocalPrograms
from autopar.solver.analysis import Analysis, optimizer_s_per_byte
from autopar.solver.assemble import Field, Outcome, assemble_plan
from autopar.solver.at_work import Rankers
from autopar.solver.candidates import (
    Shape,
    grid,
    neighbours,
    plain_shapes,
    shapes,
)
from autopar.solver.constraints import Constraints, check_constraints
from autopar.solver.exact import Setting, exact_figures
from autopar.solver.foresight import Foresight
from autopar.solver.given import with_degrees
from autopar.solver.hints import with_hints
from autopar.solver.host_room import host_shortage
from autopar.solver.lanes import NOW
from autopar.solver.loosen import loosened, with_fewer_copies
from autopar.solver.master import NUM_IMPROVED, Master
from autopar.solver.nothing_fits import PATIENCE, nothing_fits
from autopar.solver.offload import best_place, places
from autopar.solver.ranked import Misfit, Ranked, decisions_for
from autopar.solver.ranking import EARLY_EFFORTS, EFFORTS, Ranker
from autopar.solver.recut import Recut
from autopar.solver.search_stats import SearchStats
from autopar.solver.stage_levels import leveled, rank_given, recut
from autopar.units import format_bytes, format_time
from cost_models.base import CostModel

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

TIGHTEN_TRIES = 3
LEAST_TRIED = 4  # shapes that are worked out whatever the clock says, until one fits
NUM_REFINED = 2  # best shapes around which other numbers of micro-batches are tried
NUM_LEAN_TRIED = 400  # shapes whose memory is bounded when nothing fits
WINDOWS = (4, 2, 1)  # blocks whose copies are under way: with one, any unevenness is waited for


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
    analysis: Analysis | None = None,
    gives_remedy: bool = True,
    hints: Sequence[Constraints] = (),
    is_settled: bool = False,
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
        analysis: Of the same graph, cluster, prices, constraints and optimizer, made before.
        gives_remedy: Whether a refusal looks for the memory that would be enough.
        hints: Plans that people would set up, beyond the declared space too
            (:mod:`autopar.solver.hints`).
        is_settled: Whether ``offload`` is searched as it is, not beside other places.

    Raises:
        ConstraintError: The constraints contradict the model, the cluster or each other.
        InfeasibleError: Nothing fits; the shortfalls name the limit, both numbers and the remedy.
    """

    def ask(wish: Constraints, *, is_settled: bool = False) -> Plan:
        known = analysis or Analysis(graph, cluster, cost_model, constraints, optimizer)
        plan, stats = solve(
            graph, model_hash, cluster, constraints=wish, optimizer=optimizer,
            memory_limit_bytes=memory_limit_bytes, cost_model=cost_model, progress=progress,
            time_limit_s=time_limit_s, analysis=known.under(wish), gives_remedy=False,
            is_settled=is_settled,
        )  # fmt: skip
        search.stats.add(stats)
        return plan

    search = MeshSearch(
        graph=graph,
        model_hash=model_hash,
        cluster=cluster,
        constraints=constraints,
        optimizer=optimizer,
        limit_bytes=memory_limit_bytes or cluster.memory_bytes,
        model=cost_model,
        progress=progress or _silent,
        time_limit_s=time_limit_s,
        analysis=analysis,
        gives_remedy=gives_remedy,
    )
    tried = () if is_settled else places(constraints, cluster)
    with no_collections():
        if tried:
            search.prepare()  # refuses what contradicts the model or the cluster
            plan, stats = (
                best_place(partial(ask, is_settled=True), constraints, tried),
                search.stats,
            )
        else:
            plan, stats = search.run()
    return (with_hints(plan, constraints, hints, ask) if hints else plan), stats


def _silent(_: str) -> None:
    """No progress is wanted."""


@dataclass(slots=True, kw_only=True)
class MeshSearch:
    """One search; arguments as of :func:`solve`."""

    graph: Graph
    model_hash: str
    cluster: Cluster
    constraints: Constraints
    optimizer: str
    limit_bytes: int
    model: CostModel
    progress: Progress = _silent
    time_limit_s: float | None = None
    analysis: Analysis | None = None
    gives_remedy: bool = True
    stats: SearchStats = field(default_factory=SearchStats)
    ranked: list[Ranked] = field(default_factory=list)
    misfits: list[Misfit] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _analysis: Analysis = field(init=False)
    _rankers: Rankers = field(init=False)
    _foresight: Foresight = field(init=False)
    _leanest: dict[tuple[object, ...], Shape] = field(init=False)
    _plain: frozenset[Shape] = frozenset()
    _num_foreseen: int = 0
    _bodies: KeptBodies = field(default_factory=KeptBodies)
    _begin_s: float = field(default_factory=monotonic)
    _mark_s: float = field(default_factory=monotonic)

    def prepare(self) -> Analysis:
        """Check what is asked, and get ready to answer.

        Raises:
            ConstraintError: The constraints contradict the model, the cluster or each other.
        """
        check_constraints(self.graph, self.constraints, self.cluster.num_devices)
        analysis = self.analysis or Analysis(
            self.graph, self.cluster, self.model, self.constraints, self.optimizer
        )
        self._analysis = analysis
        self._rankers = Rankers(Ranker(analysis, self.limit_bytes))
        self._foresight = Foresight(self._rankers)
        self._leanest = {}
        return analysis

    @property
    def prepared(self) -> Analysis:
        """What is known about the model and the cluster, once this is ready to answer."""
        return self._analysis

    def run(self) -> tuple[Plan, SearchStats]:
        """The best plan and how the search went."""
        analysis = self.prepare()
        with self._rankers.lanes.open():
            return self._run(analysis)

    def _run(self, analysis: Analysis) -> tuple[Plan, SearchStats]:
        space = shapes(analysis)
        self.stats.num_shapes = len(space)
        self._phase("analysis")
        self.progress(
            f"{len(analysis.chain.blocks)} blocks, {len(analysis.chain.classes)} kinds, "
            f"{len(space)} shapes"
        )
        for shape in space:  # the most micro-batches of each mesh come last
            self._leanest[_mesh_key(shape)] = shape
            self._rankers.of(shape)  # before threads ask for them
        self._plain = plain_shapes(space)
        by_hand = set(grid(space, analysis.batch_size))
        master: Master[Shape, Ranked, Outcome] = Master(self)
        winner = master.run(
            [s for s in space if s in by_hand],
            [s for s in space if s not in by_hand],
            self._around_the_best(frozenset(space)),
        )
        self._phase("ranking")
        self.stats.stopped_by = master.stopped_by
        self._rankers.count(self.stats)
        if winner is None:
            raise nothing_fits(self, master.verdicts)
        verdicts = list(master.verdicts)
        if not self.is_late():
            first, winner = winner, self.loosened(winner)
            verdicts = [winner if v is first else v for v in verdicts]
            self._phase("exact")
        self._rankers.count(self.stats)
        self.ranked.sort(key=_preference)
        field_ = Field(
            outcomes=verdicts,
            ranked=self.ranked,
            misfits=self.misfits,
            limit_bytes=self.limit_bytes,
            bound_s=master.bound_s,
            model_gap=master.model_gap,
            stopped_by=self.stats.stopped_by,
        )
        plan = assemble_plan(analysis, winner, field_, model_hash=self.model_hash)
        logger.info("plan found: %s, step %s, bound %s", plan.mesh, plan.time_s, plan.bound_s)
        return plan, self.stats

    def _around_the_best(self, space: Collection[Shape]) -> Iterator[Shape]:
        """Shapes beside the best ones, where the space has not all numbers of micro-batches.

        It is asked for its first shape when all others have been gone through.
        """
        seen: set[Shape] = set()
        for ranked in sorted(self.ranked, key=_preference)[:NUM_REFINED]:
            shape = ranked.shape
            own = next(s for s in space if _is_like(s, shape))
            for other in neighbours(self._analysis, own):
                if other not in space and other not in seen:
                    seen.add(other)
                    self.stats.num_shapes += 1
                    yield other

    def _phase(self, name: str) -> None:
        now_s = monotonic()
        self.stats.seconds[name] = self.stats.seconds.get(name, 0.0) + now_s - self._mark_s
        self._mark_s = now_s

    def is_late(self) -> bool:
        """Whether the wall-clock guard has run out; it waits longer for a first plan."""
        if self._rankers.lanes.is_closing:
            return True  # a search that was broken off
        if self.time_limit_s is None:
            return False
        if not self.ranked and self.stats.num_ranked < LEAST_TRIED:
            return False
        patience = 1 if self.ranked else PATIENCE
        return monotonic() - self._begin_s > patience * self.time_limit_s

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin something on another thread, if there is one; what is returned waits for it."""
        self._look_ahead()
        return self._rankers.lanes.ahead(work, NOW).result

    # -- what the master asks ------------------------------------------------------------------
    def bound_s(self, shape: Shape, effort: int, enough_s: float) -> float:
        """A lower bound of a shape; infinite if it is not possible."""
        ranker = self._rankers.of(shape)
        share = ranker.analysis.least_share(shape.mesh.pp)
        try:
            return share * ranker.bound_s(shape, effort, enough_s / share)
        except (ShardingError, ConstraintError, InfeasibleError) as error:
            self.errors.append(f"{shape}: {error}")
            return inf

    def spent(self, shape: Shape) -> float:
        """Work on a shape's bound beyond the early efforts."""
        return self._rankers.of(shape).spent(shape)

    def _look_ahead(self) -> None:
        """Start what improving the best will ask for; no more than is known of them by now."""
        if self._num_foreseen != len(self.ranked) and not self._analysis.stage_levels:
            self._num_foreseen = len(self.ranked)
            self._foresight.improving(sorted(self.ranked, key=_preference)[:NUM_IMPROVED])
        self._foresight.go_on()

    def is_plain(self, shape: Shape) -> bool:
        """Whether a shape is worked out at once: one device, or the batch over all of them."""
        return shape in self._plain

    def outlook_s(self, shape: Shape, best_s: float, levels: Sequence[int] = ()) -> float:
        """Seconds of the plan that is likely to be found, at given ZeRO levels if there are any."""
        if shape.mesh.num_ranks == 1:
            return 0.0  # nothing to split and nothing to cut: it is worked out at once
        try:
            found = self._rankers.of(shape).outlook_s(shape, best_s, levels)
        except (ShardingError, ConstraintError, InfeasibleError) as error:
            self.errors.append(f"{shape}: {error}")
            return inf
        if found > best_s:
            word = "does not seem to fit" if found == inf else f"likely {format_time(found)}"
            self.progress(f"{shape}: {word}")
        return found

    def open(self, shape: Shape, best_s: float, levels: Sequence[int] = ()) -> Ranked | None:
        """A good choice for a shape, at given ZeRO levels if there are any; None if it won't do."""
        self.stats.num_ranked += 1
        try:
            found = self._rank(shape, best_s=best_s, levels=levels)
        except (ShardingError, ConstraintError, InfeasibleError) as error:
            self.errors.append(f"{shape}: {error}")
            return None
        if found is None:
            self.progress(f"{shape}: slower than what is known")
            return None
        if isinstance(found, Misfit):
            self.misfits.append(found)
            self.progress(f"{shape}: does not fit")
            return None
        self.ranked.append(found)
        self.progress(f"{shape}: about {format_time(found.estimate_s)}")
        return found

    def _rank(
        self,
        shape: Shape,
        *,
        limit_bytes: int = 0,
        best_s: float = inf,
        levels: Sequence[int] = (),
    ) -> Ranked | Misfit | None:
        """A good choice for a shape; one whose stages have the levels that are given."""
        ranker = self._rankers.of(shape)
        if self._analysis.stage_levels:
            return rank_given(ranker, shape, limit_bytes or self.limit_bytes)
        return ranker.rank(shape, limit_bytes=limit_bytes, best_s=best_s, levels=levels)

    def improve(self, candidate: Ranked) -> Ranked:
        """Splits for just this shape, better cuts, a ZeRO level for each stage."""
        if self._analysis.stage_levels:
            return candidate
        self._foresight.improving([candidate])
        self._foresight.go_on()
        ranker = self._rankers.of(candidate.shape)
        candidate = ranker.sharpened(candidate)
        best = min((candidate, ranker.polish(candidate)), key=_preference)
        found = ranker.refine(best, self.limit_bytes, anew=True)
        best = min((r for r in (best, found) if isinstance(r, Ranked)), key=_preference)
        return leveled(ranker, best)

    def loosened(self, outcome: Outcome) -> Outcome:
        """The same with as little made again as the exact bytes allow."""
        ranker, evaluate = self._rankers.of(outcome.ranked.shape), self.evaluated
        found = loosened(outcome, evaluate=evaluate, ranker=ranker, limit_bytes=self.limit_bytes)
        return with_fewer_copies(found, evaluate=evaluate)

    def moved(self, candidate: Ranked, limit_bytes: int, max_trials: int) -> Ranked:
        """The same splits with blocks moved, under another limit.

        Args:
            candidate: A shape that was opened.
            limit_bytes: Memory of a device.
            max_trials: Choices that are run, at most; with none the cuts stay.
        """
        problem = replace(candidate.stage_problem, limit_bytes=limit_bytes)
        cuts, starts = Recut(problem, max_trials), candidate.stages.starts
        stages = cuts.improved(starts) if max_trials else cuts.fitted(starts)
        if stages is None:
            return candidate
        ranker = self._rankers.of(candidate.shape)
        found = ranker.estimated(replace(candidate, stage_problem=problem, stages=stages))
        is_same = limit_bytes == candidate.stage_problem.limit_bytes
        return min((candidate, found), key=_preference) if is_same else found

    def evaluated(self, candidate: Ranked) -> Outcome:
        """Exact figures of a candidate, whether it fits or not."""
        return self._evaluate(self._rankers.of(candidate.shape), candidate)

    @property
    def early_efforts(self) -> int:
        """Levels of effort of a bound before its shape is opened."""
        return EARLY_EFFORTS

    @property
    def efforts(self) -> int:
        """Levels of effort of a bound."""
        return EFFORTS

    def preference(self, candidate: Ranked) -> tuple[float, int, int, int, str]:
        """Sort key, best first."""
        return _preference(candidate)

    def model_bound_s(self, candidate: Ranked, enough_s: float) -> float:
        """A lower bound of the estimate of a candidate's shape and splits."""
        return self._rankers.of(candidate.shape).model_bound_s(candidate, enough_s)

    def judge(self, candidate: Ranked) -> Outcome:
        """Exact figures; cut again under a tighter limit while memory is exceeded."""
        self._phase("ranking")
        # levels of stages were chosen by estimates: what they improved is judged beside them
        self._foresight.judging(candidate)
        rows = [candidate] if candidate.alone is None else [candidate, candidate.alone]
        outcomes = [self._exact(self._rankers.of(row.shape), row) for row in rows]
        self._phase("exact")
        found = min(outcomes, key=lambda o: (not o.fits, o.step_s))
        self._foresight.judged(found)
        return found

    def _exact(self, ranker: Ranker, ranked: Ranked) -> Outcome:
        """Exact figures; cut again under a tighter limit while memory is exceeded."""
        limit = self.limit_bytes
        outcome = self._evaluate(ranker, ranked)
        for _ in range(TIGHTEN_TRIES):
            if outcome.fits or outcome.figures.peak_bytes <= self.limit_bytes:
                break
            excess = max(
                real - estimate
                for real, estimate in zip(
                    outcome.figures.rank_bytes, outcome.ranked.stages.memory_bytes, strict=True
                )
            )
            found: Ranked | Misfit | None
            limit = min(limit - max(0, excess), limit - (outcome.figures.peak_bytes - limit))
            if limit <= 0:
                break
            if outcome.ranked.levels:
                found = recut(ranker, outcome.ranked, limit)
            else:
                found = ranker.refine(outcome.ranked, limit)
            if not isinstance(found, Ranked):
                found = self._rank(ranked.shape, limit_bytes=limit)
            if not isinstance(found, Ranked):
                break
            outcome = self._evaluate(ranker, found)
        self.progress(
            f"{ranked.shape}: {format_time(outcome.figures.step_s)}, "
            f"{format_bytes(outcome.figures.peak_bytes)}"
        )
        return outcome

    def _evaluate(self, ranker: Ranker, ranked: Ranked) -> Outcome:
        """Exact figures; in the plain order if the chosen one takes too much."""
        analysis = ranker.analysis
        chosen = decisions_for(analysis, ranked)
        window = chosen.offload_window_bytes
        found: list[tuple[Outcome, Decisions, LocalPrograms]] = []
        for blocks in WINDOWS if chosen.offload else (1,):
            decisions = replace(chosen, offload_window_bytes=blocks * window)
            programs = localize(
                analysis.graph, decisions, analysis.signatures, self._bodies, words=analysis.words
            )
            priced = self._priced(analysis, ranked, decisions, programs)
            found.append((priced, decisions, programs))
        outcome, decisions, programs = min(found, key=lambda f: (not f[0].fits, f[0].step_s))
        plain = None if outcome.fits else ranker.in_plain_order(ranked)
        return outcome if plain is None else self._priced(analysis, plain, decisions, programs)

    def _priced(
        self, analysis: Analysis, ranked: Ranked, decisions: Decisions, programs: LocalPrograms
    ) -> Outcome:
        setting = Setting(
            cluster=analysis.cluster,
            model=analysis.model,
            mesh=ranked.shape.mesh,
            schedule=ranked.shape.schedule,
            num_microbatches=ranked.shape.num_microbatches,
            zero_levels=decisions.zero_levels,
            optimizer=analysis.optimizer,
            optimizer_s_per_byte=optimizer_s_per_byte(analysis.model, analysis.optimizer),
            warmup=ranked.shape.warmup,
            offloads=analysis.offloads,
        )
        figures = exact_figures(programs, setting)
        host = host_shortage(figures.stages, ranked.shape.mesh, analysis.cluster)
        fits = figures.peak_bytes <= self.limit_bytes and host is None
        return Outcome(ranked=ranked, decisions=decisions, figures=figures, fits=fits, host=host)

    # -- nothing fits --------------------------------------------------------------------------
    @property
    def stopped_by(self) -> str:
        """Which limit ended the search: ``""``, ``"work"`` or ``"time"``."""
        return self.stats.stopped_by

    @property
    def num_tried(self) -> int:
        """Shapes that were worked out."""
        return self.stats.num_ranked

    def open_the_leanest(self, most: int) -> None:
        """Work out some shapes that bounds had excluded, those that need the least memory first."""
        found: list[tuple[int, str, Shape]] = []
        for shape in list(self._leanest.values())[:NUM_LEAN_TRIED]:
            try:
                found.append((self._rankers.of(shape).least_bytes(shape), str(shape), shape))
            except (ShardingError, ConstraintError) as error:
                self.errors.append(f"{shape}: {error}")
        for _, _, shape in sorted(found)[:most]:
            self.open(shape, inf)

    def has_fit(self, shape: Shape, limit_bytes: int) -> bool:
        """Whether a plan of a shape is found that fits another limit; not the best one."""
        known = self._analysis.under(with_degrees(self.constraints, shape.degrees))
        trial = replace(
            self, constraints=known.constraints, limit_bytes=limit_bytes, analysis=known,
            progress=_silent, stats=SearchStats(), ranked=[], misfits=[], errors=[],
            _begin_s=monotonic(), _mark_s=monotonic(),
        )  # fmt: skip
        try:
            trial.prepare()
            with trial._rankers.lanes.open():
                found = trial.open(shape, inf)
                return found is not None and trial.judge(found).fits
        except (InfeasibleError, ConstraintError):
            return False


def _is_like(one: Shape, other: Shape) -> bool:
    """Whether two shapes differ by no more than their order."""
    return one.mesh == other.mesh and one.num_microbatches == other.num_microbatches


def _mesh_key(shape: Shape) -> tuple[object, ...]:
    return (shape.mesh, shape.schedule)


def _preference(ranked: Ranked) -> tuple[float, int, int, int, str]:
    return _rank_key(ranked.estimate_s, ranked)


def _rank_key(time_s: float, ranked: Ranked) -> tuple[float, int, int, int, str]:
    """By time; among equals fewer devices, fewer stages, less splitting."""
    mesh = ranked.shape.mesh
    rounded = float(f"{time_s:.6e}")  # sums in another order differ in the last digits
    return rounded, mesh.num_ranks, mesh.num_stages, mesh.tp, str(ranked.shape)
