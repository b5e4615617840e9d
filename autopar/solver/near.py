"""A search near a plan that runs: shapes that need nothing new, few of them worked out.

Shapes with the same ``tp`` and as many samples in a rank's micro-batch have the same work inside a
micro-batch, so that splits, prices and menus of the running plan serve them all; only how many
ranks stand side by side, how many stages there are and in which order they run differs. Of each
number of pipeline ranks that fits, the most data ranks that divide the batch are tried, whether
devices stay idle or not. Steps of many more computes than the old one's are left out. Bounds are
sharpened; the old shape with as many data ranks as are left is opened, then the best few whose
outlook is better. The best of these is cut better and judged, and so is the old shape.

All limits are of work. What was not searched is told by two numbers: no shape near the old one is
faster than ``near_bound_s``, none at all faster than the plan's ``bound_s``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite

from autopar.errors import ConstraintError, InfeasibleError
from autopar.plan.types import MeshShape, Plan
from autopar.solver.analysis import Analysis
from autopar.solver.assemble import Field, Outcome, assemble_plan
from autopar.solver.candidates import Shape, shapes
from autopar.solver.ranked import Ranked
from autopar.solver.search import MeshSearch

NUM_BOUNDED = 32  # shapes whose bounds are sharpened
NUM_OPENED = 10  # shapes that are worked out, the old one left out
NUM_GUESSED = 24  # shapes whose outlook is asked for
SPARE = 0.03  # share of the memory that estimates leave empty
MAX_TRIALS = 40  # cuts of a shape that is judged
MOST_LONGER = 4  # times the computes of the old step
NUM_JUDGED = 2  # of them, until one fits
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
    order = sorted(near, key=lambda s: (quick[s], str(s)))
    bounds = {s: quick[s] for s in order if isfinite(quick[s])}
    for shape in [s for s in order if s in bounds][:NUM_BOUNDED]:
        bounds[shape] = max(bounds[shape], search.bound_s(shape, SHARP, inf))
    opened: dict[Shape, Ranked] = {}
    best_s = inf
    todo = sorted(bounds, key=lambda s: (bounds[s], quick[s], str(s)))
    num_opened = num_guessed = 0
    if kept is not None and kept in bounds:  # first: a plan that is known saves the rest work
        todo.insert(0, kept)
    for shape in dict.fromkeys(todo):
        if bounds[shape] >= best_s or num_opened > NUM_OPENED or not isfinite(bounds[shape]):
            break
        if isfinite(best_s):
            if num_guessed == NUM_GUESSED:
                break
            num_guessed += 1
            if search.outlook_s(shape, best_s, _levels(search, shape, old)) >= best_s:
                continue
        num_opened += 1
        found = _opened(search, shape, old, best_s)
        if found is not None:
            opened[shape] = found
            best_s = min(best_s, found.estimate_s)
    verdicts = _judged(search, opened, kept)
    fitting = [v for v in verdicts.values() if v.fits]
    if not fitting:
        raise InfeasibleError(f"no shape near {old.mesh} fits {analysis.cluster}", ())
    near_bound_s = min(min(bounds.values()), *(v.step_s for v in fitting))
    field = Field(
        outcomes=list(verdicts.values()),
        ranked=sorted(search.ranked, key=search.preference),
        misfits=(),
        limit_bytes=search.limit_bytes,
        bound_s=min(near_bound_s, min(quick.values(), default=0.0)),
        model_gap=max(0.0, 1 - near_bound_s / min(r.estimate_s for r in opened.values())),
        stopped_by="",
    )

    def made(outcome: Outcome) -> Plan:
        return assemble_plan(analysis, outcome, field, model_hash=search.model_hash)

    staying = None if kept is None else verdicts.get(kept)
    return NearAnswer(
        plan=made(min(fitting, key=lambda v: v.step_s)),
        stay=made(staying) if staying is not None and staying.fits else None,
        num_near=len(near),
        num_opened=num_opened,
        near_bound_s=near_bound_s,
    )


def _opened(search: MeshSearch, shape: Shape, old: Plan, best_s: float) -> Ranked | None:
    """A shape at the old ZeRO levels; at all of them while nothing is known to fit."""
    found = search.open(shape, best_s, _levels(search, shape, old))
    return found if found is not None or isfinite(best_s) else search.open(shape, best_s)


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
    num_fitting, spare = 0, int(search.limit_bytes * SPARE)
    for shape in order:
        if num_fitting >= 1 or len(verdicts) >= NUM_JUDGED:
            break
        verdicts[shape], spare = _verdict(search, opened[shape], spare)
        num_fitting += verdicts[shape].fits
    if kept is not None and kept in opened and kept not in verdicts:
        verdicts[kept], _ = _verdict(search, opened[kept], spare)
    return verdicts


def _verdict(search: MeshSearch, ranked: Ranked, spare: int) -> tuple[Outcome, int]:
    """A shape with blocks moved, judged; once more under a tighter limit if it exceeds the real.

    Estimates are a little too small where many stages share a device: some room is left. By how
    much is about the same in all shapes, whose micro-batches are alike.

    Args:
        search: Of the new cluster.
        ranked: A shape that was opened.
        spare: Bytes of the limit that are left empty at first.

    Returns:
        The verdict, and the bytes to spare in the next shape.
    """
    limit = search.limit_bytes - spare
    ranked = search.moved(ranked, limit, MAX_TRIALS)
    outcome = search.evaluated(ranked)
    excess = max(
        real - estimate
        for real, estimate in zip(
            outcome.figures.rank_bytes, ranked.stages.memory_bytes, strict=True
        )
    )
    if outcome.fits or not 0 < excess < limit:
        return outcome, spare
    tighter = search.moved(ranked, limit - excess, MAX_TRIALS)
    if tighter is ranked:  # nothing fits a tighter limit
        return outcome, spare
    again = search.evaluated(tighter)
    return again, spare + excess if again.fits else spare


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
