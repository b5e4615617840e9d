"""Plans that people would set up, worked out and judged beside those of the search.

The declared space has not every plan: other numbers of stages per rank, or micro-batches of odd
sizes, are outside of it. A *hint* is such a plan as constraints that nobody has to meet: what it
says is searched as if the user had fixed it, and its plan is taken if it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace

from autopar.errors import ConstraintError, InfeasibleError, ShardingError
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints


def with_hints(
    plan: Plan,
    own: Constraints,
    hints: Iterable[Constraints],
    ask: Callable[[Constraints], Plan],
) -> Plan:
    """The fastest of a plan and of what hints lead to.

    Args:
        plan: The answer of the search.
        own: What the user has fixed; a hint that says otherwise is left out.
        hints: What people would set up.
        ask: The best plan under constraints.

    Returns:
        The plan, told as one under the user's own constraints. Its bound holds for the searched
        space and for all that the hints allow.
    """
    best, bound_s = plan, plan.bound_s
    for hint in hints:
        wish = joined(own, hint)
        if wish is None:
            continue
        try:
            found = ask(wish)
        except (ConstraintError, InfeasibleError, ShardingError):
            continue  # not possible here: no plan that the search could have missed
        bound_s = min(bound_s, found.bound_s)
        if found.time_s < best.time_s:
            best = found
    if best is plan:
        return replace(plan, bound_s=bound_s)
    return replace(
        best,
        bound_s=bound_s,
        constraints=plan.constraints,
        runners_up=plan.runners_up,
        provenance={**best.provenance, "found by": "a hint"},
    )


def joined(own: Constraints, hint: Constraints) -> Constraints | None:
    """Both together; None if they contradict each other."""
    taken: dict[str, object] = {}
    free = Constraints()
    for entry in fields(Constraints):
        mine, theirs = getattr(own, entry.name), getattr(hint, entry.name)
        nothing = getattr(free, entry.name)
        if _same(theirs, nothing):
            continue
        if not _same(mine, nothing) and not _same(mine, theirs):
            return None
        taken[entry.name] = theirs
    try:
        return replace(own, **taken)  # type: ignore[arg-type]  # values of the same fields
    except ConstraintError:
        return None


def _same(one: object, other: object) -> bool:
    """Whether two values of a field are equal; tables by their content."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return dict(one) == dict(other)
    return one == other
