"""How some parameters are split, what that causes, and what other splits would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from autopar.errors import ConfigError, InfeasibleError
from autopar.ir.graph import InputKind
from autopar.plan.answers import Alternative, ParamExplanation
from autopar.plan.explain import decided_by, explain_parameters, rank_words
from autopar.plan.types import TP_AXIS, Plan
from autopar.sharding.decisions import Choice
from autopar.sharding.placement import R, Replicate
from autopar.sharding.programs import AXES, LocalPrograms, ParamSpec
from autopar.solver.analysis import Analysis
from autopar.solver.param_collectives import caused_collectives
from autopar.solver.question import Asker
from autopar.solver.resimulate import Resimulator
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import SplitsProblem, choice_terms_s
from autopar.units import format_time

EQUAL = 1e-9  # of the seconds of a step


def explain_parameters_with_model(asker: Asker, plan: Plan, pattern: str) -> ParamExplanation:
    """:func:`~autopar.plan.explain.explain_parameters` with collectives and alternatives.

    Args:
        asker: Of the question that the plan answers.
        plan: The plan.
        pattern: Of the user's parameter names, with ``*``.

    Raises:
        ConfigError: No parameter matches.
        PlanError: The plan is of another model.
    """
    analysis = asker.analysis()
    params = list(analysis.graph.of_kind(InputKind.PARAM))
    matching = [
        p for p in params if any(fnmatchcase(name, pattern) for name in (p.param, *p.aliases))
    ]
    names = tuple(dict.fromkeys(p.param for p in matching))
    if not names:
        examples = ", ".join(repr(p.param) for p in params[:3])
        raise ConfigError(f"{pattern!r} matches no parameter; they are such as {examples}")
    if plan.pipelines:
        told = explain_parameters(plan, pattern)
        note = (
            "collectives and other splits: plans of unequal pipelines choose them stage by stage; "
            "plan with pp= or tp= for one mesh, and ask that plan"
        )
        return replace(told, missing=(note,))
    again = Resimulator.of(plan, analysis)
    analysis = again.analysis
    setting = again.setting(analysis.cluster, analysis.model, analysis.optimizer_s_per_byte)
    count = plan.num_microbatches
    rank, collectives = caused_collectives(
        again.programs,
        names,
        analysis.model,
        setting.groups(),
        [count if stage.zero_level >= 2 else 1 for stage in plan.stages],
        plan.mesh,
    )
    owners = [p.owner for p in again.programs.params.values() if p.name in set(names)]
    level = max((plan.stages[owner].zero_level for owner in owners), default=0)
    alternatives, missing = _alternatives(analysis, plan, [p.name for p in matching], level)
    return ParamExplanation(
        pattern=pattern,
        parameters=names,
        splits=_split_words(plan, again.programs, names),
        decided_by=decided_by(plan, names),
        gathered=_gathered_words(again.programs, names),
        collectives=collectives,
        collectives_on=rank_words(plan, rank) if collectives and plan.mesh.pp > 1 else "",
        alternatives=alternatives,
        missing=missing,
    )


def _split_words(plan: Plan, programs: LocalPrograms, names: Sequence[str]) -> tuple[str, ...]:
    """How they are split: in the report's words if the plan has them, else by dim."""
    counts: dict[str, int] = {}
    for name in names:
        text = plan.param_words.get(name) or _placement_words(programs.params[name])
        counts[text] = counts.get(text, 0) + 1
    if len(counts) == 1:
        return tuple(counts)
    return tuple(f"{count} of {len(names)}: {text}" for text, count in counts.items())


def _placement_words(param: ParamSpec) -> str:
    parts = [
        f"{placement} over {axis}"
        for axis, placement in zip(AXES, param.compute, strict=True)
        if not isinstance(placement, Replicate)
    ]
    return ", ".join(parts) or "replicated"


def _gathered_words(programs: LocalPrograms, names: Sequence[str]) -> tuple[str, ...]:
    """Where parameters rest otherwise than they are read."""
    counts: dict[str, int] = {}
    for name in names:
        param = programs.params[name]
        axes = [
            f"{rest} over {axis}"
            for axis, rest, read in zip(AXES, param.storage, param.compute, strict=True)
            if rest != read
        ]
        if axes:
            text = (
                f"at rest {', '.join(axes)}: gathered once per step, before the first forward of "
                "its stage, and kept until the last backward"
            )
            counts[text] = counts.get(text, 0) + 1
        if len(param.stages) > 1:
            text = (
                f"stored by stage {param.owner} and borrowed once per step by stages "
                f"{', '.join(str(s) for s in param.stages if s != param.owner)}"
            )
            counts[text] = counts.get(text, 0) + 1
    total = len(names)
    return tuple(
        text if count == total else f"{count} of {total}: {text}" for text, count in counts.items()
    )


