"""Why a plan is not otherwise: the question solved again under a constraint."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import AutoparError, ConfigError, InfeasibleError
from autopar.ir.graph import Graph
from autopar.plan.answers import WhyNot
from autopar.plan.diff import diff_plans
from autopar.plan.explain import plan_name
from autopar.plan.types import Plan
from autopar.solver.constraints import Constraints
from autopar.solver.given import constraint_words, given_constraints
from autopar.solver.question import Asker
from autopar.units import format_time

AS_FAST = 1e-6  # relative
_HIDDEN = ("constraints of the user", "memory limit", "cluster", "devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProgram:
    """Another program of the same model, such as one of lower precision.

    Attributes:
        graph: The program.
        words: What tells it from the plan's, as a decision in words.
        note: What else it changes.
        precision: Its own.
    """

    graph: Graph
    words: str
    note: str
    precision: str


def why_not(
    asker: Asker, plan: Plan, wished: Constraints, *, program: OtherProgram | None = None
) -> WhyNot:
    """What a constraint would do to a plan.

    Args:
        asker: Of the question that the plan answers.
        plan: The plan.
        wished: What is asked for; what it leaves open is as in the question. Where both fix
            something, ``wished`` counts.
        program: In the place of the plan's own.

    Raises:
        ConfigError: Nothing is asked for.
    """
    given = given_constraints(wished)
    if not given and program is None:
        raise ConfigError("why_not() asks for nothing; give a decision, such as tp=8 or zero=3")
    other = [program.words] if program is not None else []
    asked = ", ".join([*([constraint_words(given)] if given else []), *other])
    own = asker.question.constraints
    overridden = [name for name in given_constraints(own) if name in given]
    graph = None if program is None else program.graph
    found = asker.ask(f"why not {asked}", constraints=replace(own, **given), graph=graph)  # type: ignore[arg-type]
    notes = tuple(
        f"this sets aside the constraint {constraint_words({name: getattr(own, name)})}"
        for name in overridden
        if getattr(own, name) != given[name]
    )
    if program is not None:
        notes += (program.note,)
        found = replace(found, precision=program.precision) if isinstance(found, Plan) else found
    if found is None:
        raise ConfigError(
            f"why not {asked}: no searches are left after {asker.num_solves}; raise the time limit"
        )
    if isinstance(found, AutoparError):
        kept = {name: value for name, value in given_constraints(own).items() if name not in given}
        if kept:
            notes += (f"the plan's own constraints were kept: {constraint_words(kept)}",)
        return _refused(asked, plan, found, notes)
    return _compared(asked, plan, found, notes)


def _refused(asked: str, plan: Plan, error: AutoparError, notes: tuple[str, ...]) -> WhyNot:
    reasons = [str(error)]
    verdict = "refused"
    if isinstance(error, InfeasibleError):
        verdict = "infeasible"
        reasons = [error.message, *map(str, error.shortfalls)]
    return WhyNot(asked=asked, verdict=verdict, before_s=plan.time_s, reasons=(*notes, *reasons))


def _compared(asked: str, plan: Plan, other: Plan, notes: tuple[str, ...]) -> WhyNot:
    diff = diff_plans(plan, other)
    shape = [c for c in diff.shape if c.what not in _HIDDEN]
    changes = [*shape, *diff.stages, *diff.splits]
    costs = None
    old, new = plan.time_s, other.time_s
    slower, as_fast, faster = "slower", "as fast", "faster"
    if plan.objective == "cost" and plan.cost_per_step is not None:
        old, new = costs = plan.cost_per_step, other.cost_per_step or 0.0
        slower, as_fast, faster = "dearer", "as cheap", "cheaper"
    ratio = new / old if old > 0 else 1.0
    reasons = list(notes)
    if not changes:
        verdict = "it is the plan"
    elif abs(ratio - 1) <= AS_FAST:
        verdict = as_fast
        reasons.append("among equal plans that with fewer devices, stages and splits wins")
    elif ratio > 1:
        verdict = slower
    else:
        verdict = faster
        reasons.append(_missed(plan, other))
    memory = [c for c in diff.memory if c.what == "peak of the worst device"]
    return WhyNot(
        asked=asked,
        verdict=verdict,
        before_s=plan.time_s,
        after_s=other.time_s,
        name=plan_name(other),
        changes=diff.terms if changes else {},
        reasons=tuple(reasons),
        differences=tuple(map(str, [*changes, *memory])) if changes else (),
        costs=costs,
    )


def _missed(plan: Plan, other: Plan) -> str:
    """Why a search without the constraint did not find the faster plan."""
    if plan.objective == "cost":
        return "the search for the cheapest plan tries some numbers of devices, not all of them"
    if other.time_s < plan.bound_s:
        return (
            f"it is faster than the bound of the plan, {format_time(plan.bound_s)}: the search "
            "does not consider such plans unless they are asked for"
        )
    return (
        f"the bound of the plan, {format_time(plan.bound_s)}, allows for it: the search ended by "
        "its limit, or an estimate ranked that plan lower, before it was simulated"
    )
