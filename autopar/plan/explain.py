"""What a plan says about itself: what binds, where its time goes, who lost and why.

Only what the plan holds is used, so that it can be asked of a plan file without the model. What
needs the model says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import isfinite

from autopar.errors import ConfigError
from autopar.plan.answers import Binding, Loss, ParamExplanation, PlanExplanation
from autopar.plan.explain_pipelines import far_words, pipeline_binding
from autopar.plan.level_words import level_words
from autopar.plan.pipelines import share_unit
from autopar.plan.time_terms import busiest_rank, plan_terms, term_changes
from autopar.plan.types import Candidate, MemoryParts, MeshShape, Plan, TimeTerms
from autopar.units import format_bytes, format_time

NEEDS_MODEL = (
    "{what} needs the model: ask the compiled module ({call}), or run "
    "python -m autopar {command} MODULE:FUNCTION PLAN.json"
)
_PART_WORDS = {
    "params_bytes": "parameters",
    "grads_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations",
    "transient_bytes": "values inside one operator or block",
    "buffers_bytes": "buffers",
}
_SHOWN_PARTS = 3
ESTIMATE_AGREES = 0.05  # relative
_SPLIT_FREE = "replicated over tp"


def explain_plan(plan: Plan) -> PlanExplanation:
    """What binds, where the time goes, and the runners-up with why they lost."""
    terms = plan_terms(plan)
    if plan.pipelines:
        binding = pipeline_binding(plan)
    else:
        binding = [*_memory_binding(plan), *_time_binding(plan, terms), *_link_binding(plan)]
    missing = [
        NEEDS_MODEL.format(
            what="what more memory or bandwidth would be worth",
            call="model.explain()",
            command="explain",
        )
    ]
    if terms is None and not plan.pipelines:
        missing.append("the plan has no predicted times; plan again for them")
    elif terms is not None and plan.runners_up and all(c.terms is None for c in plan.runners_up):
        missing.append(
            "the terms of the runners-up: the plan was saved before they were kept; plan again"
        )
    return PlanExplanation(
        binding=tuple(binding),
        terms=terms,
        losses=tuple(_loss(candidate, plan, terms) for candidate in plan.runners_up),
        missing=tuple(missing),
    )


def explain_parameters(plan: Plan, pattern: str) -> ParamExplanation:
    """How the parameters that match a pattern are split, as far as the plan says.

    Args:
        plan: The plan.
        pattern: Of the user's parameter names, with ``*``.

    Raises:
        ConfigError: No parameter matches.
    """
    names = parameter_names(plan)
    found = tuple(name for name in names if fnmatchcase(name, pattern))
    if not found:
        examples = ", ".join(map(repr, names[:3])) or "not kept in this plan"
        raise ConfigError(f"{pattern!r} matches no parameter of the plan; they are {examples}, ...")
    words: dict[str, int] = {}
    for name in found:
        text = plan.param_words.get(name, "replicated" if plan.mesh.num_ranks > 1 else "whole")
        words[text] = words.get(text, 0) + 1
    return ParamExplanation(
        pattern=pattern,
        parameters=found,
        splits=tuple(
            text if count == len(found) else f"{count} of {len(found)}: {text}"
            for text, count in words.items()
        ),
        decided_by=decided_by(plan, found),
        missing=(
            NEEDS_MODEL.format(
                what="collectives that they cause and what other splits would cost",
                call=f"model.explain({pattern!r})",
                command="explain",
            ),
        ),
    )


def parameter_names(plan: Plan) -> list[str]:
    """The user's names of the parameters, as far as the plan keeps them."""
    named = [target for name, target in plan.names.items() if name.startswith("p_")]
    return list(dict.fromkeys([*plan.param_words, *named]))


def decided_by(plan: Plan, names: tuple[str, ...]) -> str:
    """Who fixed the split of parameters: the solver, or constraints of the user."""
    patterns = [
        item.value
        for item in plan.constraints
        if item.name == "placements"
        and item.origin == "user"
        and any(fnmatchcase(name, item.value.rpartition(": ")[0]) for name in names)
    ]
    if patterns:
        return "the user's placements: " + "; ".join(patterns)
    return "the solver"


