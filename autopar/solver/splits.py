"""Per-operator splits by a mixed-integer program in flow form, solved by SCIP.

Variables: ``z[v, k]`` variable v takes option k (binary); per flow and reader ``e[p, q]`` what the
producer yields in layout p is read in layout q (continuous); per flow, layouts and sharing group
``f[p, q]`` the reshard from p to q is made (continuous). Minimise

    ``sum members * time * z  +  sum count * weight * move * f``     subject to

(1) one option:   ``sum_k z[v, k] = 1``
(2) flow out:     ``sum_q e[p, q] = sum of z over the producer's options that yield p``
(3) flow in:      ``sum_p e[p, q] = sum of z over the reader's options that want q``
(4) sharing:      ``f[p, q] >= e[p, q]`` for every reader of the group
(5) memory:       ``sum members * bytes * z <= limit``, if there is one

Rows (2) and (3) are equalities, so that with integral z every e is integral and needs no integrality
of its own. A layout pair that can't be made has no ``e``. Where a group has one reader, f is e; where
one side has a single layout, e is the other side's sum and needs no variable.

Planning is deterministic: one thread, a fixed seed, a limit of nodes. The wall clock only guards.

Source: the equality form after the transportation polytope, ours; sharing rows, ours.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from ortools.math_opt.python import mathopt

from autopar.errors import InfeasibleError, Shortfall
from autopar.sharding.decisions import Choice
from autopar.sharding.placement import Layout, Placement, Replicate
from autopar.solver.splits_problem import (
    Flow,
    SplitsProblem,
    SplitsSolution,
    choice_memory_bytes,
    choice_terms_s,
    sharing_group,
)

NODE_LIMIT = 2000  # work limit of SCIP: branch-and-bound nodes
RELATIVE_GAP = 1e-7
GUARD_S = 300.0

Term = mathopt.Variable | mathopt.LinearBase | float


def solve_splits(
    problem: SplitsProblem,
    *,
    node_limit: int = NODE_LIMIT,
    guard_s: float = GUARD_S,
    start: Sequence[int] | None = None,
) -> SplitsSolution:
    """The cheapest choice.

    Args:
        problem: Variables, flows, prices.
        node_limit: Branch-and-bound nodes.
        guard_s: Wall-clock seconds, as a guard only.
        start: A choice to start from.

    Raises:
        InfeasibleError: No choice is legal, or none fits the memory bound.
    """
    if all(len(v.options) == 1 for v in problem.variables):
        return _only_choice(problem)
    program = _Program(problem)
    if start is not None:
        program.hint(start)
    parameters = mathopt.SolveParameters(
        threads=1,
        random_seed=0,
        node_limit=node_limit,
        relative_gap_tolerance=RELATIVE_GAP,
        time_limit=datetime.timedelta(seconds=guard_s),
    )
    result = mathopt.solve(program.model, mathopt.SolverType.GSCIP, params=parameters)
    if not result.has_primal_feasible_solution():
        raise _nothing_fits(problem, result.termination.reason.name)
    options = program.read(result)
    terms = choice_terms_s(problem, options)
    assert terms is not None, "the program allowed a reshard that can't be made"
    objective_s = sum(terms.values())
    reason = result.termination.reason
    is_optimal = reason is mathopt.TerminationReason.OPTIMAL
    limit = result.termination.limit
    stopped_by = ""
    if not is_optimal:
        stopped_by = "nodes" if limit is mathopt.Limit.NODE else "time"
    bound_s = result.best_objective_bound() * program.unit_s + problem.fixed_s
    return SplitsSolution(
        options=options,
        objective_s=objective_s,
        bound_s=min(objective_s, bound_s),
        status="optimal" if is_optimal else "feasible",
        stopped_by=stopped_by,
        num_columns=program.num_columns,
        terms_s=terms,
    )


def _only_choice(problem: SplitsProblem) -> SplitsSolution:
    options = (0,) * len(problem.variables)
    terms = choice_terms_s(problem, options)
    memory = choice_memory_bytes(problem, options)
    if terms is None or (problem.limit_bytes is not None and memory > problem.limit_bytes):
        raise _nothing_fits(problem, "INFEASIBLE")
    total_s = sum(terms.values())
    return SplitsSolution(
        options=options, objective_s=total_s, bound_s=total_s, status="optimal", terms_s=terms
    )


def _nothing_fits(problem: SplitsProblem, status: str) -> InfeasibleError:
    shortfalls = []
    if problem.limit_bytes is not None:
        least = sum(
            len(v.members) * min(o.memory_bytes for o in v.options) for v in problem.variables
        )
        shortfalls.append(
            Shortfall(
                what="memory of the operators' splits",
                needed=least,
                available=problem.limit_bytes,
                unit="bytes",
                remedy="split over more ranks, or recompute",
            )
        )
    return InfeasibleError(
        f"no splits of {len(problem.variables)} operator classes are possible ({status})",
        tuple(shortfalls),
    )


def tp_choices(problem: SplitsProblem, options: Sequence[int]) -> dict[str, Choice]:
    """Operator -> strategy and input -> placement; what is replicated is left out."""
    choices: dict[str, Choice] = {}
    for variable, at in zip(problem.variables, options, strict=True):
        choice = variable.options[at].choice
        if choice is not None and not isinstance(choice, Replicate):
            choices.update(dict.fromkeys(variable.members, choice))
    return choices


def options_of(
    problem: SplitsProblem, choices: dict[str, Choice], *, default: Placement | None = None
) -> tuple[int, ...] | None:
    """The inverse of :func:`tp_choices`, or None if a choice is not in the problem's menus."""
    options = []
    for variable in problem.variables:
        wanted = choices.get(variable.members[0])
        found = [
            k
            for k, o in enumerate(variable.options)
            if o.choice == wanted or (wanted is None and isinstance(o.choice, Replicate))
        ]
        if not found and len(variable.options) > 1:
            return None
        options.append(found[0] if found else 0)
    del default
    return tuple(options)


