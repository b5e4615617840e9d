"""Cuts and options as a solution that no solver has made."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.solver.stages_problem import (
    StageProblem,
    StageSolution,
    memory_bytes,
    surrogate_s,
)


def solution_of(
    problem: StageProblem, starts: Sequence[int], options: Sequence[int]
) -> StageSolution:
    return StageSolution(
        starts=tuple(starts),
        options=tuple(options),
        objective_s=surrogate_s(problem, starts, options),
        bound_s=0.0,
        memory_bytes=memory_bytes(problem, starts, options),
        is_optimal=False,
    )
