"""Where the time of a candidate goes, in the terms of :mod:`autopar.plan.time_terms`."""

from __future__ import annotations

from autopar.plan.time_terms import time_terms
from autopar.plan.types import MeshShape, TimeTerms
from autopar.solver.exact import ExactFigures
from autopar.solver.ranked import Ranked
from autopar.solver.splits_problem import SplitsProblem, is_once, sharing_group
from autopar.solver.stages_problem import bounds


def simulated_terms(figures: ExactFigures, mesh: MeshShape, num_microbatches: int) -> TimeTerms:
    """Of a candidate that was localized and simulated."""
    times = [stage.time for stage in figures.stages]
    return time_terms(times, mesh, num_microbatches, figures.step_s)


def estimated_terms(ranked: Ranked) -> TimeTerms:
    """Of a candidate that was estimated from its menus.

    Menus have forward and backward whole: collectives get the share that the reshards between
    operators have in the splits. Those inside an operator's own local form count as computing.
    """
    shape, problem = ranked.shape, ranked.stage_problem
    chosen = [b.options[o] for b, o in zip(problem.blocks, ranked.stages.options, strict=True)]
    runs = bounds(ranked.stages.starts, len(problem.blocks))
    busy: list[tuple[float, float]] = []
    for rank in range(shape.mesh.pp):
        own = [i for s in shape.mesh.stages_of(rank) for i in range(*runs[s])]
        body_s = shape.num_microbatches * sum(chosen[i].total_s for i in own)
        busy.append((body_s, sum(problem.blocks[i].step_s for i in own)))
    body_s, once_s = max(busy, key=sum)
    moved_s = body_s * reshard_share(ranked.problem, ranked.splits.options)
    return TimeTerms(
        compute_s=body_s - moved_s,
        collectives_s=moved_s,
        once_s=once_s,
        waiting_s=max(0.0, ranked.estimate_s - body_s - once_s),
    )


def reshard_share(problem: SplitsProblem, options: tuple[int, ...]) -> float:
    """Share of reshards in the seconds of micro-batches under a choice of splits."""
    chosen = [v.options[at] for v, at in zip(problem.variables, options, strict=True)]
    operators_s = sum(
        len(variable.members) * option.time_s
        for variable, option in zip(problem.variables, chosen, strict=True)
        if not variable.is_once
    )
    moves_s = 0.0
    for flow in problem.flows:
        source = chosen[flow.variable].results[flow.result]
        made: dict[object, float] = {}
        for reader in flow.readers:
            if is_once(reader.when):
                continue
            want = problem.seen(chosen[reader.variable].operands[reader.operand], reader.when)
            move = flow.moves[problem.seen(source, reader.when), want]
            made[sharing_group(reader.when, move), want] = move.time_s
        moves_s += flow.count * problem.num_microbatches * sum(made.values())
    total_s = operators_s + moves_s
    return moves_s / total_s if total_s > 0 else 0.0
