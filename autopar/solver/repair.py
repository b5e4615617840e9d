"""A choice of splits where some values can't reach their readers, with few options changed.

Splits of a micro-batch's work are found without ZeRO, which stores parameters by data ranks. Under
a level that does, a gradient may have no way to the shards that the level stores: then only the
options at the two ends of such a value are chosen anew, those that cost least beside all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from autopar.sharding.placement import Layout
from autopar.solver.splits_problem import Flow, SplitsProblem, sharing_group

MAX_REPAIRS = 8  # values that are seen to one after another


def repaired(problem: SplitsProblem, options: Sequence[int]) -> tuple[int, ...] | None:
    """Options under which every value can be brought to its readers.

    Args:
        problem: The problem.
        options: A choice; returned as it is where nothing is amiss.

    Returns:
        None if changing the ends of what is amiss does not help.
    """
    chosen = list(options)
    touching: dict[int, list[Flow]] = {}
    for flow in problem.flows:
        for at in {flow.variable, *(r.variable for r in flow.readers)}:
            touching.setdefault(at, []).append(flow)
    for _ in range(MAX_REPAIRS):
        ends = _broken(problem, chosen)
        if ends is None:
            return tuple(chosen)
        near = list({id(f): f for at in ends for f in touching[at]}.values())
        best: tuple[float, dict[int, int]] | None = None
        for found in product(*(range(len(problem.variables[at].options)) for at in ends)):
            trial = dict(zip(ends, found, strict=True))
            cost_s = _cost_s(problem, chosen, trial, near)
            if cost_s is not None and (best is None or cost_s < best[0]):
                best = cost_s, trial
        if best is None:
            return None
        for at, option in best[1].items():
            chosen[at] = option
    return tuple(chosen) if _broken(problem, chosen) is None else None


def _broken(problem: SplitsProblem, options: Sequence[int]) -> tuple[int, ...] | None:
    """The variables at the ends of the first value that can't reach a reader."""
    for flow in problem.flows:
        source = problem.variables[flow.variable].options[options[flow.variable]]
        for reader in flow.readers:
            target = problem.variables[reader.variable].options[options[reader.variable]]
            have = problem.seen(source.results[flow.result], reader.when)
            want = problem.seen(target.operands[reader.operand], reader.when)
            if (have, want) not in flow.moves:
                return tuple(dict.fromkeys((flow.variable, reader.variable)))
    return None


def _cost_s(
    problem: SplitsProblem, options: Sequence[int], trial: Mapping[int, int], flows: Sequence[Flow]
) -> float | None:
    """Seconds per step of some variables under a trial and of the values around them.

    None if one of these values can't reach a reader.
    """
    total_s = 0.0
    for at, option in trial.items():
        variable = problem.variables[at]
        total_s += len(variable.members) * variable.options[option].time_s
    for flow in flows:
        option = trial.get(flow.variable, options[flow.variable])
        source = problem.variables[flow.variable].options[option].results[flow.result]
        made: dict[tuple[int, Layout], float] = {}
        for reader in flow.readers:
            option = trial.get(reader.variable, options[reader.variable])
            target = problem.variables[reader.variable].options[option].operands[reader.operand]
            have, want = problem.seen(source, reader.when), problem.seen(target, reader.when)
            move = flow.moves.get((have, want))
            if move is None:
                return None
            made[sharing_group(reader.when, move), want] = move.time_s * problem.weight(reader.when)
        total_s += flow.count * sum(made.values())
    return total_s
