"""Ways out when nothing fits: each was tried, and its price is the time of the plan it leads to.

Tried are, one at a time: more memory on each device (the least that was found to be enough), more
devices, each constraint of the user left out, all of them, an optimizer that keeps less, and other
programs of the same model, such as one of lower precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autopar.cluster import Cluster, DeviceKind
from autopar.errors import AutoparError, ConstraintError, InfeasibleError, Relaxation
from autopar.ir.graph import Graph
from autopar.plan.explain import plan_name
from autopar.plan.types import Plan
from autopar.solver.conflict import find_conflict
from autopar.solver.constraints import Constraints
from autopar.solver.given import constraint_words, given_constraints
from autopar.solver.question import Asker, Progress, silent
from autopar.solver.search import SearchStats
from autopar.units import format_bytes, round_up_bytes

ROOM_PERCENT = (100, 110, 125, 150, 200, 300)  # of the need that the search found, tried as a limit
CLOSE = 1.02  # a limit that is enough, at most so many times one that is not
MAX_BISECTIONS = 5
GROWTH = (2, 4, 8)  # times as many devices
LEANER_OPTIMIZERS = ("adafactor", "sgd-momentum", "sgd")
# What a lighter optimizer keeps per parameter, against what AdamW keeps: those listed later are
# not lighter than those listed before.
_WEIGHT = {"none": 0, "sgd": 0, "adafactor": 1, "sgd-momentum": 2, "adam": 3, "adamw": 3}
_SHOWN_VAIN = 8

Programs = Mapping[str, Callable[[], Graph]]
"""What to change, in words -> the program that there is then; made when it is tried."""


@dataclass(slots=True)
class _Trials:
    """What was tried, and what came of it."""

    asker: Asker
    found: list[Relaxation] = field(default_factory=list)
    vain: list[str] = field(default_factory=list)

    def take(self, what: str, answer: Plan | AutoparError | None) -> bool:
        """Note what a trial gave; whether it gave a plan."""
        if answer is None:
            self.vain.append(f"{what}: not tried, {self.asker.max_solves} searches were run")
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


def solve_or_explain(
    asker: Asker, *, progress: Progress = silent, programs: Programs | None = None
) -> tuple[Plan, SearchStats]:
    """The plan; where there is none, the pair that contradicts, or the ways out.

    Args:
        asker: Of the question.
        progress: Of the first search.
        programs: Other programs of the same model that may be tried.

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
        raise with_relaxations(asker, error, programs or {}) from None


def with_relaxations(asker: Asker, error: InfeasibleError, programs: Programs) -> InfeasibleError:
    """The same refusal with the ways out, fastest plan first."""
    trials = _Trials(asker)
    _free_constraints(trials)
    _more_memory(trials, error)
    _more_devices(trials)
    _leaner_states(trials, programs)
    ordered = sorted(trials.found, key=lambda r: (r.time_s, r.what))
    notes = trials.vain[:_SHOWN_VAIN]
    rest = len(trials.vain) - len(notes)
    if rest > 0:
        notes.append(f"and {rest} more")
    return InfeasibleError(
        error.message, error.shortfalls, relaxations=tuple(ordered), notes=tuple(notes)
    )


def _short(error: AutoparError) -> str:
    """Why a trial gave no plan, in one line."""
    if isinstance(error, InfeasibleError) and error.shortfalls:
        least = min(error.shortfalls, key=lambda s: s.needed)
        return f"still needs {format_bytes(least.needed)}, has {format_bytes(least.available)}"
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
        is_mended |= trials.take(what, trials.asker.ask(what, constraints=changed))
    if len(given) > 1 and not is_mended:
        what = "leave out all of " + constraint_words(given)
        kept = replace(free, microbatch_statistics=own.microbatch_statistics)
        trials.take(what, trials.asker.ask(what, constraints=kept))


def _freed_words(name: str, value: object) -> str:
    words = constraint_words({name: value})
    if name == "recompute":
        return f"allow recompute (now {words})"
    if name == "zero":
        return f"allow any ZeRO level (now {words})"
    return f"leave {words} out"


# -- memory -----------------------------------------------------
def _more_memory(trials: _Trials, error: InfeasibleError) -> None:
    """The least limit under which a plan is found, and the largest under which none is."""
    asker = trials.asker
    short = asker.question.limit_bytes
    needs = [int(s.needed) for s in error.shortfalls if s.unit == "bytes"]
    if not needs:
        return
    enough: int | None = None
    answer: Plan | AutoparError | None = None
    for percent in ROOM_PERCENT:
        limit = round_up_bytes(max(min(needs) * percent // 100, short + 1))
        answer = asker.ask(f"{format_bytes(limit)} per device", limit_bytes=limit)
        if answer is None or isinstance(answer, Plan):
            enough = limit if answer is not None else None
            break
        short = max(short, limit)
    if enough is None or not isinstance(answer, Plan):
        trials.take(f"more memory, up to {format_bytes(short)} per device", answer)
        return
    plan = answer
    for _ in range(MAX_BISECTIONS):
        # what the plan needs is a limit that is enough: often far below the one it was found under
        tight = round_up_bytes(plan.peak_bytes)
        middle = min(tight, round_up_bytes((short + enough) // 2))
        if enough <= short * CLOSE or middle >= enough or middle <= short:
            break
        tried = asker.ask(f"{format_bytes(middle)} per device", limit_bytes=middle)
        if tried is None:
            break
        if isinstance(tried, Plan):
            enough, plan = middle, tried
        else:
            short = middle
    what = (
        f"give each device {format_bytes(enough)} (there are "
        f"{format_bytes(asker.question.limit_bytes)}; no plan was found with {format_bytes(short)})"
    )
    trials.take(what, plan)


# -- devices ----------------------------------------------------
def _more_devices(trials: _Trials) -> None:
    cluster = trials.asker.question.cluster
    last: tuple[str, Plan | AutoparError | None] | None = None
    for factor in GROWTH:
        larger = grown(cluster, factor)
        what = f"use {larger.num_devices} devices ({larger}; there are {cluster.num_devices})"
        answer = trials.asker.ask(what, cluster=larger)
        last = (what, answer)
        if answer is None or isinstance(answer, Plan):
            break
    if last is not None:
        trials.take(*last)


def grown(cluster: Cluster, factor: int) -> Cluster:
    """A cluster of the same kind with ``factor`` times the devices.

    A single machine of CPU processes gets more of them; else there are more machines.

    >>> from autopar.cluster import parse_devices
    >>> str(grown(parse_devices("2:cpu"), 2)), str(grown(parse_devices("4x8:h100-sxm"), 2))
    ('4:cpu', '8x8:h100-sxm')
    """
    first = cluster.machines[0]
    if len(cluster.machines) == 1 and first.device.kind is DeviceKind.CPU:
        return replace(cluster, machines=(replace(first, num_devices=factor * first.num_devices),))
    machines = tuple(machine for machine in cluster.machines for _ in range(factor))
    return replace(cluster, machines=machines)


# -- what is kept per parameter ---------------------------------
def _leaner_states(trials: _Trials, programs: Programs) -> None:
    asker = trials.asker
    own = asker.question.optimizer
    for name in LEANER_OPTIMIZERS:
        if _WEIGHT[name] >= _WEIGHT.get(own, 0):
            continue
        what = f"use the optimizer {name} (now {own})"
        if trials.take(what, asker.ask(what, optimizer=name)):
            break
    for what, make in programs.items():
        trials.take(what, None if asker.is_spent else asker.ask(what, graph=make()))