def candidate_name(
    mesh: MeshShape, num_microbatches: int, schedule: str, levels: Sequence[int], recompute: str
) -> str:
    """A plan in a few words.

    Args:
        mesh: Of the plan.
        num_microbatches: Per step.
        schedule: Its name.
        levels: ZeRO level of every stage, or the one of all.
        recompute: In words, or ``"none"``.
    """
    parts = [str(mesh), f"{num_microbatches} micro-batch{'es' * (num_microbatches != 1)}", schedule]
    if mesh.dp > 1:
        parts.append(f"ZeRO {level_words(levels)}")
    if recompute != "none":
        parts.append(f"recompute {recompute}")
    return ", ".join(parts)


def plan_name(plan: Plan) -> str:
    """The plan in a few words, as runners-up are named."""
    if plan.pipelines:
        unit = share_unit(plan.assumptions)
        shapes = "; ".join(pipeline.words(unit) for pipeline in plan.pipelines)
        count = len(plan.pipelines)
        return f"{count} pipeline{'s' * (count != 1)}, {plan.schedule.value}: {shapes}"
    levels = [stage.zero_level for stage in plan.stages]
    count = sum(len(stage.recompute) for stage in plan.stages)
    recompute = f"of {count:,} operators" if count else "none"
    name = candidate_name(plan.mesh, plan.num_microbatches, plan.schedule.value, levels, recompute)
    name += ", optimizer state in host memory" if plan.offload else ""
    return f"{name}, saved values in host memory" if plan.offloads_activations else name


def largest_parts(memory: MemoryParts) -> str:
    """The parts that take most of a stage's memory."""
    amounts = {words: getattr(memory, name) for name, words in _PART_WORDS.items()}
    ordered = sorted(amounts.items(), key=lambda item: -item[1])[:_SHOWN_PARTS]
    return ", ".join(f"{words} {format_bytes(amount)}" for words, amount in ordered if amount)


def fullest_rank(plan: Plan) -> tuple[int, MemoryParts]:
    """The pipeline rank that holds most, and what it holds; its largest transient counts once."""
    found = []
    for rank in range(plan.mesh.pp):
        parts = [plan.stages[s].memory for s in plan.mesh.stages_of(rank)]
        summed = {name: sum(getattr(p, name) for p in parts) for name in _PART_WORDS}
        summed["transient_bytes"] = max((p.transient_bytes for p in parts), default=0)
        found.append(MemoryParts(**summed))
    totals = [memory.total_bytes for memory in found]
    return totals.index(max(totals)), found[totals.index(max(totals))]


def rank_words(plan: Plan, rank: int) -> str:
    """A pipeline rank in words: its stages and ranks."""
    stages = [plan.stages[s] for s in plan.mesh.stages_of(rank)]
    devices = stages[0].devices
    ranks = f"ranks {devices[0]}-{devices[-1]}" if len(devices) > 1 else f"rank {devices[0]}"
    if len(plan.stages) == 1:
        return ranks
    numbers = [str(stage.index) for stage in stages]
    which = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"stage{'s' if len(numbers) > 1 else ''} {which} ({ranks})"


def _memory_binding(plan: Plan) -> list[Binding]:
    limit = plan.memory_limit_bytes
    if not plan.stages or limit <= 0 or plan.peak_bytes <= 0:
        return []
    share = plan.peak_bytes / limit
    rank, memory = fullest_rank(plan)
    where = rank_words(plan, rank)
    text = (
        f"memory of {where}: {format_bytes(plan.peak_bytes)} of {format_bytes(limit)} "
        f"({100 * share:.1f} %) at the peak{far_words(share)}; most of it "
        f"{largest_parts(memory)}"
    )
    paid = []
    count = sum(bool(stage.recompute) for stage in plan.stages)
    if count:
        which = "" if len(plan.stages) == 1 else f" in {count} of {len(plan.stages)} stages"
        paid.append(f"operators are recomputed{which}")
    count = sum(bool(stage.offload) for stage in plan.stages)
    if count:
        which = "" if len(plan.stages) == 1 else f" in {count} of {len(plan.stages)} stages"
        paid.append(f"saved values go to host memory{which}")
    levels = [s.zero_level for s in plan.stages]
    if max(levels[s] for s in plan.mesh.stages_of(rank)) >= 2:
        paid.append(f"ZeRO {level_words(levels)} shards state")
    if paid:
        text += f"; {', '.join(paid)}"
    return [Binding(kind="memory", where=where, share=share, text=text)]


