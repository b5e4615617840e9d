"""The least seconds for which a block keeps fewer bytes, whatever the splits: a lower hull.

A value that backward reads is kept, or made again; what is made again needs its operands, kept or
made again in turn, and all results of an operator cost it once. With every value at the bytes that
no layout makes fewer and every operator at the seconds that no split makes fewer, the least of
``seconds + slope * bytes`` is a closure problem: its linear program is integral, and its optimum
for each slope lies below every real choice. Corners of the hull are found by going on with the
slope between two known ones until none is below the line.

Without the operands a value would cost its own operator alone: a rotated query, say, would cost its
rotation, though the product that it rotates is gone too.

Source: ours; the closure form as in :mod:`autopar.solver.recompute`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]  # has no stubs

Variable: TypeAlias = Any  # of a solver without stubs

RATIO_STEP = 1.1  # parts whose price per byte differs by less are given up together
TOLERANCE = 1e-3  # of all seconds: corners that are nearer to the line are left out, and taken off
MAX_CORNERS = 64
DEAR = 1e3  # shares of all seconds that a share of all bytes is worth where bytes are what counts

Curve = tuple[int, tuple[tuple[int, float], ...]]
"""Bytes that a block keeps at most; then (bytes, seconds) of giving parts up, cheapest first."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a block's forward, views resolved.

    Attributes:
        variable: Who makes it.
        result: Which of its results.
        is_read: Whether backward reads it.
        makers: Who is run to make it again; empty if it can't be.
        operands: What of the same block that takes, by place.
    """

    variable: int
    result: int
    is_read: bool
    makers: tuple[int, ...]
    operands: tuple[int, ...]


def least_curve(
    values: Sequence[Value], num_bytes: Sequence[int], seconds: dict[int, float]
) -> Curve:
    """What a block keeps, and what giving that up costs, at least.

    Args:
        values: Of the block.
        num_bytes: Of each, at least.
        seconds: Of makers, at least.
    """
    total = _read_bytes(values, num_bytes)
    hull = _Closure(values, _at_most(num_bytes, total), seconds).hull(total)
    steps: list[tuple[float, int, float]] = []
    for (have, spent_s), (less, more_s) in pairwise(hull):
        if less >= have:
            continue
        ratio = max(0.0, more_s - spent_s) / (have - less)
        if steps and ratio <= RATIO_STEP * steps[-1][0]:
            first, size, _ = steps[-1]
            size += have - less
            steps[-1] = (first, size, first * size)
        else:
            steps.append((ratio, have - less, ratio * (have - less)))
    return total, tuple((size, time_s) for _, size, time_s in steps)


def least_kept_bytes(values: Sequence[Value], num_bytes: Sequence[int]) -> int:
    """The least bytes from which all that is read can be had, if making it takes nothing.

    Args:
        values: What is there or can be made; those without makers can't be made.
        num_bytes: Of each, at least.
    """
    total = _read_bytes(values, num_bytes)
    if all(not value.makers for value in values):
        return total
    return _Closure(values, _at_most(num_bytes, total), {}).least_bytes()


def _read_bytes(values: Sequence[Value], num_bytes: Sequence[int]) -> int:
    return sum(size for v, size in zip(values, num_bytes, strict=True) if v.is_read)


def _at_most(num_bytes: Sequence[int], total: int) -> list[int]:
    """What takes more than all that is read is never kept in its place; such sizes only hurt."""
    return [min(size, total) for size in num_bytes]


@dataclass(slots=True)
class _Closure:
    """The linear program; bytes and seconds in shares of all."""

    values: Sequence[Value]
    num_bytes: Sequence[int]
    seconds: dict[int, float]
    _solver: Any = field(init=False)
    _timed: list[tuple[Variable, float]] = field(default_factory=list)
    _again: dict[int, Variable] = field(default_factory=dict)
    _have: dict[int, Variable] = field(default_factory=dict)
    _fixed_bytes: int = 0

    def __post_init__(self) -> None:
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        solver, run = self._solver, {}
        for at, value in enumerate(self.values):
            if not value.makers and value.is_read:
                self._fixed_bytes += self.num_bytes[at]
                continue
            self._have[at] = solver.NumVar(1.0 if value.is_read else 0.0, 1.0, "")
            if not value.makers:
                continue
            self._again[at] = solver.NumVar(0.0, 1.0, "")
            self._under(self._again[at], self._have[at])
            if value.makers not in run:
                run[value.makers] = solver.NumVar(0.0, 1.0, "")
                time_s = sum(self.seconds.get(maker, 0.0) for maker in value.makers)
                self._timed.append((run[value.makers], time_s))
            self._under(self._again[at], run[value.makers])
        for at, again in self._again.items():
            for operand in self.values[at].operands:
                if operand in self._have:
                    self._under(again, self._have[operand])

    def _under(self, less: Variable, more: Variable) -> None:
        row = self._solver.Constraint(-self._solver.infinity(), 0.0)
        row.SetCoefficient(less, 1.0)
        row.SetCoefficient(more, -1.0)

    def _solve(self, per_second: float, per_byte: float) -> tuple[int, float] | None:
        """Bytes and seconds of the best choice; None if the solver gave up."""
        weights: dict[Variable, float] = {run: per_second * time_s for run, time_s in self._timed}
        for at, have in self._have.items():
            weights[have] = per_byte * self.num_bytes[at]
        for at, again in self._again.items():
            weights[again] = -per_byte * self.num_bytes[at]
        objective = self._solver.Objective()
        scale = max(map(abs, weights.values()), default=0.0) or 1.0  # tolerances are absolute
        for variable, weight in weights.items():
            objective.SetCoefficient(variable, weight / scale)
        objective.SetMinimization()
        if self._solver.Solve() != pywraplp.Solver.OPTIMAL and not self._solve_anew():
            return None
        kept = self._fixed_bytes
        for at, have in self._have.items():
            share = have.solution_value()
            share -= self._again[at].solution_value() if at in self._again else 0.0
            kept += int(self.num_bytes[at] * min(1.0, max(0.0, share)) + 0.5)
        spent_s = sum(time_s * run.solution_value() for run, time_s in self._timed)
        return kept, max(0.0, spent_s)

    def _solve_anew(self) -> bool:
        """Solve once more, without what the last answer left; whether that gave an answer."""
        kinds = pywraplp.MPSolverParameters
        parameters = kinds()
        parameters.SetIntegerParam(kinds.INCREMENTALITY, kinds.INCREMENTALITY_OFF)
        return bool(self._solver.Solve(parameters) == pywraplp.Solver.OPTIMAL)

    def least_bytes(self) -> int:
        """Bytes of the choice that keeps the least, whatever it takes."""
        found = self._solve(0.0, 1.0 / max(1, sum(self.num_bytes)))
        return self._fixed_bytes if found is None else found[0]

    def hull(self, total: int) -> list[tuple[int, float]]:
        """Corners from what is kept if nothing is made again to the leanest, seconds less slack."""
        all_s = sum(time_s for _, time_s in self._timed)
        nothing_known = [(total, 0.0), (self._fixed_bytes, 0.0)]
        if not self._have or all_s <= 0.0 or total <= 0:
            return nothing_known
        # the leanest keeps what it must, for no more than the choice in which a byte is dear
        leanest = self._solve(1.0 / all_s, DEAR / total)
        if leanest is None:
            return nothing_known
        lean = (min(leanest[0], self.least_bytes()), leanest[1])
        points = [(total, 0.0), lean]
        waiting = [(points[0], lean)]
        while waiting and len(points) < MAX_CORNERS:
            fast, slow = waiting.pop()
            less, more_s = fast[0] - slow[0], slow[1] - fast[1]
            if less <= 0 or more_s <= 0:
                continue
            found = self._solve(less / total / all_s, more_s / all_s / total)
            if found is None:
                return nothing_known
            line_s = fast[1] + more_s * (fast[0] - found[0]) / less
            if slow[0] < found[0] < fast[0] and found[1] < line_s - TOLERANCE * all_s:
                points.append(found)
                waiting += [(fast, found), (found, slow)]
        slack_s = TOLERANCE * all_s if len(points) < MAX_CORNERS else all_s
        points.sort(key=lambda point: (-point[0], point[1]))
        return [points[0], *((size, max(0.0, time_s - slack_s)) for size, time_s in points[1:])]
