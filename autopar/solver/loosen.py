"""Uses memory that estimates had left: less is made again where exact figures leave room.

Stages are cut under estimated bytes, which add the largest transient of any block to all that is
kept. The exact peak of the plan that comes out may lie below; the limit of the estimate is then
raised by the difference, and the plan is cut again. What does not fit, or is no faster, is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.solver.assemble import Outcome
from autopar.solver.ranking import Misfit, Ranked, Ranker

TRIES = 4
LEAST_GAIN = 1e-6  # of the seconds of a step
LEAST_ROOM = 1e-3  # of the limit


def loosened(
    outcome: Outcome,
    *,
    evaluate: Callable[[Ranked], Outcome],
    ranker: Ranker,
    limit_bytes: int,
) -> Outcome:
    """The same shape with as little made again as the exact bytes allow.

    Args:
        outcome: A choice that fits.
        evaluate: Exact figures of a choice.
        ranker: Cuts stages.
        limit_bytes: Memory of a device.
    """
    best = outcome
    low = min(best.ranked.stage_problem.limit_bytes, limit_bytes)
    high: int | None = None
    for _ in range(TRIES):
        if all(len(b.options) == 1 for b in best.ranked.stage_problem.blocks):
            return best
        if set(best.ranked.recompute_words) == {"none"}:
            return best
        wide = limit_bytes + _spare_bytes(best) if high is None else (low + high) // 2
        if wide - low <= LEAST_ROOM * limit_bytes:
            return best
        found = ranker.refine(best.ranked, wide)
        if isinstance(found, Misfit):
            return best
        trial = evaluate(found)
        if not trial.fits:
            high = wide
            continue
        low = wide
        if trial.figures.step_s < best.figures.step_s * (1 - LEAST_GAIN):
            best = trial
    return best


def _spare_bytes(outcome: Outcome) -> int:
    """By how much every rank's estimate exceeds its exact peak."""
    estimates, peaks = outcome.ranked.stages.memory_bytes, outcome.figures.rank_bytes
    return min(a - b for a, b in zip(estimates, peaks, strict=True))
