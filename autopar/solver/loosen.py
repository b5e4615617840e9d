"""Uses the memory that estimates leave: less is made again where exact figures have room.

Stages are cut under estimated bytes, which add the largest transient of any block to all that is
kept; the exact peak differs. The limit of the estimate is moved by that difference and options are
chosen anew for the same cuts, a few times. The fastest choice that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.solver.assemble import Outcome
from autopar.solver.ranked import Misfit, Ranked
from autopar.solver.ranking import Ranker

TRIES = 5
STEP = 4e-3  # share of the limit by which tries differ at least


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
    best = last = outcome
    step = int(limit_bytes * STEP)
    fits, exceeds = max(outcome.ranked.stages.memory_bytes), 0
    for _ in range(TRIES):
        blocks = last.ranked.stage_problem.blocks
        if set(best.ranked.recompute_words) == {"none"} or all(len(b.options) == 1 for b in blocks):
            return best
        wide = max(limit_bytes - _excess_bytes(last), fits + step)
        if exceeds:
            wide = min(wide, exceeds - step)
        if wide <= fits:
            return best
        found = ranker.reopened(best.ranked, wide)
        if isinstance(found, Misfit):
            return best
        last = evaluate(found)
        if not last.fits:
            exceeds = wide
            continue
        fits = wide
        if last.figures.step_s < best.figures.step_s:
            best = last
    return best


def _excess_bytes(outcome: Outcome) -> int:
    """The most by which a rank's exact peak exceeds its estimate; negative if all are below."""
    estimates, peaks = outcome.ranked.stages.memory_bytes, outcome.figures.rank_bytes
    return max(b - a for a, b in zip(estimates, peaks, strict=True))
