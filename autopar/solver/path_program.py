"""The linear program of a step's paths; rows are numbered as in :mod:`autopar.solver.path_bound`.

It deals blocks to stages in parts, with memory as rows; paths are added as rows one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]  # has no stubs

from autopar.solver.pipeline_bound import Floor
from autopar.solver.stages_problem import BlockMenu, Option, StageProblem
from autopar.solver.step_paths import Path, Term

MAX_MOMENTS = 8  # rows (5) of a rank, spread evenly over its moments: fewer rows bound less
PRECISION = 2e-3  # rows that are exceeded by less are not added
GIB = float(1 << 30)

Variable: TypeAlias = Any  # of a solver without stubs
_OF_STATES: Mapping[Term, Callable[[BlockMenu], float]] = {
    Term.GATHER: lambda block: block.gather_s,
    Term.REDUCE: lambda block: 0.0 if block.num_reduces > 1 else block.reduce_s,
    Term.EACH: lambda block: block.each_s,
}


@dataclass(slots=True)
class PathProgram:
    """The linear program of one chain.

    Args:
        problem: The chain, as for :class:`~autopar.solver.path_bound.PathBound`.
        floor: Likewise.
        knows_halves: Likewise.
        is_quick: Whether any of the best answers will do, as for bounds; else one that is found
            anew, from which cuts are taken.
    """

    problem: StageProblem
    floor: Floor
    knows_halves: bool
    is_quick: bool = True
    _solver: Any = field(init=False)
    _time: Variable = field(init=False)
    _update: Variable = field(init=False)
    _unit_s: float = field(init=False)
    _kinds: dict[str, list[int]] = field(default_factory=dict)
    _counts: list[dict[tuple[str, int], Variable]] = field(default_factory=list)
    _forms: list[dict[tuple[str, int], Variable]] = field(default_factory=list)
    _before: list[dict[str, Variable]] = field(default_factory=list)
    _parts: dict[tuple[Term, int], Variable] = field(default_factory=dict)
    _message_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        for i, block in enumerate(problem.blocks):
            self._kinds.setdefault(block.key, []).append(i)
        total_s = sum(min(o.total_s for o in b.options) for b in problem.blocks)
        self._unit_s = max(total_s / problem.num_stages, 1e-12)
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        if self.is_quick:  # rows are added to programs that are solved: they stay dual feasible
            self._solver.SetSolverSpecificParametersAsString("use_dual_simplex: true")
        infinity = self._solver.infinity()
        self._time = self._solver.NumVar(0.0, infinity, "")
        self._update = self._solver.NumVar(0.0, infinity, "")
        self._solver.Objective().SetCoefficient(self._time, 1.0)
        self._solver.Objective().SetCoefficient(self._update, 1.0)
        self._solver.Objective().SetMinimization()
        for _ in range(problem.num_stages):
            self._counts.append(
                {
                    (kind, o): self._solver.NumVar(0.0, len(members), "")
                    for kind, members in self._kinds.items()
                    for o in _useful(problem.blocks[members[0]].options)
                }
            )
        self._choose_forms()
        self._deal()
        self._stay_together()
        self._memory()
        self._stage_seconds()
        self._updates()
        ranges = (self._range(s) for s in range(1, problem.num_stages))
        self._message_s = [
            0.0, *(min(problem.boundary_s[low - 1 : high]) for low, high in ranges)
        ]  # fmt: skip

    def _block(self, kind: str) -> BlockMenu:
        return self.problem.blocks[self._kinds[kind][0]]

    def _option(self, kind: str, option: int) -> Option:
        return self._block(kind).options[option]

    def _row(self, low: float, high: float, terms: Mapping[Variable, float]) -> None:
        row = self._solver.Constraint(low, high)
        for variable, factor in terms.items():
            row.SetCoefficient(variable, factor)

    def _choose_forms(self) -> None:
        """Rows (2a)."""
        problem = self.problem
        for stage in range(problem.num_stages if problem.forms else 0):
            forms = problem.given_forms[stage : stage + 1] or range(len(problem.forms))
            row = {
                (kind, form): self._solver.NumVar(0.0, len(members), "")
                for kind, members in self._kinds.items()
                for form in forms
            }
            self._forms.append(row)
            for kind in self._kinds:
                terms = {v: 1.0 for (k, _), v in self._counts[stage].items() if k == kind}
                terms |= {v: -1.0 for (k, _), v in row.items() if k == kind}
                self._row(0.0, 0.0, terms)

    def _of_states(
        self, stage: int, amount: Callable[[BlockMenu], float]
    ) -> list[tuple[Variable, float]]:
        """What the blocks of a stage take whatever they recompute, as factors of variables."""
        if not self._forms:
            return [(v, amount(self._block(k))) for (k, _), v in self._counts[stage].items()]
        menus = self.problem.forms
        return [
            (v, amount(menus[form][self._kinds[k][0]]))
            for (k, form), v in self._forms[stage].items()
        ]

    # -- blocks --------------------------------------------------------------------------------
    def _range(self, stage: int) -> tuple[int, int]:
        """The least and the most blocks that come before a stage."""
        problem = self.problem
        if problem.fixed_starts is not None:
            starts = (0, *problem.fixed_starts, len(problem.blocks))
            return starts[stage], starts[stage]
        n, most = len(problem.blocks), problem.most_blocks
        after = problem.num_stages - stage
        return max(stage, n - after * most), min(n - after, stage * most)

    def _deal(self) -> None:
        """Rows (2) and (3)."""
        problem = self.problem
        for row in self._counts:
            self._row(1.0, problem.most_blocks, dict.fromkeys(row.values(), 1.0))
        for stage in range(1, problem.num_stages):
            low, high = self._range(stage)
            before = {kind: self._solver.NumVar(0.0, high, "") for kind in self._kinds}
            self._row(low, high, dict.fromkeys(before.values(), 1.0))
            self._before.append(before)
        for kind, members in self._kinds.items():
            for stage, row in enumerate(self._counts):
                terms = {v: 1.0 for (k, _), v in row.items() if k == kind}
                total = 0.0
                if stage > 0:
                    terms[self._before[stage - 1][kind]] = 1.0
                if stage + 1 < problem.num_stages:
                    terms[self._before[stage][kind]] = -1.0
                else:
                    total = float(len(members))
                self._row(total, total, terms)

    def _stay_together(self) -> None:
        """Rows (4)."""
        infinity = self._solver.infinity()
        for kind in self._kinds:
            known = tuple(accumulate((b.key == kind for b in self.problem.blocks), initial=0))
            for stage, before in enumerate(self._before, 1):
                low, high = self._range(stage)
                part = known[low : high + 1]
                for sign in (1.0, -1.0):  # above the lower hull, below the upper one
                    for slope, at in _hull(tuple(count - part[0] for count in part), sign):
                        offset = sign * part[at] - slope * (low + at)
                        terms = {v: sign * (k == kind) - slope for k, v in before.items()}
                        self._row(offset, infinity, terms)

    def _memory(self) -> None:
        """Rows (5)."""
        problem = self.problem
        ends = {0: problem.blocks[0], problem.num_stages - 1: problem.blocks[-1]}
        least = min(o.transient_bytes for b in problem.blocks for o in b.options)
        for device in range(problem.pp):
            stages = problem.stages_of(device)
            own = [min(o.transient_bytes for o in ends[s].options) for s in stages if s in ends]
            room = problem.limit_bytes - problem.base_bytes - max([least, *own])
            moments = problem.moments(device)
            for moment in moments[:: -(-len(moments) // MAX_MOMENTS)]:
                terms: dict[Variable, float] = {}
                for s in stages:
                    terms |= dict(self._of_states(s, lambda b: b.state_bytes / GIB))
                    alive = moment.get(s)
                    if alive is None:
                        continue
                    for (kind, o), variable in self._counts[s].items():
                        held = self._option(kind, o).alive_bytes(alive, s) / GIB
                        terms[variable] = terms.get(variable, 0.0) + held
                self._row(-self._solver.infinity(), room / GIB, terms)

    # -- seconds -------------------------------------------------------------------------------
    def _stage_seconds(self) -> None:
        """Variables for what every stage takes, in units of a mean stage."""
        infinity = self._solver.infinity()
        slack: dict[Variable, float] = {}
        fastest = {k: min(o.total_s for o in self._block(k).options) for k in self._kinds}
        for s, row in enumerate(self._counts):
            for (k, o), v in row.items():  # what is made again comes on top of the floor
                slack[v] = (fastest[k] - self._option(k, o).total_s) / self._unit_s
            for term, name in ((Term.FORWARD, "forward_s"), (Term.BACKWARD, "backward_s")):
                part = self._parts[term, s] = self._solver.NumVar(0.0, infinity, "")
                terms = {
                    v: getattr(self._option(k, o), name) / self._unit_s for (k, o), v in row.items()
                }
                self._row(-infinity, 0.0, {**terms, part: -1.0})
                slack[part] = 1.0
            half = self._parts[Term.WEIGHTS, s] = self._solver.NumVar(0.0, infinity, "")
            if s == 0 and self.knows_halves:
                self._row(0.0, 0.0, {half: 1.0, self._parts[Term.BACKWARD, s]: -1.0})
            elif self.knows_halves:
                terms = {v: self._option(k, o).weight_s / self._unit_s for (k, o), v in row.items()}
                self._row(0.0, 0.0, {**terms, half: -1.0})
            else:
                terms = {}
                if s > 0:
                    options = {v: self._option(k, o) for (k, o), v in row.items()}
                    terms = {
                        v: (o.backward_s - o.weight_s) / self._unit_s for v, o in options.items()
                    }
                whole = self._parts[Term.BACKWARD, s]
                self._row(-infinity, 0.0, {**terms, half: 1.0, whole: -1.0})
        if self.floor.total_s:
            self._row(self.floor.total_s / self._unit_s, infinity, slack)

    def _updates(self) -> None:
        for device in range(self.problem.pp):
            terms = {
                v: update_s / self._unit_s
                for s in self.problem.stages_of(device)
                for v, update_s in self._of_states(s, lambda b: b.update_s)
            }
            self._row(-self._solver.infinity(), 0.0, {**terms, self._update: -1.0})

    def _terms(self, path: Path) -> tuple[dict[Variable, float], float]:
        """A path as factors of variables, and seconds that do not depend on them."""
        terms: dict[Variable, float] = {}
        constant_s = 0.0

        def add(variable: Variable, factor: float) -> None:
            terms[variable] = terms.get(variable, 0.0) + factor

        for (term, s), count in path.items():
            if term is Term.MESSAGE:
                constant_s += count * self._message_s[s]
            elif term is Term.INPUTS:
                add(self._parts[Term.BACKWARD, s], count)
                add(self._parts[Term.WEIGHTS, s], -count)
            elif term in _OF_STATES:
                for variable, time_s in self._of_states(s, _OF_STATES[term]):
                    add(variable, count * time_s / self._unit_s)
            else:
                add(self._parts[term, s], count)
        return terms, constant_s

    def add(self, path: Path) -> None:
        """A row (1)."""
        terms, constant_s = self._terms(path)
        factors = {variable: -factor for variable, factor in terms.items()}
        infinity = self._solver.infinity()
        self._row(constant_s / self._unit_s, infinity, {**factors, self._time: 1.0})

    def add_exceeded(self, paths: Sequence[Path]) -> bool:
        """Rows (1) of those paths that the last answer exceeds; whether there were any."""
        time = self._time.solution_value()
        exceeded = []
        for path in paths:
            terms, constant_s = self._terms(path)
            length = constant_s / self._unit_s
            length += sum(factor * v.solution_value() for v, factor in terms.items())
            if length > time * (1 + PRECISION):
                exceeded.append(path)
        for path in exceeded:
            self.add(path)
        return bool(exceeded)

    def solve(self) -> float | None:
        """Seconds; infinite if nothing fits, None if the solver gave up."""
        status = self._solver.Solve()
        if status not in (pywraplp.Solver.INFEASIBLE, pywraplp.Solver.OPTIMAL):
            kinds = pywraplp.MPSolverParameters  # once more, without what the last answer left
            parameters = kinds()
            parameters.SetIntegerParam(kinds.INCREMENTALITY, kinds.INCREMENTALITY_OFF)
            status = self._solver.Solve(parameters)
        if status == pywraplp.Solver.INFEASIBLE:
            return math.inf
        if status != pywraplp.Solver.OPTIMAL:
            return None
        return float(self._solver.Objective().Value()) * self._unit_s

    def seconds(self) -> list[list[float]]:
        """Seconds by term and stage, of the last answer."""
        stages = range(self.problem.num_stages)
        forward, backward, weights = (
            [max(0.0, self._parts[term, s].solution_value()) * self._unit_s for s in stages]
            for term in (Term.FORWARD, Term.BACKWARD, Term.WEIGHTS)
        )
        inputs = [max(0.0, b - w) for b, w in zip(backward, weights, strict=True)]
        gather, reduce, each = (
            [sum(t * v.solution_value() for v, t in self._of_states(s, amount)) for s in stages]
            for amount in _OF_STATES.values()
        )
        return [forward, backward, inputs, weights, gather, reduce, self._message_s, each]

    def before(self) -> list[float]:
        """Blocks before stages 1, 2, ..., in the last answer."""
        return [sum(v.solution_value() for v in row.values()) for row in self._before]

    def even_seconds(self) -> list[list[float]]:
        """Seconds by term and stage if all stages were the mean of the last answer's."""
        rows = self.seconds()
        return [
            row if term == Term.MESSAGE else [sum(row) / len(row)] * len(row)
            for term, row in enumerate(rows)
        ]


