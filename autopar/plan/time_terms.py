"""Where the seconds of a step go: the same four terms for every plan, so that plans compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.plan.types import MeshShape, Plan, TimeParts, TimeTerms
from autopar.units import format_time

TERM_WORDS: Mapping[str, str] = {
    "compute_s": "computing",
    "collectives_s": "collectives of micro-batches",
    "once_s": "once per step (gradients, parameters, sums, optimizer)",
    "waiting_s": "waiting (bubbles, messages)",
}
"""Term -> what it is, in words."""
HOST_NOTE = "told as waiting"
"""What a plan says of seconds outside of its programs, which are in no other term."""
SAME = 5e-4  # a term that differs by less than this share of the step did not change


def busy_terms(times: Sequence[TimeParts], num_microbatches: int) -> TimeTerms:
    """What the stages of one pipeline rank keep it busy with in a step; nothing waits."""
    compute_s = collectives_s = once_s = 0.0
    for time in times:
        comm_s = time.forward_comm_s + time.backward_comm_s
        compute_s += num_microbatches * (time.forward_s + time.backward_s - comm_s)
        collectives_s += num_microbatches * comm_s
        once_s += time.reduce_s + time.unshard_s + time.sync_s + time.optimizer_s
    return TimeTerms(compute_s=compute_s, collectives_s=collectives_s, once_s=once_s)


def time_terms(
    times: Sequence[TimeParts], mesh: MeshShape, num_microbatches: int, step_s: float
) -> TimeTerms:
    """The terms of the pipeline rank that is busy longest.

    Args:
        times: By stage.
        mesh: Stages are dealt round robin over its pipeline ranks.
        num_microbatches: Per step.
        step_s: Seconds of the step; what the rank is not busy with is waiting.
    """
    ranks = [
        busy_terms([times[s] for s in mesh.stages_of(rank)], num_microbatches)
        for rank in range(mesh.pp)
    ]
    busiest = max(ranks, key=lambda terms: terms.total_s)
    return TimeTerms(
        compute_s=busiest.compute_s,
        collectives_s=busiest.collectives_s,
        once_s=busiest.once_s,
        waiting_s=max(0.0, step_s - busiest.total_s),
    )


def plan_terms(plan: Plan) -> TimeTerms | None:
    """The terms of a plan; None if its stages have no figures."""
    if (
        plan.time_s <= 0
        or not plan.stages
        or any(stage.time.forward_s <= 0 for stage in plan.stages)
    ):
        return None
    times = [stage.time for stage in plan.stages]
    return time_terms(times, plan.mesh, plan.num_microbatches, plan.time_s)


def busiest_rank(plan: Plan) -> int:
    """The pipeline rank that is busy longest."""
    mesh, count = plan.mesh, plan.num_microbatches
    times = [stage.time for stage in plan.stages]
    totals = [
        busy_terms([times[s] for s in mesh.stages_of(rank)], count).total_s
        for rank in range(mesh.pp)
    ]
    return totals.index(max(totals))


def term_changes(before: TimeTerms, after: TimeTerms) -> dict[str, float]:
    """Term -> seconds that it grew by (fell, if negative), the largest first; small ones left out.

    >>> term_changes(TimeTerms(compute_s=2.0), TimeTerms(compute_s=1.5, waiting_s=1.0))
    {'waiting_s': 1.0, 'compute_s': -0.5}
    """
    least_s = SAME * max(before.total_s, after.total_s)
    changes = {name: getattr(after, name) - getattr(before, name) for name in TERM_WORDS}
    ordered = sorted(changes.items(), key=lambda item: -item[1])
    return {name: change_s for name, change_s in ordered if abs(change_s) > least_s}


def change_words(changes: Mapping[str, float]) -> str:
    """Changes of terms in words.

    >>> change_words({"waiting_s": 1.0, "compute_s": -0.5})
    'waiting (bubbles, messages) +1 s, computing -500 ms'
    """
    return ", ".join(
        f"{TERM_WORDS[name]} {'+' if change_s > 0 else '-'}{format_time(abs(change_s))}"
        for name, change_s in changes.items()
    )
