"""A search near a plan that runs: shapes that need nothing new, few of them worked out.

Shapes with the same ``tp`` and as many samples in a rank's micro-batch have the same work inside a
micro-batch, so that splits, prices and menus of the running plan serve them all; only how many
ranks stand side by side, how many stages there are and in which order they run differs. Of each
number of pipeline ranks that fits, the most data ranks that divide the batch are tried, whether
devices stay idle or not. Steps of many more computes than the old one's are left out. The old shape
with as many data ranks as are left is worked out, then a few that closed forms of their steps
promise to be good (:mod:`autopar.solver.near_order`). The best of these is cut better and judged,
and so is the old shape.

All limits are of work. What was not searched is told by two numbers: no shape near the old one is
faster than ``near_bound_s``, none at all faster than the plan's ``bound_s``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite

from autopar.errors import ConstraintError, InfeasibleError
from autopar.plan.types import MeshShape, Plan
from autopar.solver.analysis import Analysis
from autopar.solver.assemble import Field, Outcome, assemble_plan
from autopar.solver.candidates import Shape, shapes
from autopar.solver.near_order import Tried, guesses_s, promising, siblings
from autopar.solver.ranked import Ranked
from autopar.solver.schedule_choice import sampled_counts
from autopar.solver.search import MeshSearch
from autopar.solver.stages_problem import left_beside_bytes

NUM_BOUNDED = 32  # shapes whose bounds are sharpened
NUM_OPENED = 16  # shapes that are worked out
ALIKE = 1.005  # guesses that differ by less are equal
NUM_SIBLINGS = 1  # with other numbers of pipeline ranks than the best
SPARE = 0.03  # share of the memory that estimates leave empty
MAX_TRIALS = 40  # cuts of a shape that is judged
MAX_THINGS = 400_000  # computes of all of their steps that are run, about
MOST_LONGER = 4  # times the computes of the old step
NUM_JUDGED = 2  # of them, until one fits and the next is not likely to be better
SHARP = 3  # effort of a bound that uses the splits that are known


@dataclass(frozen=True, slots=True, kw_only=True)
class NearAnswer:
    """What was found near a plan.

    Attributes:
        plan: The best plan; its bound holds for every shape of the declared space too.
        stay: The old shape with fewer data ranks, or as many; None if that does not fit.
        num_near: Shapes near the old one.
        num_opened: Those that were worked out.
        near_bound_s: No plan of a shape near the old one takes less.
    """

    plan: Plan
    stay: Plan | None
    num_near: int
    num_opened: int
    near_bound_s: float

    def __str__(self) -> str:
        """What was searched, in a line."""
        gap = max(0.0, 1 - self.near_bound_s / self.plan.time_s)
        return (
            f"searched: {self.num_near} shapes near the old one, {self.num_opened} of them worked "
            f"out; none of them is faster by more than {gap:.1%}, no shape at all by more than "
            f"{self.plan.gap:.1%}; thorough=True (--thorough) searches all"
        )


def near_answer(search: MeshSearch, old: Plan) -> NearAnswer:
    """The best plan near an old one, and the old shape on what is there.

    Args:
        search: Of the new cluster, under the user's constraints.
        old: The plan that runs; of one mesh.

    Raises:
        InfeasibleError: No shape near the old one fits.
        ConstraintError: The constraints leave none.
    """
    analysis = search.prepare()
    near = tuple(near_shapes(analysis, old))
    if not near:
        raise ConstraintError(f"no shape near {old.mesh} is possible on {analysis.cluster}")
    quick = {shape: search.bound_s(shape, 0, inf) for shape in (*near, *shapes(analysis))}
    kept = _kept(near, old.mesh)
    bounds = {shape: quick[shape] for shape in near if isfinite(quick[shape])}
    opened, tried = _worked_out(search, old, kept, bounds)
    _sharpen(search, bounds, tried.best_s)
    verdicts = _judged(search, opened, kept)
    fitting = [v for v in verdicts.values() if v.fits]
    if not fitting:
        raise InfeasibleError(f"no shape near {old.mesh} fits {analysis.cluster}", ())
    near_bound_s = min(min(bounds.values()), *(v.step_s for v in fitting))
    field_ = Field(
        outcomes=list(verdicts.values()),
        ranked=sorted(search.ranked, key=search.preference),
        misfits=(),
        limit_bytes=search.limit_bytes,
        bound_s=min(near_bound_s, min(quick.values(), default=0.0)),
        model_gap=max(0.0, 1 - near_bound_s / min(r.estimate_s for r in opened.values())),
        stopped_by="",
    )

    def made(outcome: Outcome) -> Plan:
        return assemble_plan(analysis, outcome, field_, model_hash=search.model_hash)

    staying = None if kept is None else verdicts.get(kept)
    return NearAnswer(
        plan=made(min(fitting, key=lambda v: v.step_s)),
        stay=made(staying) if staying is not None and staying.fits else None,
        num_near=len(near),
        num_opened=tried.num,
        near_bound_s=near_bound_s,
    )


def _worked_out(
    search: MeshSearch, old: Plan, kept: Shape | None, bounds: Mapping[Shape, float]
) -> tuple[dict[Shape, Ranked], Tried]:
    """Shapes that were worked out and are likely to fit, or those that may if no others are.

    Args:
        search: Of the new cluster.
        old: The plan that runs.
        kept: The old shape on what is left.
        bounds: Shapes near the old one with lower bounds.
    """
    guesses = guesses_s(search.prepared, tuple(bounds))
    opened: dict[Shape, Ranked] = {}
    doubtful: dict[Shape, Ranked] = {}
    tried = Tried()

    def work_out(shape: Shape) -> None:
        if bounds[shape] >= tried.best_s or tried.is_vain(shape, guesses[shape]):
            return
        found = search.open(shape, tried.best_s, _levels(search, shape, old))
        if found is None and not isfinite(tried.best_s):
            found = search.open(shape, tried.best_s)  # nothing is known to fit: at any level
        fitted = None if found is None else _fitted(search, found)
        tried.learn(shape, guesses[shape], found, fitted)
        if fitted is not None:
            opened[shape] = fitted
        elif found is not None:
            doubtful[shape] = found

    if kept is not None and kept in bounds:  # first: a plan that is known saves the rest work
        work_out(kept)
    seen = {kept}
    for alike in (ALIKE, inf):  # with more pipeline ranks where nothing fits
        for shape in promising(guesses, old.mesh.dp, alike):
            if shape not in seen and tried.num < NUM_OPENED and not (opened and alike == inf):
                seen.add(shape)
                work_out(shape)
    best = min(opened, key=lambda s: search.preference(opened[s]), default=kept)
    for shape in [s for s in siblings(best, guesses) if s not in seen][:NUM_SIBLINGS]:
        work_out(shape)
    return opened or doubtful, tried


def _sharpen(search: MeshSearch, bounds: dict[Shape, float], best_s: float) -> None:
    """Sharpen the least bounds, where few are below what is known: the least of all counts."""
    if sum(bound_s < best_s for bound_s in bounds.values()) > NUM_BOUNDED:
        return
    sharp: set[Shape] = set()
    while bounds:
        least = min(bounds, key=lambda s: (bounds[s], str(s)))
        if least in sharp or bounds[least] >= best_s:
            return
        sharp.add(least)
        bounds[least] = max(bounds[least], search.bound_s(least, SHARP, inf))


def _fitted(search: MeshSearch, found: Ranked) -> Ranked | None:
    """A shape that was opened, with what its estimate leaves out; None if that does not fit."""
    for room in _rooms(search, found):
        if max(found.stages.memory_bytes) <= room:
            return found
        tighter = search.moved(found, room, 0)
        if tighter is not found:
            return tighter
    return None


def _rooms(search: MeshSearch, ranked: Ranked) -> tuple[int, int]:
    """Bytes of a device for what is estimated: at least, and at most.

    Estimates take block by block. The backward of a block runs beside what those of later blocks of
    its stage have left, and each stage has room for a message that comes and for one that goes, in
    both directions.
    """
    stages, mesh = ranked.stages, ranked.shape.mesh
    least, most = left_beside_bytes(ranked.stage_problem, stages.starts, stages.options)
    message = max((there + back for there, back in ranked.table.boundary_bytes), default=0)
    messages, spare = 2 * mesh.virtual * message * (mesh.pp > 1), int(search.limit_bytes * SPARE)
    limit = search.limit_bytes
    return limit - max(spare, most + messages), limit - max(spare, least + messages)


def _levels(search: MeshSearch, shape: Shape, old: Plan) -> tuple[int, ...]:
    """The ZeRO levels of the old plan that a shape may have."""
    possible = search.prepared.zero_levels(shape.mesh.dp)
    return tuple(dict.fromkeys(s.zero_level for s in old.stages if s.zero_level in possible))


def _judged(
    search: MeshSearch, opened: dict[Shape, Ranked], kept: Shape | None
) -> dict[Shape, Outcome]:
    """Verdicts on the best shapes, the old one included."""
    order = sorted(opened, key=lambda s: search.preference(opened[s]))
    verdicts: dict[Shape, Outcome] = {}
    best_s = inf
    for shape in order[:NUM_JUDGED]:
        if opened[shape].estimate_s >= best_s:
            break  # of what the first was flattered by the next may be better
        verdicts[shape] = _verdict(search, opened[shape], _num_trials(opened[shape]))
        if verdicts[shape].fits:
            best_s = min(best_s, verdicts[shape].step_s)
    if kept is not None and kept in opened and kept not in verdicts:
        verdicts[kept] = _verdict(search, opened[kept], 0)
    return verdicts


def _verdict(search: MeshSearch, ranked: Ranked, max_trials: int) -> Outcome:
    """A shape with blocks moved, judged; once more under a tighter limit if it exceeds the real.

    Args:
        search: Of the new cluster.
        ranked: A shape that was opened.
        max_trials: Cuts that are run.
    """
    limit = ranked.stage_problem.limit_bytes
    if limit == search.limit_bytes:
        limit, _ = _rooms(search, ranked)
    ranked = search.moved(ranked, limit, max_trials)
    outcome = search.evaluated(ranked)
    excess = max(
        real - estimate
        for real, estimate in zip(
            outcome.figures.rank_bytes, ranked.stages.memory_bytes, strict=True
        )
    )
    if outcome.fits or not 0 < excess < search.limit_bytes:
        return outcome
    tighter = search.moved(ranked, min(limit, search.limit_bytes - excess), max_trials)
    if tighter is ranked:  # nothing fits a tighter limit
        return outcome
    return search.evaluated(tighter)


def _num_trials(ranked: Ranked) -> int:
    """Cuts that are run: a few of long steps."""
    problem = ranked.stage_problem
    count = sum(n for n, _ in sampled_counts(problem, ranked.shape.warmup))
    return min(MAX_TRIALS, MAX_THINGS // (2 * problem.num_stages * count))


def _kept(near: tuple[Shape, ...], mesh: MeshShape) -> Shape | None:
    """The old shape with the most data ranks that are left."""
    alike = [s for s in near if replace(s.mesh, dp=mesh.dp) == mesh and s.mesh.dp <= mesh.dp]
    return max(alike, key=lambda s: s.mesh.dp, default=None)


def near_shapes(analysis: Analysis, old: Plan) -> Iterator[Shape]:
    """Shapes with the old ``tp`` and as many samples in a rank's micro-batch.

    Of each number of pipeline ranks those with the most data ranks; of the old one also those with
    fewer than before.
    """
    own, mesh, batch = analysis.constraints, old.mesh, analysis.batch_size
    parts = mesh.dp * old.num_microbatches
    if batch % parts or own.tp not in (None, mesh.tp):
        return
    samples = batch // parts
    seen: set[Shape] = set()
    most = min(len(analysis.chain.blocks), analysis.cluster.num_devices // mesh.tp)
    for pp in range(1, most + 1):
        room = analysis.cluster.num_devices // (mesh.tp * pp)
        sizes = [d for d in range(min(room, parts), 0, -1) if parts % d == 0]
        chosen = sizes[:1]
        if pp == mesh.pp:
            chosen += [d for d in sizes if d <= mesh.dp][:1]
        for dp in dict.fromkeys(chosen):
            wish = {"tp": mesh.tp, "pp": pp, "dp": dp, "num_microbatches": batch // dp // samples}
            if any(getattr(own, name) not in (None, value) for name, value in wish.items()):
                continue
            try:
                found = shapes(analysis.under(replace(own, **wish)))  # type: ignore[arg-type]
            except ConstraintError:
                continue
            for shape in found:
                length = shape.mesh.num_stages * shape.num_microbatches
                is_long = length > MOST_LONGER * mesh.num_stages * old.num_microbatches
                if shape not in seen and not is_long:
                    seen.add(shape)
                    yield shape