class _Program:
    """The MathOpt model; equation numbers as in the module's text."""

    def __init__(self, problem: SplitsProblem) -> None:
        self.problem = problem
        self.model = mathopt.Model(name="splits")
        self.num_columns = 0
        self.unit_s = self._unit()
        self._terms: list[mathopt.LinearBase] = []
        self._z = self._choices()
        self._joins_by_flow()
        self._memory()
        self.model.minimize(mathopt.fast_sum(self._terms))

    def _unit(self) -> float:
        """Seconds per unit of the objective, so that the terms are neither tiny nor huge."""
        times = [o.time_s * len(v.members) for v in self.problem.variables for o in v.options]
        return max(sum(times) / max(1, len(times)), 1e-9)

    def _choices(self) -> list[list[mathopt.LinearBase | float]]:
        rows: list[list[mathopt.LinearBase | float]] = []
        for variable in self.problem.variables:
            scale = len(variable.members) / self.unit_s
            if len(variable.options) == 1:
                rows.append([1.0])
                self._terms.append(_constant(variable.options[0].time_s * scale))
                continue
            row = [self.model.add_binary_variable() for _ in variable.options]
            self.num_columns += len(row)
            self.model.add_linear_constraint(mathopt.fast_sum(row) == 1.0)  # (1)
            for z, option in zip(row, variable.options, strict=True):
                if option.time_s:
                    self._terms.append(option.time_s * scale * z)
            rows.append(list(row))
        return rows

    def _by_layout(
        self, variable: int, pick: Sequence[Layout]
    ) -> dict[Layout, mathopt.LinearBase | float]:
        """Layout -> sum of the z that give it."""
        sums: dict[Layout, list[mathopt.LinearBase | float]] = {}
        for z, layout in zip(self._z[variable], pick, strict=True):
            sums.setdefault(layout, []).append(z)
        if len(sums) == 1:
            return {next(iter(sums)): 1.0}
        return {k: v[0] if len(v) == 1 else mathopt.fast_sum(v) for k, v in sums.items()}

    def _joins_by_flow(self) -> None:
        for flow in self.problem.flows:
            shared: dict[tuple[int, Layout, Layout], list[mathopt.LinearBase | float]] = {}
            weights: dict[tuple[int, Layout, Layout], float] = {}
            for reader in flow.readers:
                options = self.problem.variables[flow.variable].options
                source = [self.problem.seen(o.results[flow.result], reader.when) for o in options]
                options = self.problem.variables[reader.variable].options
                target = [self.problem.seen(o.operands[reader.operand], reader.when) for o in options]
                produced = self._by_layout(flow.variable, source)
                wanted = self._by_layout(reader.variable, target)
                for pair, amount in self._transport(flow, produced, wanted).items():
                    move = flow.moves[pair]
                    key = (sharing_group(reader.when, move), *pair)
                    shared.setdefault(key, []).append(amount)
                    weights[key] = move.time_s * self.problem.weight(reader.when)
            for key, amounts in shared.items():
                self._charge(flow.count * weights[key] / self.unit_s, amounts)

    def _transport(
        self,
        flow: Flow,
        produced: dict[Layout, mathopt.LinearBase | float],
        wanted: dict[Layout, mathopt.LinearBase | float],
    ) -> dict[tuple[Layout, Layout], mathopt.LinearBase | float]:
        """Amounts that cost something, with rows (2) and (3)."""
        amounts: dict[tuple[Layout, Layout], mathopt.LinearBase | float] = {}
        if len(produced) == 1 or len(wanted) == 1:
            for p, out in produced.items():
                for q, into in wanted.items():
                    amount = into if len(produced) == 1 else out
                    if (p, q) in flow.moves:
                        amounts[p, q] = amount
                    else:
                        self._forbid(amount)
        else:
            for p in produced:
                for q in wanted:
                    if (p, q) in flow.moves:
                        amounts[p, q] = self.model.add_variable(lb=0.0, ub=1.0)
                        self.num_columns += 1
            for p, out in produced.items():
                row = [amounts[p, q] for q in wanted if (p, q) in amounts]
                self.model.add_linear_constraint(mathopt.fast_sum(row) == out)  # (2)
            for q, into in wanted.items():
                row = [amounts[p, q] for p in produced if (p, q) in amounts]
                self.model.add_linear_constraint(mathopt.fast_sum(row) == into)  # (3)
        return {k: v for k, v in amounts.items() if flow.moves[k].time_s > 0}

    def _forbid(self, amount: mathopt.LinearBase | float) -> None:
        if isinstance(amount, float):
            never = self.model.add_variable(lb=0.0, ub=0.0)
            self.model.add_linear_constraint(never == amount)
        else:
            self.model.add_linear_constraint(amount == 0.0)

    def _charge(self, price: float, amounts: Sequence[mathopt.LinearBase | float]) -> None:
        if any(isinstance(a, float) for a in amounts):
            self._terms.append(_constant(price))  # made in any case
            return
        distinct = list({id(a): a for a in amounts}.values())
        if len(distinct) == 1:
            self._terms.append(price * distinct[0])
            return
        made = self.model.add_variable(lb=0.0, ub=1.0)
        self.num_columns += 1
        for amount in distinct:
            self.model.add_linear_constraint(made >= amount)  # (4)
        self._terms.append(price * made)

    def _memory(self) -> None:
        limit = self.problem.limit_bytes
        if limit is None:
            return
        terms: list[mathopt.LinearBase] = []
        for row, variable in zip(self._z, self.problem.variables, strict=True):
            for z, option in zip(row, variable.options, strict=True):
                share = len(variable.members) * option.memory_bytes / max(1, limit)
                if share:
                    terms.append(_constant(share) if isinstance(z, float) else share * z)
        self.model.add_linear_constraint(mathopt.fast_sum(terms) <= 1.0)  # (5)

    def hint(self, options: Sequence[int]) -> None:
        """Start from a choice."""
        values = {}
        for row, at in zip(self._z, options, strict=True):
            for k, z in enumerate(row):
                if isinstance(z, mathopt.Variable):
                    values[z] = 1.0 if k == at else 0.0
        self._solution_hint = mathopt.SolutionHint(variable_values=values)

    def read(self, result: mathopt.SolveResult) -> tuple[int, ...]:
        """Chosen options."""
        values = result.variable_values()
        options = []
        for row in self._z:
            if len(row) == 1:
                options.append(0)
            else:
                options.append(max(range(len(row)), key=lambda k: values[row[k]]))
        return tuple(options)


def _constant(value: float) -> mathopt.LinearBase:
    return mathopt.LinearExpression(value)
