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

Rows (2) and (3) are equalities, so that the relaxation is nearly integral and e needs no
integrality of its own. A layout pair that can't be made has no ``e``. Where a group has one reader,
f is e; where one side has a single layout, e is the other side's sum and needs no variable.

Planning is deterministic: one thread, a fixed seed, a limit of nodes. The wall clock only guards.

Source: the equality form after the transportation polytope, ours; sharing rows, ours.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ortools.math_opt import model_pb2  # type: ignore[import-untyped]  # has no stubs
from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]  # has no stubs

from autopar.errors import InfeasibleError, Shortfall
from autopar.sharding.decisions import Choice
from autopar.sharding.placement import Layout, Replicate
from autopar.solver.splits_problem import (
    Flow,
    Move,
    Pass,
    SplitsProblem,
    SplitsSolution,
    choice_memory_bytes,
    choice_terms_s,
    is_once,
    sharing_group,
)

NODE_LIMIT = 2000  # work limit of SCIP: branch-and-bound nodes
RELATIVE_GAP = 1e-7
GUARD_S = 300.0

Column: TypeAlias = int
Sum: TypeAlias = tuple[Column, ...]


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
    hints = [] if start is None else [program.hint(start)]
    parameters = mathopt.SolveParameters(
        threads=1,
        random_seed=0,
        node_limit=node_limit,
        relative_gap_tolerance=RELATIVE_GAP,
        time_limit=datetime.timedelta(seconds=guard_s),
        presolve=mathopt.Emphasis.OFF,  # the relaxation is nearly integral: presolving costs more
    )
    result = mathopt.solve(
        program.model,
        mathopt.SolverType.GSCIP,
        params=parameters,
        model_params=mathopt.ModelSolveParameters(solution_hints=hints),
    )
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