def _useful(options: Sequence[Option]) -> list[int]:
    """Options that no mixture of others beats; all of them where they differ by more than bytes."""
    keep = sorted(range(len(options)), key=lambda o: (options[o].total_s, options[o].saved_bytes))
    if len({(o.forward_s, o.weight_s, o.held_bytes) for o in options}) > 1:
        return keep
    hull: list[int] = []
    for at in keep:
        if hull and options[at].saved_bytes >= options[hull[-1]].saved_bytes:
            continue
        while len(hull) > 1 and _is_above(*(options[o] for o in (hull[-2], hull[-1], at))):
            hull.pop()
        hull.append(at)
    return hull


def _is_above(a: Option, b: Option, c: Option) -> bool:
    """Whether ``b`` lies on or above the line from ``a`` to ``c``."""
    left = (b.total_s - a.total_s) * (a.saved_bytes - c.saved_bytes)
    return left >= (c.total_s - a.total_s) * (a.saved_bytes - b.saved_bytes)


@lru_cache(maxsize=1 << 12)
def _hull(counts: tuple[int, ...], sign: float) -> tuple[tuple[float, int], ...]:
    """Segments of the lower hull of a sequence, or of the upper one upside down.

    Chains of many shapes are cut alike, so that they are kept.

    Args:
        counts: The sequence.
        sign: 1.0 for the lower hull, -1.0 for the upper one.

    Returns:
        Per segment its slope, and a place where it begins.
    """
    values = [sign * count for count in counts]
    hull: list[int] = []
    for at in range(len(values)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (at - a) < (values[at] - values[a]) * (b - a):
                break
            hull.pop()
        hull.append(at)
    if len(hull) == 1:
        return ((0.0, 0),) if len(values) == 1 else ()
    return tuple(((values[b] - values[a]) / (b - a), a) for a, b in pairwise(hull))
