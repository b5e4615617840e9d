"""Which of its values a block keeps: the menu of exact trade-offs between bytes and seconds.

Per value ``v`` of a block's forward: ``a[v]`` backward has it, ``b[v] <= a[v]`` it is made again.

    min   sum_v seconds_v b[v]        such that
    (1)   a[v] = 1                    for what backward reads
    (2)   b[v] <= a[u]                for every operand u of v: a remade value's operands are there
    (3)   b[v] = a[v], b[v] = 0       for views; for what must be kept
    (4)   a[v] - (1 - r[g]) <= b[v] <= r[g]      for groups g of several operators
    (5)   y[s] >= a[v] - b[v]         storage s of v is kept
    (6)   sum_s bytes_s y[s] <= budget

Where values may be kept in host memory, ``o[u]`` says of a unit of them that it is, rows (5) become
``y[s] >= a[v] - b[v] - o[u]``, and

    (7)   c[s] >= a[v] - b[v] + o[u] - 1                  storage s is copied
    (8)   late >= sum_s copy_s c[s] - seconds beside it   in forward, and in backward

with the seconds of waiting, and a share of all copies, in the objective.

Without (4) and (6) every row is an implication between two variables, so the relaxation is integral
(a closure problem); with them it nearly is, and SCIP ends at or near the root. A sum over *closed
cones* is exact where a knapsack over single values is not: making a chain again costs all of it.

A menu has the two ends first (no seconds; fewest bytes, to 1/500 of all), then the corners of the
lower convex hull,
which are the best when many equal blocks share a memory: without row (6), of least ``seconds +
slope * bytes`` for the slope between two neighbours. Where places are left, a budget is put in the
middle of the gap whose rectangle of bytes times seconds is largest, again and again. Every point is
of least seconds for its bytes, and none can be improved in one without losing in the other.

Source: the closure form after Checkmate's rows of one stage (Jain et al., MLSys 2020) with the
order of recomputing fixed to "right before the first reader"; the halving is ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from math import inf

from ortools.math_opt.python import mathopt  # type: ignore[import-untyped]  # has no stubs

from autopar.errors import AutoparError
from autopar.solver.programs import Program
from autopar.solver.recompute_problem import (
    ALWAYS_KEPT,
    ALWAYS_REMADE,
    UNHIDDEN,
    Figures,
    RecomputeProblem,
    figures,
)

MENU_SIZE = 8
NODE_LIMIT = 400
HULL_TOLERANCE = 1e-7
STEP = 2e-3  # share of all bytes that makes two choices worth telling apart
TIE_WEIGHT = 1e-6  # of bytes beside seconds: among equally fast choices the leanest


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuPoint:
    """One choice of a menu.

    Attributes:
        groups: Names of the operators that are made again.
        offload: Names of the operators whose values are kept in host memory.
        figures: What it costs.
        gap_s: By how many seconds it may miss the least for its bytes; 0.0 where that is proven.
    """

    groups: tuple[str, ...]
    figures: Figures
    gap_s: float = 0.0
    offload: tuple[str, ...] = ()

    @classmethod
    def of(cls, problem: RecomputeProblem, found: Figures, gap_s: float = 0.0) -> MenuPoint:
        """The point of a choice."""
        return cls(
            groups=tuple(n for g in sorted(found.remade) for n in problem.groups[g]),
            figures=found,
            gap_s=gap_s,
            offload=tuple(problem.units[u] for u in sorted(found.offloaded)),
        )


def recompute_menu(
    problem: RecomputeProblem,
    *,
    size: int = MENU_SIZE,
    remade: Collection[int] | None = None,
    corners: Sequence[MenuPoint] | None = None,
) -> tuple[MenuPoint, ...]:
    """Choices from the fastest to the leanest.

    Args:
        problem: The block.
        size: Most points.
        remade: Groups that are made again, where that is fixed and only what is kept in host
            memory is free.
        corners: :func:`menu_corners` of the same, where they are known.

    Returns:
        At least one point; bytes fall and seconds rise from each to the next.
    """
    points = list(menu_corners(problem, remade=remade) if corners is None else corners)
    _thin(points, size)
    if 1 < len(points) < size:
        _search(problem, remade).halve(points, size)
    return tuple(points)


def menu_corners(
    problem: RecomputeProblem, *, remade: Collection[int] | None = None
) -> tuple[MenuPoint, ...]:
    """What menus of any size begin with: both ends, and the corners of the hull between them.

    Args:
        problem: The block.
        remade: As of :func:`recompute_menu`.
    """
    nothing = figures(problem, remade or ())
    everything = figures(problem, range(len(problem.groups)))
    is_given = not problem.units and (remade is not None or not everything.remade)
    if not nothing.saved_bytes or is_given:
        return (MenuPoint.of(problem, nothing),)
    search = _search(problem, remade)
    fast, lean = search.ends()
    points = [fast]
    if lean.figures.saved_bytes < fast.figures.saved_bytes:
        points.append(lean)
        search.corners(points)
    return tuple(points)


def menu_of(
    problem: RecomputeProblem,
    choices: Iterable[Collection[int]],
    *,
    size: int = MENU_SIZE,
    offloads: Iterable[Collection[int]] = (),
) -> tuple[MenuPoint, ...]:
    """A menu of given choices: figures are this block's own, but better choices may exist.

    Args:
        problem: The block.
        choices: Groups that are made again; what none of them improves is left out.
        size: Most points.
        offloads: For each choice the units that are kept in host memory; none if left out.
    """
    pairs = [*zip_longest(choices, offloads, fillvalue=()), ((), ())]
    found = {(f.remade, f.offloaded): f for f in (figures(problem, *pair) for pair in pairs)}
    order = sorted(
        found.values(),
        key=lambda f: (f.total_s, f.host_bytes, f.saved_bytes, sorted(f.remade)),
    )
    points: list[MenuPoint] = []
    for one in order:
        if not points or one.saved_bytes < points[-1].figures.saved_bytes:
            points.append(MenuPoint.of(problem, one, one.total_s))
    _thin(points, size)
    return tuple(points)


def _search(problem: RecomputeProblem, remade: Collection[int] | None) -> _Search:
    return _Search(problem, None if remade is None else frozenset(remade))


@dataclass(slots=True)
class _Search:
    problem: RecomputeProblem
    only: frozenset[int] | None = None  # groups that are made again, if that is fixed
    _program: Program = field(init=False)
    _budget: int = 0  # row (6)
    _remade: dict[int, int | None] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)
    _bytes: dict[int, float] = field(default_factory=dict)
    _unit_s: float = 1.0
    _unit_bytes: float = 1.0
    _step_bytes: int = 0
    _away: dict[int, int] = field(default_factory=dict)  # by unit
    _copies: dict[int, int] = field(default_factory=dict)  # by storage

    def __post_init__(self) -> None:
        problem = self.problem
        everything = figures(problem, range(len(problem.groups)))
        nothing = figures(problem, self.only or ())
        copied = problem.copy.seconds(nothing.saved_bytes) if problem.units else 0.0
        self._unit_s = everything.extra_s or copied or 1.0
        self._unit_bytes = float(max(nothing.saved_bytes, 1))
        self._step_bytes = int(nothing.saved_bytes * STEP)
        self._program = Program("recompute")
        self._rows()

    # -- the program ---------------------------------------------------------------------------
    def _rows(self) -> None:
        """Rows (1) to (8)."""
        problem, program = self.problem, self._program
        count = len(problem.ops)
        needed: dict[int, int] = {}
        cone = self._cone()
        first = set(problem.first_reads)
        members: dict[int, list[int]] = {}
        for value in cone:
            if value < count and problem.ops[value].group >= 0:
                members.setdefault(problem.ops[value].group, []).append(value)
        shared = {g: program.column() for g, m in members.items() if len(m) > 1}
        stored: dict[int, int] = {}
        for value in cone:
            have = program.column(1.0 if value in first else 0.0)  # (1)
            needed[value] = have
            again = self._again(value, have, shared)
            for storage in problem.holds(value) if again != have else ():
                if not problem.kept_bytes[storage]:
                    continue
                if storage not in stored:
                    stored[storage] = program.column(is_integer=False)
                    self._bytes[stored[storage]] = problem.kept_bytes[storage] / self._unit_bytes
                terms = [(stored[storage], 1.0), (have, -1.0)]
                terms += [
                    (column, 1.0)
                    for column in (again, self._unit_away(value))
                    if column is not None
                ]
                program.row(terms, at_least=0.0)  # (5)
            self._copied(value, have, again)
        for value, again in self._remade.items():
            for operand in dict.fromkeys(problem.ops[value].reads):
                if again is not None and operand in needed and needed[operand] != again:
                    program.row([(again, 1.0), (needed[operand], -1.0)], at_most=0.0)  # (2)
        self._budget = program.row(self._bytes.items(), at_most=1.0)  # (6)
        self._late()

    def _unit_away(self, value: int) -> int | None:
        """Whether a value's unit is in host memory; None if it can't be."""
        unit = self.problem.unit(value)
        if unit < 0:
            return None
        if unit not in self._away:
            self._away[unit] = self._program.column()
        return self._away[unit]

    def _copied(self, value: int, have: int, again: int | None) -> None:
        """Row (7): a value that is kept and whose unit is away is copied."""
        away = self._unit_away(value)
        if away is None or again == have:
            return
        for storage in self.problem.holds(value):
            if storage not in self._copies:
                self._copies[storage] = self._program.column(is_integer=False)
            terms = [(self._copies[storage], 1.0), (have, -1.0), (away, -1.0)]
            terms += [] if again is None else [(again, 1.0)]
            self._program.row(terms, at_least=-1.0)

    def _late(self) -> None:
        """Rows (8): copies run beside the block's operators; what they take longer is waited for.

        A share of each is waited for in any case, in forward and in backward.
        """
        problem, program = self.problem, self._program
        if not self._copies:
            return
        each = {
            column: problem.copy.seconds(problem.kept_bytes[s]) / self._unit_s
            for s, column in self._copies.items()
        }
        whole = [(column, -seconds) for column, seconds in each.items()]
        forward_s, backward_s = (s / self._unit_s for s in problem.beside_s)
        ahead, behind = (program.column(upper=inf, is_integer=False) for _ in range(2))
        program.row([(ahead, 1.0), *whole], at_least=-forward_s)
        program.row([(behind, 1.0), *whole, *self._seconds.items()], at_least=-backward_s)
        self._seconds |= {column: 2 * UNHIDDEN * seconds for column, seconds in each.items()}
        self._seconds |= {ahead: 1.0, behind: 1.0}

    def _again(self, value: int, have: int, shared: dict[int, int]) -> int | None:
        """``b`` of a value; None where it is never made again."""
        problem, program = self.problem, self._program
        if value >= len(problem.ops) or problem.ops[value].group == ALWAYS_KEPT:
            return None  # (3)
        op = problem.ops[value]
        if op.group == ALWAYS_REMADE:
            self._remade[value] = have  # (3)
            return have
        again = program.column()
        program.row([(again, 1.0), (have, -1.0)], at_most=0.0)
        if self.only is not None and op.group in self.only:
            program.row([(again, 1.0), (have, -1.0)], at_least=0.0)
        elif self.only is not None:
            program.bound(again, 0.0)
        if op.group in shared:
            whole = shared[op.group]
            program.row([(again, 1.0), (whole, -1.0)], at_most=0.0)  # (4)
            program.row([(again, 1.0), (have, -1.0), (whole, -1.0)], at_least=-1.0)  # (4)
        self._seconds[again] = op.seconds / self._unit_s
        self._remade[value] = again
        return again

    def _cone(self) -> list[int]:
        """Values that backward may need: what it reads, and what those can be made from."""
        problem, count = self.problem, len(self.problem.ops)
        found: set[int] = set()
        stack = list(problem.first_reads)
        while stack:
            value = stack.pop()
            if value in found:
                continue
            if value >= count:
                if problem.inputs[value - count].is_received:
                    found.add(value)
                continue
            found.add(value)
            if problem.ops[value].group != ALWAYS_KEPT:
                stack.extend(problem.ops[value].reads)
        return sorted(found)

    # -- solving -------------------------------------------------------------------------------
    def ends(self) -> tuple[MenuPoint, MenuPoint]:
        """The leanest of the fastest choices, and the fastest of (nearly) the leanest.

        The fastest one copies nothing: what a copy seems not to cost may show in a whole stage.
        """
        for away in self._away.values():
            self._program.bound(away, 0.0)
        fast = self.at(figures(self.problem, self.only or ()).saved_bytes)
        for away in self._away.values():
            self._program.bound(away, 1.0)
        least = self._solve(self._bytes, self._seconds)
        lean = self.at(least[0].saved_bytes + self._step_bytes)
        return fast, lean

    def at(self, budget_bytes: int) -> MenuPoint:
        """The fastest choice within a budget."""
        self._program.limit(self._budget, (budget_bytes + 0.5) / self._unit_bytes)
        found, gap = self._solve(self._seconds, self._bytes)
        return self._point(found, gap)

    def _point(self, found: Figures, gap: float) -> MenuPoint:
        return MenuPoint.of(self.problem, found, gap * self._unit_s)

    def _solve(self, first: dict[int, float], second: dict[int, float]) -> tuple[Figures, float]:
        """Figures of the best choice by ``first``, ties by ``second``, and the proven gap."""
        prices = dict(first)
        for column, price in second.items():
            prices[column] = prices.get(column, 0.0) + price * TIE_WEIGHT
        parameters = mathopt.SolveParameters(
            node_limit=NODE_LIMIT, threads=1, random_seed=0, relative_gap_tolerance=0.0,
            absolute_gap_tolerance=0.0,
        )  # fmt: skip
        result, values = self._program.solved(prices, parameters)
        if not values:
            raise AutoparError(
                f"the recompute problem of {len(self.problem.ops)} operators ended without a "
                f"choice ({result.termination.reason.name}); report it with the model"
            )
        chosen = {
            self.problem.ops[i].group
            for i, again in self._remade.items()
            if again is not None and self.problem.ops[i].group >= 0 and values[again] > 0.5
        }
        is_proven = result.termination.reason is mathopt.TerminationReason.OPTIMAL
        gap = 0.0
        if not is_proven:
            gap = max(0.0, result.objective_value() - result.best_objective_bound())
        away = {unit for unit, variable in self._away.items() if values[variable] > 0.5}
        return figures(self.problem, chosen, away), gap

    # -- menus ---------------------------------------------------------------------------------
    def corners(self, points: list[MenuPoint]) -> None:
        """Add the corners of the lower convex hull to a menu that has its ends."""
        self._program.limit(self._budget, 2.0)  # binds nothing
        waiting = [(points[0], points[-1])]
        while waiting:
            fast, lean = waiting.pop()
            less = (fast.figures.saved_bytes - lean.figures.saved_bytes) / self._unit_bytes
            more = (lean.figures.total_s - fast.figures.total_s) / self._unit_s
            weights = {v: c * less for v, c in self._seconds.items()}
            weights |= {v: c * more for v, c in self._bytes.items()}
            found, gap = self._solve(weights, {})
            point = self._point(found, gap)
            size, time_s = found.saved_bytes / self._unit_bytes, found.total_s / self._unit_s
            lowest = lean.figures.saved_bytes / self._unit_bytes
            line = more * lowest + less * lean.figures.total_s / self._unit_s
            # the lean end is not quite the leanest: what lies beyond it is no corner between them
            is_between = fast.figures.saved_bytes > found.saved_bytes > lean.figures.saved_bytes
            if is_between and more * size + less * time_s < line * (1 - HULL_TOLERANCE):
                points.append(point)
                waiting += [(point, lean), (fast, point)]
        points.sort(key=lambda p: -p.figures.saved_bytes)

    def halve(self, points: list[MenuPoint], size: int) -> None:
        """Put points into the largest gaps of a menu that has its ends."""
        spans = _spans(points)
        for _ in range(2 * size):
            if len(points) >= size or not spans:
                return
            spans.sort(key=lambda s: (-_area(s), s[0].figures.saved_bytes))
            fast, lean, floor = spans.pop(0)
            middle = (fast.figures.saved_bytes + floor) // 2
            found = self.at(middle)
            if found.figures.saved_bytes <= lean.figures.saved_bytes:
                # nothing between: what is left of the gap lies above the middle
                if middle + 1 < fast.figures.saved_bytes:
                    spans.append((fast, lean, middle + 1))
                continue
            points.append(found)
            points.sort(key=lambda p: -p.figures.saved_bytes)
            spans += [(fast, found, middle + 1), (found, lean, floor)]
            spans = [s for s in spans if s[0].figures.saved_bytes - s[2] > 1 + self._step_bytes]


def _spans(points: Sequence[MenuPoint]) -> list[tuple[MenuPoint, MenuPoint, int]]:
    """Gaps of a menu: (fast end, lean end, fewest bytes where a point may still be)."""
    return [(fast, lean, lean.figures.saved_bytes) for fast, lean in pairwise(points)]


def _thin(points: list[MenuPoint], size: int) -> None:
    """Leave out corners that lie nearest to the line between their neighbours."""
    while len(points) > max(size, 2):
        losses = []
        for at in range(1, len(points) - 1):
            a, b, c = (p.figures for p in points[at - 1 : at + 2])
            share = (a.saved_bytes - b.saved_bytes) / (a.saved_bytes - c.saved_bytes)
            loss_s = a.total_s + share * (c.total_s - a.total_s) - b.total_s
            losses.append((loss_s * (a.saved_bytes - c.saved_bytes), at))
        del points[min(losses)[1]]


def _area(span: tuple[MenuPoint, MenuPoint, int]) -> float:
    fast, lean, floor = span
    return (fast.figures.saved_bytes - floor) * (lean.figures.total_s - fast.figures.total_s)