class _Program:
    """The MathOpt model; equation numbers as in the module's text.

    A sum is a tuple of columns, each with factor one; the empty tuple is the constant one. The
    model is written as one message: building it call by call takes longer than solving it.
    """

    def __init__(self, problem: SplitsProblem) -> None:
        self.problem = problem
        self.num_columns = 0
        self.unit_s = self._unit()
        self._binary: list[bool] = []
        self._bounds: list[tuple[float, float]] = []
        self._entries: list[tuple[int, Column, float]] = []
        self._prices: dict[Column, float] = {}
        self._fixed = 0.0
        self._numbers: dict[Layout, int] = {}
        self._tables: dict[int, dict[tuple[int, int], Move]] = {}
        self._sums: dict[tuple[int, bool, int, bool], dict[int, Sum]] = {}
        self._z = self._choices()
        for flow in problem.flows:
            self._flow(flow)
        self._memory()
        self.model = mathopt.Model.from_model_proto(self._message())

    def _message(self) -> model_pb2.ModelProto:
        message = model_pb2.ModelProto(name="splits")
        columns, rows = range(self.num_columns), range(len(self._bounds))
        message.variables.ids.extend(columns)
        message.variables.lower_bounds.extend([0.0] * len(columns))
        message.variables.upper_bounds.extend([1.0] * len(columns))
        message.variables.integers.extend(self._binary)
        message.linear_constraints.ids.extend(rows)
        message.linear_constraints.lower_bounds.extend([low for low, _ in self._bounds])
        message.linear_constraints.upper_bounds.extend([high for _, high in self._bounds])
        matrix = message.linear_constraint_matrix
        entries = sorted(entry for entry in self._entries if entry[2])
        matrix.row_ids.extend([row for row, _, _ in entries])
        matrix.column_ids.extend([column for _, column, _ in entries])
        matrix.coefficients.extend([factor for _, _, factor in entries])
        prices = sorted((c, price) for c, price in self._prices.items() if price)
        message.objective.offset = self._fixed
        message.objective.linear_coefficients.ids.extend([c for c, _ in prices])
        message.objective.linear_coefficients.values.extend([price for _, price in prices])
        return message

    def _unit(self) -> float:
        """Seconds per unit of the objective, so that the terms are neither tiny nor huge."""
        times = [o.time_s * len(v.members) for v in self.problem.variables for o in v.options]
        return max(sum(times) / max(1, len(times)), 1e-9)

    def _column(self, *, is_binary: bool = False) -> Column:
        self.num_columns += 1
        self._binary.append(is_binary)
        return self.num_columns - 1

    def _row(
        self,
        plus: Sequence[Column],
        minus: Sequence[Column] = (),
        *,
        constant: float = 0.0,
        is_equality: bool = True,
    ) -> None:
        """``sum plus - sum minus == constant``, or ``>=``."""
        factors: dict[Column, float] = {}
        for column in plus:
            factors[column] = factors.get(column, 0.0) + 1.0
        for column in minus:
            factors[column] = factors.get(column, 0.0) - 1.0
        row = len(self._bounds)
        self._bounds.append((constant, constant if is_equality else math.inf))
        self._entries += [(row, column, factor) for column, factor in factors.items()]

    def _pay(self, price: float, sum_of: Sum) -> None:
        if not sum_of:
            self._fixed += price
        for column in sum_of:
            self._prices[column] = self._prices.get(column, 0.0) + price

    def _choices(self) -> list[Sum]:
        rows: list[Sum] = []
        for variable in self.problem.variables:
            scale = len(variable.members) / self.unit_s
            if len(variable.options) == 1:
                rows.append(())
                self._fixed += variable.options[0].time_s * scale
                continue
            row = tuple(self._column(is_binary=True) for _ in variable.options)
            self._row(row, constant=1.0)  # (1)
            for z, option in zip(row, variable.options, strict=True):
                self._pay(option.time_s * scale, (z,))
            rows.append(row)
        return rows

    def _number(self, layout: Layout) -> int:
        """Layouts as numbers: they are looked up often."""
        return self._numbers.setdefault(layout, len(self._numbers))

    def _table(self, flow: Flow) -> dict[tuple[int, int], Move]:
        """The reshards of a flow by numbers of layouts; flows that share them share it."""
        key = id(flow.moves)
        if key not in self._tables:
            self._tables[key] = {
                (self._number(have), self._number(want)): move
                for (have, want), move in flow.moves.items()
            }
        return self._tables[key]

    def _by_layout(
        self, variable: int, index: int, when: Pass, *, is_result: bool
    ) -> dict[int, Sum]:
        """Layout of a result or an operand, as a pass sees it -> sum of the z that give it."""
        key = (variable, is_result, index, is_once(when))
        if key not in self._sums:
            sums: dict[int, list[Column]] = {}
            for k, option in enumerate(self.problem.variables[variable].options):
                layout = (option.results if is_result else option.operands)[index]
                number = self._number(self.problem.seen(layout, when))
                sums.setdefault(number, []).extend(self._z[variable][k : k + 1])
            self._sums[key] = {layout: tuple(row) for layout, row in sums.items()}
            if len(sums) == 1:
                self._sums[key] = {next(iter(sums)): ()}
        return self._sums[key]

    def _flow(self, flow: Flow) -> None:
        problem, moves = self.problem, self._table(flow)
        amounts: dict[tuple[int, int, int], list[Sum]] = {}
        weights: dict[tuple[int, int, int], float] = {}
        for reader in flow.readers:
            when = reader.when
            produced = self._by_layout(flow.variable, flow.result, when, is_result=True)
            wanted = self._by_layout(reader.variable, reader.operand, when, is_result=False)
            for pair, amount in self._transport(moves, produced, wanted).items():
                move = moves[pair]
                if move.time_s > 0:
                    key = (sharing_group(when, move), *pair)
                    amounts.setdefault(key, []).append(amount)
                    weights[key] = move.time_s * problem.weight(when)
        for key, sums in amounts.items():
            price = flow.count * weights[key] / self.unit_s
            distinct = list(dict.fromkeys(sums))
            if len(distinct) == 1 or () in distinct:
                self._pay(price, () if () in distinct else distinct[0])
                continue
            made = self._column()
            for row in distinct:
                self._row((made,), row, is_equality=False)  # (4)
            self._pay(price, (made,))

    def _transport(
        self,
        moves: Mapping[tuple[int, int], Move],
        produced: dict[int, Sum],
        wanted: dict[int, Sum],
    ) -> dict[tuple[int, int], Sum]:
        """Amount of every layout pair, with rows (2) and (3)."""
        amounts: dict[tuple[int, int], Sum] = {}
        if len(produced) == 1 or len(wanted) == 1:
            for p, out in produced.items():
                for q, into in wanted.items():
                    amount = into if len(produced) == 1 else out
                    if (p, q) in moves:
                        amounts[p, q] = amount
                    else:
                        self._row(amount, constant=0.0 if amount else 1.0)  # never
            return amounts
        for p in produced:
            for q in wanted:
                if (p, q) in moves:
                    amounts[p, q] = (self._column(),)
        for p, out in produced.items():
            self._row([v for q in wanted for v in amounts.get((p, q), ())], out)  # (2)
        for q, into in wanted.items():
            self._row([v for p in produced for v in amounts.get((p, q), ())], into)  # (3)
        return amounts

    def _memory(self) -> None:
        limit = self.problem.limit_bytes
        if limit is None:
            return
        at, fixed = len(self._bounds), 0.0
        for row, variable in zip(self._z, self.problem.variables, strict=True):
            scale = len(variable.members) / max(1, limit)
            if not row:
                fixed += variable.options[0].memory_bytes * scale
            for z, option in zip(row, variable.options, strict=False):
                self._entries.append((at, z, option.memory_bytes * scale))
        self._bounds.append((-math.inf, 1.0 - fixed))  # (5)

    def hint(self, options: Sequence[int]) -> mathopt.SolutionHint:
        """A choice to start from."""
        values = {
            self.model.get_variable(z): 1.0 if k == at else 0.0
            for row, at in zip(self._z, options, strict=True)
            for k, z in enumerate(row)
        }
        return mathopt.SolutionHint(variable_values=values)

    def read(self, result: mathopt.SolveResult) -> tuple[int, ...]:
        """Chosen options."""
        values = result.variable_values()
        options = []
        for row in self._z:
            amounts = [values[self.model.get_variable(z)] for z in row]
            options.append(amounts.index(max(amounts)) if row else 0)
        return tuple(options)
