"""Why a plan is as it is, with the model at hand: what more memory or bandwidth would be worth.

A shadow price here is no dual of a relaxation but two numbers that were both worked out: the step
of the plan, and the step with the changed limit or cluster.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.cluster import Cluster
from autopar.plan.answers import RE_SIMULATED, RE_SOLVED, PlanExplanation, ShadowPrice
from autopar.plan.diff import diff_plans
from autopar.plan.explain import NEEDS_MODEL, explain_plan
from autopar.plan.types import Plan
from autopar.solver.question import Asker
from autopar.solver.resimulate import Resimulator
from autopar.units import GIB, format_time
from cost_models.what_if import Part, better_cluster, better_prices

FASTER = 1.1
EQUAL = 1e-6  # relative; the same sums in another order


def explain_with_model(asker: Asker, plan: Plan) -> PlanExplanation:
    """:func:`~autopar.plan.explain.explain_plan` with shadow prices.

    Args:
        asker: Of the question that the plan answers.
        plan: The plan.

    Raises:
        PlanError: The plan is of another model.
    """
    told = explain_plan(plan)
    needs_model = NEEDS_MODEL.partition("{what}")[2].partition("{call}")[0]
    missing = [text for text in told.missing if needs_model not in text]
    prices = [_memory_price(asker, plan)]
    simulated, notes = _rate_prices(asker, plan)
    found = [price for price in (*prices, *simulated) if price is not None]
    if prices[0] is None:
        notes = [*notes, "what more memory would be worth: no searches are left"]
    return replace(told, prices=tuple(found), missing=(*missing, *notes))


def _memory_price(asker: Asker, plan: Plan) -> ShadowPrice | None:
    what = "1 GiB more memory on each device"
    asked = asker.question
    if plan.pipelines:  # devices of several kinds have limits of their own
        roomier = _roomier(asked.cluster, GIB)
        other = asker.ask(what, cluster=roomier, limit_bytes=roomier.memory_bytes)
    else:
        other = asker.ask(what, limit_bytes=asked.limit_bytes + GIB)
    if other is None:
        return None
    if isinstance(other, Plan) and is_cheaper(other, plan):
        cost = f"cost {plan.cost_per_step:.4g} -> {other.cost_per_step:.4g} per step, "
        return ShadowPrice(
            what=what,
            method=RE_SOLVED,
            before_s=plan.time_s,
            after_s=other.time_s,
            change=cost + _change(plan, other),
        )
    if plan.objective == "cost" or not isinstance(other, Plan) or other.time_s >= plan.time_s:
        # this plan fits there as well: no answer can be worse than it
        return ShadowPrice(what=what, method=RE_SOLVED, before_s=plan.time_s, after_s=plan.time_s)
    return ShadowPrice(
        what=what,
        method=RE_SOLVED,
        before_s=plan.time_s,
        after_s=other.time_s,
        change=_change(plan, other),
    )


def is_cheaper(plan: Plan, other: Plan) -> bool:
    """Whether a step of a plan costs less than one of another that was planned for its cost."""
    if other.objective != "cost" or plan.cost_per_step is None or other.cost_per_step is None:
        return False
    return plan.cost_per_step < other.cost_per_step * (1 - EQUAL)


def _roomier(cluster: Cluster, extra_bytes: int) -> Cluster:
    """The cluster with more usable memory on each device."""
    machines = tuple(
        replace(
            machine,
            device=replace(machine.device, memory_bytes=machine.device.memory_bytes + extra_bytes),
        )
        for machine in cluster.machines
    )
    return replace(cluster, machines=machines)


def _change(plan: Plan, other: Plan) -> str:
    """What another plan does differently, in a few words."""
    diff = diff_plans(plan, other)
    rows = [c for c in diff.shape if c.what in ("mesh", "micro-batches", "schedule")]
    rows += [c for c in diff.stages if c.what in ("ZeRO level", "operators recomputed")]
    if rows:
        return "with " + ", ".join(map(str, rows))
    counts = [sum(len(s.recompute) for s in p.stages) for p in (plan, other)]
    if counts[0] != counts[1]:
        return f"with {counts[1]:,} operators recomputed instead of {counts[0]:,}"
    return "with other stage cuts" if diff.stages else "with other splits"


def _rate_prices(asker: Asker, plan: Plan) -> tuple[list[ShadowPrice], list[str]]:
    """This plan on faster links and devices."""
    if plan.pipelines:
        return _rate_prices_of_pipelines(asker, plan)
    again = Resimulator.of(plan, asker.analysis())
    cluster, model = again.analysis.cluster, again.analysis.model
    now_s = again.figures(cluster, model).step_s
    notes = []
    if abs(now_s - plan.time_s) > EQUAL * plan.time_s:
        notes.append(
            f"the plan says {format_time(plan.time_s)} and today's prices say "
            f"{format_time(now_s)}: what faster links are worth is told by today's"
        )
    found = []
    for part in _parts(cluster):
        prices = better_prices(model, cluster, part, FASTER)
        what = _part_words(part)
        if prices is None:
            notes.append(f"{what}: prices were measured on this machine, not worked out from it")
            continue
        after_s = again.figures(better_cluster(cluster, part, FASTER), prices).step_s
        asker.progress(f"{what}: {format_time(after_s)}")
        found.append(ShadowPrice(what=what, method=RE_SIMULATED, before_s=now_s, after_s=after_s))
    return sorted(found, key=lambda price: price.after_s - price.before_s), notes


def _rate_prices_of_pipelines(asker: Asker, plan: Plan) -> tuple[list[ShadowPrice], list[str]]:
    """The same pipelines, priced and simulated on faster links and devices."""
    again, cluster = asker.question.in_place, asker.question.cluster
    now = None if again is None else again(plan, cluster)
    if again is None or now is None:
        return [], ["what faster links are worth: the plan's pipelines do not fit today's prices"]
    found = []
    for part in _parts(cluster):
        what = _part_words(part)
        better = again(plan, better_cluster(cluster, part, FASTER))
        if better is None:
            continue
        asker.progress(f"{what}: {format_time(better.time_s)}")
        found.append(
            ShadowPrice(what=what, method=RE_SIMULATED, before_s=now.time_s, after_s=better.time_s)
        )
    return sorted(found, key=lambda price: price.after_s - price.before_s), []


def _parts(cluster: Cluster) -> list[Part]:
    """What of a cluster can get better."""
    found = [Part.DEVICES]
    if any(m.num_devices > 1 for m in cluster.machines):
        found.append(Part.INSIDE)
    if len(cluster.machines) > 1:
        found.append(Part.BETWEEN)
    if cluster.between_sites is not None:
        found.append(Part.SITES)
    return [part for part in Part if part in found]


def _part_words(part: Part) -> str:
    return f"10 % more {'of' if part is Part.DEVICES else 'bandwidth of'} the {part.value}"
