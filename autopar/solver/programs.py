"""A mixed-integer program written as one message: building it call by call takes longer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ortools.math_opt import model_pb2  # type: ignore[import-untyped]  # has no stubs
from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]  # has no stubs

Terms = Iterable[tuple[int, float]]
"""Columns and their factors."""


@dataclass(slots=True)
class Program:
    """Columns, rows and a solver; solved again and again with other prices and limits of rows.

    Args:
        name: For messages of the solver.
    """

    name: str
    _lower: list[float] = field(default_factory=list)
    _upper: list[float] = field(default_factory=list)
    _integers: list[bool] = field(default_factory=list)
    _limits: list[tuple[float, float]] = field(default_factory=list)
    _entries: list[tuple[int, int, float]] = field(default_factory=list)
    _made: model_pb2.ModelProto | None = None

    @property
    def num_columns(self) -> int:
        """Columns so far."""
        return len(self._lower)

    def column(self, lower: float = 0.0, upper: float = 1.0, *, is_integer: bool = True) -> int:
        """A new column's number."""
        self._lower.append(lower)
        self._upper.append(upper)
        self._integers.append(is_integer)
        return len(self._lower) - 1

    def row(self, terms: Terms, *, at_least: float = -math.inf, at_most: float = math.inf) -> int:
        """A new row's number; its factors are those of distinct columns."""
        row = len(self._limits)
        self._limits.append((at_least, at_most))
        self._entries += [(row, column, factor) for column, factor in terms]
        return row

    def limit(self, row: int, at_most: float) -> None:
        """Give a row another upper limit."""
        self._limits[row] = (self._limits[row][0], at_most)

    def bound(self, column: int, at_most: float) -> None:
        """Give a column another upper limit."""
        self._upper[column] = at_most

    def solved(
        self, prices: Mapping[int, float], parameters: mathopt.SolveParameters
    ) -> tuple[mathopt.SolveResult, Sequence[float]]:
        """The least of ``prices`` times columns, by SCIP.

        Returns:
            What the solver says, and the value of every column; none if it found no solution.
        """
        message = self._message()
        columns, limits = message.variables, message.linear_constraints
        del columns.upper_bounds[:]
        columns.upper_bounds.extend(self._upper)
        del limits.upper_bounds[:]
        limits.upper_bounds.extend([high for _, high in self._limits])
        order = sorted((column, price) for column, price in prices.items() if price)
        message.objective.Clear()
        message.objective.linear_coefficients.ids.extend([column for column, _ in order])
        message.objective.linear_coefficients.values.extend([price for _, price in order])
        model = mathopt.Model.from_model_proto(message)
        result = mathopt.solve(model, mathopt.SolverType.GSCIP, params=parameters)
        if not result.has_primal_feasible_solution():
            return result, ()
        values = [0.0] * self.num_columns
        for variable, value in result.variable_values().items():
            values[variable.id] = value
        return result, values

    def _message(self) -> model_pb2.ModelProto:
        """The program without its prices and upper limits; made once."""
        if self._made is None:
            message = self._made = model_pb2.ModelProto(name=self.name)
            message.variables.ids.extend(range(self.num_columns))
            message.variables.lower_bounds.extend(self._lower)
            message.variables.integers.extend(self._integers)
            message.linear_constraints.ids.extend(range(len(self._limits)))
            message.linear_constraints.lower_bounds.extend([low for low, _ in self._limits])
            entries = sorted(entry for entry in self._entries if entry[2])
            matrix = message.linear_constraint_matrix
            matrix.row_ids.extend([row for row, _, _ in entries])
            matrix.column_ids.extend([column for _, column, _ in entries])
            matrix.coefficients.extend([factor for _, _, factor in entries])
        return self._made
