"""Uses the memory that estimates leave: less is made again where exact figures have room.

Stages are cut under estimated bytes, which add the largest transient of any block to all that is
kept, and with few options for each block. For the cuts that are chosen, options are chosen anew:
from finer menus, and by when their bytes are alive (:mod:`autopar.solver.reopen`). What the exact
peak still differs by moves the limit, a few times. The fastest choice that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.solver.assemble import Outcome
from autopar.solver.ranked import Ranked
from autopar.solver.ranking import Ranker
from autopar.solver.reopen import best_options, needed_bytes
from autopar.solver.stages_problem import bounds, memory_bytes, surrogate_s
from autopar.solver.state_forms import with_options

TRIES = 5
STEP = 4e-3  # share of the limit by which tries differ at least
MOST_KEPT = 24  # blocks that are tried on the device
GAIN = 1e-3  # share of a step below which a try is the last


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
    if set(best.ranked.recompute_words) == {"none"} or all(
        len(block.options) == 1 for block in best.ranked.stage_problem.blocks
    ):
        return best
    table = ranker.tables.finer(best.ranked.table)
    fine = replace(
        best.ranked,
        table=table,
        stage_problem=with_options(best.ranked.stage_problem, table.menus),
    )
    step = int(limit_bytes * STEP)
    fits, exceeds, wide = 0, 0, limit_bytes
    for tried in range(TRIES):
        found = _reopened(fine, ranker, wide)
        if found is None:
            return best
        last = evaluate(found)
        if last.fits:
            fits, before_s = wide, best.figures.step_s
            if last.figures.step_s < before_s:
                best = last
            if tried and before_s - last.figures.step_s < GAIN * before_s:
                return best
        else:
            exceeds = wide
        wide = max(limit_bytes - _excess_bytes(last), fits + step)
        if exceeds:
            wide = min(wide, exceeds - step)
        if wide <= fits or set(best.ranked.recompute_words) == {"none"}:
            return best
    return best


def with_fewer_copies(outcome: Outcome, *, evaluate: Callable[[Ranked], Outcome]) -> Outcome:
    """The same with the last blocks of stages kept on the device, where that fits and is faster.

    What the last blocks keep is copied and brought back with the least beside it, and is the first
    to be freed, which estimates that add up bytes do not see.

    Args:
        outcome: A choice that fits.
        evaluate: Exact figures of a choice.
    """
    best = outcome
    starts = bounds(best.ranked.stages.starts, len(best.ranked.stage_problem.blocks))
    tried = 0
    for low, high in starts:
        for block in reversed(range(low, high)):
            ranked = best.ranked
            option = ranked.stage_problem.blocks[block].options[ranked.stages.options[block]]
            if not option.host_bytes:
                continue
            options = [*ranked.stages.options]
            options[block] = 0  # keeps all
            found = replace(ranked, stages=replace(ranked.stages, options=tuple(options)))
            last = evaluate(found)
            tried += 1
            if not last.fits or last.step_s >= best.step_s or tried > MOST_KEPT:
                break
            best = last
    return best


def _reopened(ranked: Ranked, ranker: Ranker, limit_bytes: int) -> Ranked | None:
    """The same cuts with options chosen anew under a limit; None if nothing fits."""
    problem = replace(ranked.stage_problem, limit_bytes=limit_bytes)
    starts = ranked.stages.starts
    options = best_options(problem, starts)
    if options is None:
        return None
    stages = replace(
        ranked.stages,
        options=options,
        objective_s=surrogate_s(problem, starts, options),
        bound_s=0.0,
        memory_bytes=memory_bytes(problem, starts, options),
        is_optimal=False,
    )
    return ranker.estimated(replace(ranked, stage_problem=problem, stages=stages))


def _excess_bytes(outcome: Outcome) -> int:
    """The most by which a rank's exact peak exceeds its estimate; negative if all are below."""
    ranked = outcome.ranked
    stages = ranked.stages
    estimates = needed_bytes(ranked.stage_problem, stages.starts, stages.options)
    return max(b - a for a, b in zip(estimates, outcome.figures.rank_bytes, strict=True))
