"""Cuts of a chain for one pipeline: a first choice in milliseconds, and a better one.

The greedy choice makes the slowest stage as fast as can be. What ranks with several stages wait for
each other it does not know, nor that a step of few micro-batches is mostly filling and draining:
there the best cuts may be a fifth better. So blocks are moved from it where a step is short, and
every choice is run (:mod:`autopar.solver.recut`).
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.greedy_stages import first_choice
from autopar.solver.recut import Recut, even_starts
from autopar.solver.schedule_choice import sampled_counts, simulated_s
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import (
    StageProblem,
    StageSolution,
    memory_bytes,
    surrogate_s,
)

LONG_CHAIN = 1_000  # blocks
FIRST_TRIALS = 48  # choices that are run for a first choice, at most
FIRST_THINGS = 4_000  # computes of all of them, and what fitting their blocks is worth
OF_A_BLOCK = 4  # computes that take as long as fitting one block
FEWEST_TRIALS = 8  # fewer of them seldom find anything

Starts = tuple[int, ...]


def first_stages(problem: StageProblem) -> StageSolution | None:
    """Cuts and options by the greedy choice, moved where a step is short; None if there is none.

    Args:
        problem: Without fixed starts and without forms.
    """
    if len(problem.blocks) < problem.num_stages:
        return None
    chosen = first_choice(problem)
    if chosen is None and problem.virtual > 1:
        return Recut(problem, max_trials=1).improved(even_starts(problem))
    if chosen is None:
        return None
    starts, options = chosen
    found = StageSolution(
        starts=starts,
        options=options,
        objective_s=surrogate_s(problem, starts, options),
        bound_s=0.0,
        memory_bytes=memory_bytes(problem, starts, options),
        is_optimal=False,
    )
    trials = _trials(problem)
    if trials < FEWEST_TRIALS or problem.virtual == 1:
        return found
    return _faster(problem, found, Recut(problem, trials).improved(starts, even_starts(problem)))


def better_stages(problem: StageProblem, *starts: Starts) -> StageSolution | None:
    """Better cuts and options than known ones; None if nothing fits.

    By CP-SAT, or by moving blocks where ranks have several stages each or the chain is long:
    greedy cuts of hundreds of equal blocks leave little, and the program grows with them. CP-SAT
    sees a surrogate of the step, so that where a step is short blocks are moved from its cuts too.

    Args:
        problem: Without forms.
        starts: Cuts that are known.
    """
    is_long = len(problem.blocks) > LONG_CHAIN and problem.fixed_starts is None
    if problem.virtual > 1 or is_long:
        return Recut(problem).improved(*starts)
    solved = solve_stages(problem)
    trials = _trials(problem)
    if solved is None or trials < FEWEST_TRIALS or problem.fixed_starts is not None:
        return solved
    return _faster(problem, solved, Recut(problem, trials).improved(solved.starts, *starts))


def _trials(problem: StageProblem) -> int:
    """Choices that may be run."""
    computes = 2 * problem.num_stages * sum(n for n, _ in sampled_counts(problem))
    return min(FIRST_TRIALS, FIRST_THINGS // (computes + OF_A_BLOCK * len(problem.blocks)))


def _faster(
    problem: StageProblem, one: StageSolution, other: StageSolution | None
) -> StageSolution:
    """The one whose step is shorter when it is run."""
    rows: Sequence[StageSolution] = [one] if other is None else [one, other]
    return min(rows, key=lambda row: simulated_s(problem.mesh, problem, row))
