"""A lower bound of every choice: what the devices could do if nothing ever waited.

Let ``a[c, j]`` be the least device-seconds per sample of block ``j`` on class ``c``, over all kinds
and options, memory and messages free. In a step of ``T`` seconds a class of ``N_c`` devices has
``N_c T`` of them, and each of the ``B`` samples passes each block once::

    minimise T   with   sum_c y[c, j] = B          for every block j
                        sum_j a[c, j] y[c, j] <= N_c T   for every class c
                        y >= 0

The optimum of this linear program (solved by GLOP) is below every plan's time: it is the sum of
speeds where all blocks are equally faster on a class. The first micro-batch of any pipeline has to
pass all blocks one after another, which is a bound of its own.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]  # has no stubs

from autopar.solver.mixed_problem import MixedProblem

TOLERANCE = 1e-7  # of the solver: taken off, so that rounding never lifts the bound
GUARD_S = 60.0


def device_seconds(problem: MixedProblem) -> tuple[tuple[float, ...], ...]:
    """``a[c, j]``, infinite for a class that has no kind."""
    rows = []
    for c in range(len(problem.classes)):
        row = [float("inf")] * problem.num_blocks
        for kind in problem.kinds:
            if kind.device_class != c:
                continue
            share = kind.num_devices / kind.samples
            for j, block in enumerate(kind.blocks):
                row[j] = min(row[j], share * min(o.total_s for o in block.options))
        rows.append(tuple(row))
    return tuple(rows)


def time_bound_s(problem: MixedProblem) -> float:
    """A lower bound of the simulated seconds of a step, over all choices."""
    return max(_speed_bound_s(problem), _pass_bound_s(problem))


def cost_bound(problem: MixedProblem) -> float:
    """A lower bound of the price of a step: every block where it is cheapest, without waiting."""
    rows = device_seconds(problem)
    total = 0.0
    for j in range(problem.num_blocks):
        total += min(
            rows[c][j] * (cls.cost_per_hour or 0.0) / 3600.0
            for c, cls in enumerate(problem.classes)
            if rows[c][j] < float("inf")
        )
    return total * problem.batch


def _pass_bound_s(problem: MixedProblem) -> float:
    return sum(
        min(min(o.total_s for o in kind.blocks[j].options) for kind in problem.kinds)
        for j in range(problem.num_blocks)
    )


def _speed_bound_s(problem: MixedProblem) -> float:
    rows = device_seconds(problem)
    classes = [c for c, row in enumerate(rows) if row[0] < float("inf")]
    alike = Counter(tuple(rows[c][j] for c in classes) for j in range(problem.num_blocks))
    scale = max(max(costs) for costs in alike) or 1.0
    program = mathopt.Model()
    time = program.add_variable(lb=0.0)
    work: list[list[mathopt.LinearTerm]] = [[] for _ in classes]
    for costs, count in sorted(alike.items()):
        shares = [program.add_variable(lb=0.0, ub=1.0) for _ in classes]
        program.add_linear_constraint(mathopt.fast_sum(shares) == 1.0)
        for terms, share, cost in zip(work, shares, costs, strict=True):
            terms.append(share * (count * cost / scale))
    for c, terms in zip(classes, work, strict=True):
        program.add_linear_constraint(
            mathopt.fast_sum(terms) <= problem.classes[c].num_devices * time
        )
    program.minimize(time)
    found = mathopt.solve(
        program,
        mathopt.SolverType.GLOP,
        params=mathopt.SolveParameters(threads=1, time_limit=timedelta(seconds=GUARD_S)),
    )
    if found.termination.reason is not mathopt.TerminationReason.OPTIMAL:
        return 0.0
    least_s: float = found.objective_value()
    return least_s * scale * problem.batch * (1 - TOLERANCE)