def _alternatives(
    analysis: Analysis, plan: Plan, inputs: Sequence[str], level: int
) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
    """What each other placement over ``tp`` costs, all other splits free to adapt.

    Args:
        analysis: Of the model.
        plan: The plan.
        inputs: The parameters.
        level: ZeRO level of their stages.
    """
    mesh = plan.mesh
    if mesh.tp == 1:
        note = "other splits: the plan has one rank along tp; ask why_not(tp=2) for a plan with two"
        return (), (note,)
    sizes = (plan.num_microbatches, mesh.dp, mesh.tp)
    problem = analysis.problem(sizes, level)
    own = _chosen(problem, plan)
    terms = None if own is None else choice_terms_s(problem, own)
    missing: list[str] = []
    if terms is None:
        base_s = solve_splits(problem).objective_s
        missing.append(
            "alternatives are told against the best splits of the mesh: the plan's own are not "
            "among today's options"
        )
    else:
        base_s = sum(terms.values())
    wanted = {at for at, v in enumerate(problem.variables) if set(v.members) & set(inputs)}
    others = sum(len(set(problem.variables[at].members) - set(inputs)) for at in wanted)
    now = {plan.splits.get(TP_AXIS, {}).get(name, "R") for name in inputs}
    menu = {
        str(_placement(option.choice)) for at in wanted for option in problem.variables[at].options
    }
    found = []
    for placement in sorted(menu - now if len(now) == 1 else menu):
        pinned = _pinned(problem, wanted, placement)
        found.append(_priced(pinned, placement, base_s, plan, others))
    ordered = sorted(found, key=lambda a: (a.delta_s is None, a.delta_s or 0.0, a.placement))
    return tuple(ordered), tuple(missing)


def _placement(choice: Choice | None) -> Choice:
    return R if choice is None else choice


def _chosen(problem: SplitsProblem, plan: Plan) -> tuple[int, ...] | None:
    """The plan's choice as options of a problem; None if one is not among them.

    Options with the same text differ in what the plan does not hold (joins, parts): the first is
    taken, and the choice counts only if it can be priced.
    """
    splits = plan.splits.get(TP_AXIS, {})
    found = []
    for variable in problem.variables:
        text = splits.get(variable.members[0])
        at = next(
            (i for i, o in enumerate(variable.options) if _matches(o.choice, text)),
            0 if len(variable.options) == 1 else None,
        )
        if at is None:
            return None
        found.append(at)
    return tuple(found)


def _matches(choice: Choice | None, text: str | None) -> bool:
    if text is None:
        return choice is None or isinstance(choice, Replicate)
    return str(choice) == text


def _pinned(problem: SplitsProblem, wanted: set[int], placement: str) -> SplitsProblem:
    """The problem with some variables left the options of one placement; as they are if none."""
    variables = []
    for at, variable in enumerate(problem.variables):
        if at in wanted:
            kept = tuple(o for o in variable.options if str(_placement(o.choice)) == placement)
            if not kept:
                return replace(problem, variables=())
            variable = replace(variable, options=kept)
        variables.append(variable)
    return replace(problem, variables=tuple(variables))


def _priced(
    problem: SplitsProblem, placement: str, base_s: float, plan: Plan, num_others: int
) -> Alternative:
    """An alternative with its price; ``num_others`` parameters are decided with those asked for."""
    words = "replicated over tp" if placement == "R" else f"{placement} over tp"
    if num_others:
        words += f" (with {num_others} more of repeated blocks)"
    if not problem.variables:
        return Alternative(
            placement=placement, delta_s=None, text=f"{words}: not possible for all of them"
        )
    try:
        delta_s = solve_splits(problem).objective_s - base_s
    except InfeasibleError:
        return Alternative(
            placement=placement, delta_s=None, text=f"{words}: leaves no legal splits"
        )
    work = "work per step" + (" in all stages together" if len(plan.stages) > 1 else "")
    if abs(delta_s) <= EQUAL * plan.time_s:
        text = f"{words}: costs the same"
    elif delta_s > 0:
        text = f"{words}: {format_time(delta_s)} more {work}, all other splits adapted"
    else:
        text = (
            f"{words}: {format_time(-delta_s)} less {work}, but it was not taken: it needs more "
            "memory, or the constraints exclude it"
        )
    return Alternative(placement=placement, delta_s=delta_s, text=text)
