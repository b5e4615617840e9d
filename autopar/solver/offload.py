"""What is kept in host memory, where the user leaves a choice of that.

The optimizer's state is in one place, all of it. Saved values go to the host block by block, as
menus say (:mod:`autopar.solver.recompute`). These count a copy as hidden if it is no longer than
its block; what a whole stage makes of that only its programs tell. So each place is searched by
itself: the plan is the fastest of several, its bound the lowest of theirs, and where nothing fits
on the devices, host memory is the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cluster.topology import Cluster
from autopar.errors import InfeasibleError
from autopar.plan.types import AppliedConstraint, Plan
from autopar.solver.constraints import Constraints, applied_constraints
from autopar.units import format_time
from cost_models.local import is_cpu
from cost_models.offload import copy_price, offload_fault

Words = str | tuple[str, ...] | None
_PLACES: dict[object, tuple[Words, ...]] = {
    "allowed": (None, "activations", "optimizer", ("optimizer", "activations")),
    "activations": (None, "activations"),
    frozenset(("optimizer", "activations")): ("optimizer", ("optimizer", "activations")),
}


def places(wish: Constraints, cluster: Cluster) -> tuple[Words, ...]:
    """What to search in the place of the user's ``offload``; empty if that leaves no choice.

    CPUs gain nothing from host memory, which is theirs; what may go there stays. Where the way to
    the host has no figure, all stays that may; words that name what goes there are refused.

    Raises:
        ConstraintError: Saved values may go to the host by name, and the way has no figure.
    """
    own = wish.offload
    found = _PLACES.get(frozenset(own) if isinstance(own, tuple) and len(own) > 1 else own, ())
    has_no_way = own == "allowed" and bool(offload_fault(cluster))
    if is_cpu(cluster) or has_no_way:
        return found[:1]
    if wish.may_offload_activations:
        copy_price(cluster, "activations")
    return found


def best_place(
    ask: Callable[[Constraints], Plan], wish: Constraints, tried: Sequence[Words]
) -> Plan:
    """The best plan of several places.

    Args:
        ask: Searches under constraints.
        wish: The user's, which leave a choice.
        tried: From :func:`places`, what moves least first.

    Raises:
        InfeasibleError: Nothing fits in any; what is told is of the last one.
    """
    found: list[Plan] = []
    first: Plan | None = None
    for at, words in enumerate(tried):
        try:
            plan = ask(replace(wish, offload=words))
        except InfeasibleError:
            if at == len(tried) - 1 and not found:
                raise
            continue
        found.append(plan)
        first = plan if at == 0 else first
    best = min(found, key=lambda plan: plan.time_s)  # the first of equals
    notes = [*best.assumptions, *_notes(best, first)]
    bound_s = min(plan.bound_s for plan in found)
    return replace(
        best, bound_s=bound_s, constraints=_as_given(best, wish), assumptions=tuple(notes)
    )


def _notes(best: Plan, first: Plan | None) -> list[str]:
    """Why something is in host memory that need not be."""
    if best is first:
        return []
    why = "with all of it on the devices nothing fits"
    if first is not None:
        why = f"with all of it on the devices a step takes {format_time(first.time_s)}"
    found = []
    if best.offload and (first is None or not first.offload):
        found.append(f"the optimizer's state is kept in host memory: {why}")
    if best.offloads_activations:
        found.append(f"saved values are kept in host memory: {why}")
    return found


def _as_given(plan: Plan, wish: Constraints) -> tuple[AppliedConstraint, ...]:
    """The plan's constraints with ``offload`` as the user gave it."""
    own = [c for c in applied_constraints(wish, {}) if c.name == "offload"]
    rest = [c for c in plan.constraints if c.name != "offload"]
    given = [c for c in rest if c.origin == "user"]
    return (*given, *own, *(c for c in rest if c.origin != "user"))