def _time_binding(plan: Plan, terms: TimeTerms | None) -> list[Binding]:
    if terms is None:
        return []
    rank = busiest_rank(plan)
    where = rank_words(plan, rank)
    busy = 1 - terms.waiting_s / plan.time_s
    text = (
        f"time of {where}: busy for {100 * busy:.1f} % of the step, computing for "
        f"{100 * terms.compute_s / plan.time_s:.1f} %"
    )
    if plan.mesh.pp > 1:
        text += f"; it waits for {100 * (1 - busy):.1f} %, other pipeline ranks for as much or more"
    return [Binding(kind="time", where=where, share=busy, text=text)]


def _link_binding(plan: Plan) -> list[Binding]:
    """The axis whose collectives take longest, and its link."""
    if plan.time_s <= 0:
        return []
    seconds: dict[str, float] = {}
    for rank in range(plan.mesh.pp):
        own: dict[str, float] = {}
        for stage in (plan.stages[s] for s in plan.mesh.stages_of(rank)):
            for total in stage.collectives:
                own[total.axis] = own.get(total.axis, 0.0) + total.time_s
        for axis, time_s in own.items():
            seconds[axis] = max(seconds.get(axis, 0.0), time_s)
    message_s = max((s.time.p2p_s for s in plan.stages), default=0.0)
    if plan.mesh.pp > 1 and message_s > 0:
        seconds["pp"] = 2 * plan.num_microbatches * plan.mesh.virtual * message_s
    found = []
    for axis, time_s in sorted(seconds.items(), key=lambda item: -item[1]):
        share = time_s / plan.time_s
        if share < 1e-4:
            continue
        link = plan.links.get(axis, "")
        what = "messages between stages" if axis == "pp" else f"collectives over {axis}"
        text = f"{what}: {format_time(time_s)} of a step ({100 * share:.1f} %)"
        found.append(
            Binding(kind="link", where=axis, share=share, text=text + f" over {link}" * bool(link))
        )
    return found


def like_for_like_s(plan: Plan, measure: str) -> float:
    """Seconds of the plan by the measure that a runner-up was given: simulated, or estimated."""
    return plan.objective_s if measure == "estimated" and plan.objective_s > 0 else plan.time_s


def agrees(plan: Plan) -> bool:
    """Whether the estimate of the plan is about what was simulated."""
    return abs(plan.objective_s - plan.time_s) <= ESTIMATE_AGREES * plan.time_s


def _pipelines_loss(candidate: Candidate, plan: Plan) -> Loss:
    """A runner-up of a plan of unequal pipelines: its reason begins with its shapes."""
    name, _, figures = candidate.reason.partition("; simulated: ")
    percent = 100 * (candidate.time_s / plan.time_s - 1) if plan.time_s > 0 else 0.0
    reason = f"simulated {format_time(candidate.time_s)}, {percent:+.1f} %"
    costs = figures.partition(", ")[2]
    return Loss(
        name=name,
        time_s=candidate.time_s,
        measure="simulated",
        reason=f"{reason}, {costs}" if costs else reason,
    )


def _loss(candidate: Candidate, plan: Plan, terms: TimeTerms | None) -> Loss:
    if plan.pipelines:
        return _pipelines_loss(candidate, plan)
    name = candidate_name(
        candidate.mesh,
        candidate.num_microbatches,
        candidate.schedule.value,
        candidate.zero_levels or (candidate.zero_level,),
        candidate.recompute,
    )
    time_s = candidate.time_s if isfinite(candidate.time_s) else 0.0
    measure = candidate.reason.partition(":")[0]
    if measure not in ("simulated", "estimated") or time_s <= 0:
        return Loss(name=name, time_s=time_s, measure="memory", reason=candidate.reason)
    changes = {}
    if candidate.terms is not None and terms is not None:
        changes = term_changes(terms, candidate.terms)
    own_s = like_for_like_s(plan, measure)
    percent = 100 * (time_s / own_s - 1) if own_s > 0 else 0.0
    reason = f"{measure} {format_time(time_s)}, {percent:+.1f} %"
    if measure == "estimated":
        reason += f" against the estimate of this plan, {format_time(own_s)}"
        if not agrees(plan):
            changes = {}  # seconds of an estimate less seconds of a simulation would mislead
    if percent <= 0.05 and measure == "simulated":
        reason = f"simulated {format_time(time_s)}, as fast and less simple"
    elif percent <= 0 and measure == "estimated":
        reason += ": it was not simulated, others were ranked before it"
    return Loss(name=name, time_s=time_s, measure=measure, changes=changes, reason=reason)
