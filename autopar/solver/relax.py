"""Ways out when nothing fits: each was tried, and its price is the time of the plan it leads to.

Tried are, one at a time: more memory on each device (the least that was found to be enough), more
devices, each constraint of the user left out, all of them, an optimizer that keeps less, and other
programs of the same model, such as one of lower precision.

A trial is a search over all shapes where that is short. Where it is long (a deep model on many
devices: it took many shapes to find out that nothing fits), trials search the shapes that came
closest. What they promise is as true, but faster plans may exist, and the refusal says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, Relaxation, Shortfall
from autopar.ir.graph import Graph
from autopar.plan.explain import plan_name
from autopar.plan.types import Plan
from autopar.solver.candidates import Shape, memory_shortfall
from autopar.solver.conflict import find_conflict
from autopar.solver.constraints import Constraints
from autopar.solver.given import constraint_words, given_constraints, with_degrees
from autopar.solver.question import Asker, Progress, silent
from autopar.solver.search_stats import SearchStats
from autopar.units import format_bytes, round_up_bytes

ROOM_PERCENT = (100, 110, 125, 150, 200, 300)  # of the need that the search found, tried as a limit
CLOSE = 1.02  # a limit that is enough, at most so many times one that is not
MAX_BISECTIONS = 5
GROWTH = (2, 4)  # times as many devices
FASTER = 0.95  # a larger limit is a way out of its own if its plan takes at most so much
# Optimizers by what they keep per parameter, the leanest first.
_LEANEST = ("sgd", "adafactor", "sgd-momentum", "adam")
_SHOWN_VAIN = 8
DEAR = 2000  # shapes worked out times blocks of the model: with more, trials stay near
NUM_NEAR = 3
ROOMIER_PERCENT = 150  # of the least limit: one search over all shapes, for a faster plan
_MESH = ("dp", "tp", "pp", "virtual")
_DEGREES = (*_MESH, "num_microbatches")


@dataclass(slots=True)
class _Trials:
    """What was tried, and what came of it."""

    asker: Asker
    near: tuple[Mapping[str, int], ...] = ()
    found: list[Relaxation] = field(default_factory=list)
    vain: list[str] = field(default_factory=list)

    def ask(
        self,
        what: str,
        *,
        constraints: Constraints | None = None,
        cluster: Cluster | None = None,
        limit_bytes: int | None = None,
        optimizer: str | None = None,
        graph: Graph | None = None,
        near: Iterable[Mapping[str, int]] | None = None,
    ) -> Plan | AutoparError | None:
        """A variation, as :meth:`Asker.ask`: of all shapes, or of those near until one fits."""
        base = constraints or self.asker.question.constraints
        shapes = self.near if near is None else tuple(near)
        refusal: AutoparError | None = None
        for degrees in shapes or ({},):
            answer = self.asker.ask(
                what,
                constraints=with_degrees(base, degrees),
                cluster=cluster,
                limit_bytes=limit_bytes,
                optimizer=optimizer,
                graph=graph,
            )
            if answer is None or isinstance(answer, Plan):
                return answer
            if refusal is None or _least_need(answer) < _least_need(refusal):
                refusal = answer
        return refusal

    def take(self, what: str, answer: Plan | AutoparError | None) -> bool:
        """Note what a trial gave; whether it gave a plan."""
        if answer is None:
            asker = self.asker
            why = "the time limit is used up"
            if asker.num_solves >= asker.max_solves:
                why = f"{asker.num_solves} searches were run already"
            self.vain.append(f"{what}: not tried, {why}")
            return False
        if not isinstance(answer, Plan):
            self.vain.append(f"{what}: {_short(answer)}")
            return False
        self.found.append(
            Relaxation(
                what=what,
                time_s=answer.time_s,
                plan=plan_name(answer),
                peak_bytes=answer.peak_bytes,
            )
        )
        return True


def solve_or_explain(asker: Asker, *, progress: Progress = silent) -> tuple[Plan, SearchStats]:
    """The plan; where there is none, the pair that contradicts, or the ways out.

    Args:
        asker: Of the question.
        progress: Of the first search.

    Raises:
        ConstraintError: The constraints contradict the model, the cluster or each other: the
            smallest set of them that does is named.
        InfeasibleError: Nothing fits: limits with both numbers, and ways out with their price.
    """
    try:
        return asker.first(progress)
    except ConstraintError as error:
        conflict = find_conflict(asker)
        if conflict is None or len(conflict.names) == 1:
            raise
        raise ConstraintError(conflict.text) from error
    except InfeasibleError as error:
        raise with_relaxations(asker, error) from None


def with_relaxations(asker: Asker, error: InfeasibleError) -> InfeasibleError:
    """The same refusal with the ways out, fastest plan first."""
    trials = _Trials(asker, near=_near(asker, error))
    _free_constraints(trials)
    fitting = _more_memory(trials, error)
    _more_devices(trials)
    _leaner_states(trials)
    _other_programs(trials, error)
    ordered = sorted(trials.found, key=lambda r: (r.time_s, r.what))
    notes = trials.vain[:_SHOWN_VAIN]
    rest = len(trials.vain) - len(notes)
    if rest > 0:
        notes.append(f"and {rest} more")
    if trials.near:
        shapes = "; ".join(constraint_words(degrees) for degrees in trials.near)
        notes.append(
            f"all other shapes: {error.num_tried} were worked out to see that nothing fits, and "
            f"ways out were looked for near the closest ({shapes}); there may be faster plans"
        )
    return InfeasibleError(
        error.message,
        _least_known(error.shortfalls, fitting, asker.question.limit_bytes),
        relaxations=tuple(ordered),
        notes=tuple(notes),
        num_tried=error.num_tried,
    )


def _least_known(
    rows: tuple[Shortfall, ...], fitting: Iterable[Plan], limit_bytes: int
) -> tuple[Shortfall, ...]:
    """Shortfalls with the least that their shapes, and those of plans with more memory, need.

    What a shape needs was estimated while nothing fitted; plans that were found since may do with
    less, and then that is what is needed.
    """
    known = {row.what: row for row in rows}
    for plan in fitting:
        shape = Shape(plan.mesh, plan.num_microbatches, plan.schedule, plan.warmup)
        row = memory_shortfall(shape, plan.peak_bytes, limit_bytes)
        if row.what not in known or row.needed < known[row.what].needed:
            known[row.what] = row
    memory = [row for row in known.values() if row.degrees and row.unit == "bytes"]
    memory.sort(key=lambda row: (row.needed, row.what))
    others = [row for row in rows if not (row.degrees and row.unit == "bytes")]
    return (*memory[: len(rows) - len(others)], *others)


def _near(asker: Asker, error: InfeasibleError) -> tuple[Mapping[str, int], ...]:
    """The shapes that came closest; none where all of them can be searched again and again."""
    closest = [s.degrees for s in error.shortfalls if s.degrees][:NUM_NEAR]
    if not closest or error.num_tried * len(asker.analysis().chain.blocks) <= DEAR:
        return ()
    return tuple(closest)


def _least_need(error: AutoparError) -> float:
    """The least of what a refusal says is needed; infinite where it is about something else."""
    rows = error.shortfalls if isinstance(error, InfeasibleError) else ()
    return min((s.needed for s in rows), default=float("inf"))


def _short(error: AutoparError) -> str:
    """Why a trial gave no plan, in one line."""
    if isinstance(error, InfeasibleError) and error.shortfalls:
        least = min(error.shortfalls, key=lambda s: s.needed)
        needs = f"needs {least.amount(least.needed)}, has {least.amount(least.available)}"
        return f"{least.what} still {needs}" if least.degrees else f"still {needs}"
    return str(error).partition("\n")[0]


# -- constraints ------------------------------------------------
def _free_constraints(trials: _Trials) -> None:
    """Each constraint left out alone; all of them if no single one is to blame."""
    own = trials.asker.question.constraints
    given = given_constraints(own)
    free = Constraints()
    is_mended = False
    for name, value in given.items():
        if name == "microbatch_statistics":
            continue  # it allows more, and forbids nothing
        what = _freed_words(name, value)
        changed = replace(own, **{name: getattr(free, name)})
        # a degree that is left out is to be found: shapes near have the one that is to blame
        near = () if name in _DEGREES else None
        is_mended |= trials.take(what, trials.ask(what, constraints=changed, near=near))
    if len(given) > 1 and not is_mended:
        what = "leave out all of " + constraint_words(given)
        kept = replace(free, microbatch_statistics=own.microbatch_statistics)
        trials.take(what, trials.ask(what, constraints=kept, near=()))


def _freed_words(name: str, value: object) -> str:
    words = constraint_words({name: value})
    if name == "recompute":
        return f"allow recompute (now {words})"
    if name == "zero":
        return f"allow any ZeRO level (now {words})"
    return f"leave {words} out"


# -- memory -----------------------------------------------------
def _more_memory(trials: _Trials, error: InfeasibleError) -> tuple[Plan, ...]:
    """The least limit under which a plan is found, and the largest under which none is.

    Returns:
        Plans that were found under some limit.
    """
    asker = trials.asker
    short = asker.question.limit_bytes
    needs = [int(s.needed) for s in error.shortfalls if s.unit == "bytes"]
    if not needs:
        return ()
    found: dict[int, Plan] = {}
    for percent in ROOM_PERCENT:
        limit = round_up_bytes(max(min(needs) * percent // 100, short + 1))
        answer = trials.ask(f"{format_bytes(limit)} per device", limit_bytes=limit)
        if isinstance(answer, Plan):
            found[limit] = answer
            break
        if answer is None:
            break
        short = max(short, limit)
    if not found:
        tried = short > asker.question.limit_bytes
        words = f", up to {format_bytes(short)} per device" if tried else " per device"
        trials.take(f"more memory{words}", answer)
        return ()
    for _ in range(MAX_BISECTIONS):
        enough = min(found)
        # what the plan needs is a limit that is enough: often far below the one it was found under
        tight = round_up_bytes(found[enough].peak_bytes)
        middle = min(tight, round_up_bytes((short + enough) // 2))
        if enough <= short * CLOSE or middle >= enough or middle <= short:
            break
        answer = trials.ask(f"{format_bytes(middle)} per device", limit_bytes=middle)
        if answer is None:
            break
        if isinstance(answer, Plan):
            found[middle] = answer
        else:
            short = middle
    if trials.near:
        limit = round_up_bytes(min(found) * ROOMIER_PERCENT // 100)
        answer = trials.ask(f"{format_bytes(limit)} per device", limit_bytes=limit, near=())
        if isinstance(answer, Plan):
            found[limit] = answer
    _take_limits(trials, found, short)
    return tuple(found.values())


def _take_limits(trials: _Trials, found: Mapping[int, Plan], short: int) -> None:
    """The least limit, and larger ones whose plans are much faster."""
    fastest_s = float("inf")
    for limit, plan in sorted(found.items()):
        if plan.time_s > FASTER * fastest_s:
            continue
        there = f"there are {format_bytes(trials.asker.question.limit_bytes)}"
        if fastest_s == float("inf") and not trials.near:
            there += f"; no plan was found with {format_bytes(short)}"
        trials.take(f"give each device {format_bytes(limit)} ({there})", plan)
        fastest_s = plan.time_s


# -- devices ----------------------------------------------------
def _more_devices(trials: _Trials) -> None:
    asked = trials.asker.question
    cluster = asked.cluster
    last: tuple[str, Plan | AutoparError | None] | None = None
    for factor in GROWTH:
        larger = asked.grow(cluster, factor)
        own_limit = asked.limit_bytes == cluster.memory_bytes
        what = f"use {larger.num_devices} devices ({larger}; there are {cluster.num_devices})"
        limit = larger.memory_bytes if own_limit else asked.limit_bytes
        near = [
            {n: v for n, v in {**degrees, axis: factor * degrees[axis]}.items() if n in _MESH}
            for degrees in trials.near
            for axis in ("pp", "dp", "tp")
        ]
        answer = trials.ask(what, cluster=larger, limit_bytes=limit, near=near)
        last = (what, answer)
        if answer is None or isinstance(answer, Plan):
            break
    if last is not None:
        trials.take(*last)


# -- what is kept per parameter ---------------------------------
def _leaner_states(trials: _Trials) -> None:
    asker = trials.asker
    own = asker.question.optimizer
    at = _LEANEST.index(own) if own in _LEANEST else len(_LEANEST) - 1  # adamw is as adam
    for name in () if own == "none" else _LEANEST[:at]:
        what = f"use the optimizer {name} (now {own})"
        if not trials.take(what, trials.ask(what, optimizer=name)):
            break  # those that keep more do not fit either


def _other_programs(trials: _Trials, error: InfeasibleError) -> None:
    """The same model as another program, such as one of lower precision."""
    asker = trials.asker
    if all(row.unit != "bytes" for row in error.shortfalls):
        return  # other programs are searched for time in memory alone, not within a cost
    for what, make in asker.question.programs.items():
        trials.take(what, None if asker.is_spent else trials.ask(what, graph=make()))
