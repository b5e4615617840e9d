"""Stage cuts and recompute counts by CP-SAT.

Given: a chain of blocks, each with a menu of options (what is recomputed), and a number of stages.

Variables: ``g[i, s]`` block i lies in stage s or later; ``x[i, s] = g[i, s] - g[i, s + 1]`` it lies
in stage s; ``n[s, k, o]`` how many blocks of kind k in stage s take option o (blocks of one kind
are interchangeable, so counts suffice); ``t_s`` seconds of stage s per micro-batch; ``c_s`` seconds
of a message over the boundary before stage s, one way; ``P`` the steady period.

Minimise a surrogate of the step (the event simulator decides later):

* 1F1B: ``sum_s t_s + 2 sum_s c_s + (M - 1) P``, with one row per dependency cycle i..j:
  ``(j - i + 1) P >= sum_{i..j} t + 2 sum_{i<s<=j} c_s``;
* GPipe: ``sum_s t_s + 2 sum_s c_s + (M - 1) (P_f + P_b)``, the slowest forward and backward;
* zero bubble (backwards in two halves, of which ``w_s`` may run at any time): the larger of every
  rank's ``M sum t + sum of f before it``, and ``sum_s (t_s - w_s) + 2 sum_s c_s + (M - 1) max_s
  t_s``;
* interleaved: the larger of ``M P + sum_{s < p - 1} (t_s + 2 c_{s+1})``, with P the sum over chunks
  of their slowest stage (ranks pass the chunks in step), and ``sum_s t_s + 2 sum_s c_s + (M - 1)
  max_s t_s``: with fewer micro-batches than ranks one comes round before the rank is ready for it;

each with the device's once-per-step work added to the slowest; what gradients take that are reduced
after every backward is part of ``t_s``. Where stages may have their states in several forms,
``y[s, a]`` says that stage s has form a, and states and once-per-step work are those of a block in
the form of its stage. Subject to

(1) contiguous:   ``g[i, s] <= g[i + 1, s]``, ``g[i, s + 1] <= g[i - 1, s]`` (no stage is empty)
(2) counts:       ``sum_o n[s, k, o] = sum_{i of kind k} x[i, s]``
(3) memory:       per device, at every moment that no other one exceeds in what is in flight,
                  ``sum state + in_flight_s * saved + largest transient <= limit``
(4) fixed cuts:   ``g`` given where the user named the boundaries
(5) even stages:  ``sum_i x[i, s] <= most`` where a rank has several stages
(6) forms:        ``sum_a y[s, a] = 1``; if ``y[s, a]``: ``state_s >= sum_i state_{i, a} x[i, s]``

The greedy bound of the slowest stage is a lower bound of the period's domain.

Source: period rows after the exact steady-state period of a pipeline with finite warm-up, ours;
count variables replace tied copies (tying is suboptimal as soon as memory binds).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from ortools.sat.python import cp_model

from autopar.plan.types import ScheduleKind
from autopar.solver.greedy_stages import first_choice, slowest_stage_bound_s
from autopar.solver.stages_problem import (
    BlockMenu,
    Option,
    StageProblem,
    StageSolution,
    bounds,
    memory_bytes,
    surrogate_s,
)
from autopar.solver.state_forms import leanest, resolved

Expr: TypeAlias = cp_model.LinearExpr | int
Choice: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Starts of stages 1, 2, ..., and the option of every block."""

MEMORY_UNIT_BYTES = 1 << 16  # CP-SAT is integer-only; bytes are rounded up to this
MEMORY_STEPS = 1 << 20  # units of a limit, at least, so that small models are not rounded away
TIME_STEPS = 1 << 22  # resolution of the whole chain's time; far below model error
OPTIONS_WORK_LIMIT = 0.5  # of choosing options for given cuts
WORK_LIMIT = 2.0  # deterministic seconds of CP-SAT, so that planning does not depend on the machine


def solve_stages(
    problem: StageProblem,
    *,
    work_limit: float = WORK_LIMIT,
    guard_s: float | None = None,
    start: Choice | None = None,
) -> StageSolution | None:
    """The best cuts and options, or None if nothing fits (or nothing was found in time).

    Args:
        problem: The chain.
        work_limit: Deterministic seconds.
        guard_s: Wall-clock seconds, as a guard only.
        start: Starts and options to begin from; the greedy's if left out.
    """
    if len(problem.blocks) < problem.num_stages:
        return None
    slowest_s = slowest_stage_bound_s(leanest(problem))
    if math.isinf(slowest_s):
        return None
    program = _Program(problem, slowest_s)
    if start is None:
        program.start_from(*_start(problem, slowest_s))
    else:
        program.start_from(start)
    solver = _solver(work_limit, guard_s)
    status = solver.solve(program.model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    starts, options = program.read(solver)
    forms = program.read_forms(solver)
    chosen = resolved(problem, starts, forms)
    objective_s = surrogate_s(chosen, starts, options)
    is_optimal = status == cp_model.OPTIMAL
    bound_s = objective_s if is_optimal else solver.best_objective_bound * program.unit_s
    return StageSolution(
        starts=starts,
        options=options,
        objective_s=objective_s,
        bound_s=min(objective_s, bound_s),
        memory_bytes=memory_bytes(chosen, starts, options),
        is_optimal=is_optimal,
        forms=forms,
    )


def _start(problem: StageProblem, slowest_s: float) -> tuple[Choice | None, tuple[int, ...]]:
    """A choice to begin from and its forms: the first form that fits, for all stages."""
    if not problem.forms:
        return _with_better_options(problem, first_choice(problem), slowest_s), ()
    if problem.given_forms:
        return first_choice(leanest(problem)), problem.given_forms
    for form, menus in enumerate(problem.forms):
        alone = replace(problem, blocks=menus, forms=())
        choice = _with_better_options(alone, first_choice(alone), slowest_s)
        if choice is not None:
            return choice, (form,) * problem.num_stages
    return None, ()


def _with_better_options(
    problem: StageProblem, choice: Choice | None, slowest_s: float
) -> Choice | None:
    """The same cuts with the best options for them, which are found in a moment."""
    if choice is None or problem.fixed_starts is not None:
        return choice
    if all(len(block.options) == 1 for block in problem.blocks):
        return choice
    program = _Program(replace(problem, fixed_starts=choice[0]), slowest_s)
    program.start_from(choice)
    solver = _solver(OPTIONS_WORK_LIMIT)
    if solver.solve(program.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return choice
    return program.read(solver)


def _solver(work_limit: float, guard_s: float | None = None) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # several workers race, and the winner varies
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work_limit
    if guard_s is not None:
        solver.parameters.max_time_in_seconds = guard_s
    return solver


def _sum(terms: Iterable[Expr]) -> Expr:
    """A sum that stays an expression."""
    return cp_model.LinearExpr.sum(list(terms))


class _Program:
    """The CP-SAT model of a :class:`StageProblem`; equation numbers as in the module's text."""

    def __init__(self, problem: StageProblem, slowest_s: float) -> None:
        self.problem, self._slowest_s = problem, slowest_s
        self.model = cp_model.CpModel()
        worst_s = sum(max(o.total_s for o in b.options) for b in problem.blocks)
        worst_s += max(sum(b.step_s for b in menu) for menu in problem.menus)
        worst_s += 2 * sum(problem.boundary_s)
        self.unit_s: float = max(worst_s, 1e-12) / TIME_STEPS
        self._kinds: dict[str, list[int]] = {}
        for i, block in enumerate(problem.blocks):
            self._kinds.setdefault(block.key, []).append(i)
        self._x = self._cuts()
        self._n = self._counts()
        self._y = self._forms()
        self._memory()
        self._objective()

    def _steps(self, time_s: float) -> int:
        return round(time_s / self.unit_s)

    def _cuts(self) -> list[list[Expr]]:
        """``x[i][s]`` as expressions of ``g``."""
        model, problem = self.model, self.problem
        n, stages = len(problem.blocks), problem.num_stages
        g = [[model.new_bool_var(f"g{i}_{s}") for s in range(stages)] for i in range(n)]
        for i in range(n):
            model.add(g[i][0] == 1)
            for s in range(stages):
                if i + 1 < n:
                    model.add_implication(g[i][s], g[i + 1][s])  # (1)
                if s + 1 < stages and i > 0:
                    model.add_implication(g[i][s + 1], g[i - 1][s])  # (1)
        for s in range(1, stages):
            model.add(g[0][s] == 0)
            model.add(g[n - 1][s] == 1)
        if problem.fixed_starts is not None:  # (4)
            for s, start in enumerate(problem.fixed_starts, 1):
                model.add(g[start][s] == 1)
                model.add(g[start - 1][s] == 0)
        self._g = g
        if problem.most_blocks < n:  # (5)
            for s in range(stages):
                after = _sum(g[i][s + 1] for i in range(n)) if s + 1 < stages else 0
                model.add(_sum(g[i][s] for i in range(n)) - after <= problem.most_blocks)
        return [
            [g[i][s] - g[i][s + 1] if s + 1 < stages else g[i][s] for s in range(stages)]
            for i in range(n)
        ]

    def _counts(self) -> list[dict[tuple[str, int], cp_model.IntVar]]:
        """``n[s][kind, option]``."""
        result = []
        for s in range(self.problem.num_stages):
            row: dict[tuple[str, int], cp_model.IntVar] = {}
            for kind, members in self._kinds.items():
                menu = self.problem.blocks[members[0]].options
                for o in range(len(menu)):
                    row[kind, o] = self.model.new_int_var(0, len(members), f"n{s}_{kind}_{o}")
                total = _sum(row[kind, o] for o in range(len(menu)))
                self.model.add(total == _sum(self._x[i][s] for i in members))  # (2)
            result.append(row)
        return result

    def _forms(self) -> list[list[cp_model.IntVar]]:
        """``y[s][form]``, rows (6); nothing where there is no choice."""
        problem, found = self.problem, []
        for s in range(problem.num_stages if problem.forms else 0):
            row = [self.model.new_bool_var(f"y{s}_{a}") for a in range(len(problem.forms))]
            self.model.add_exactly_one(row)
            if problem.given_forms:
                self.model.add(row[problem.given_forms[s]] == 1)
            found.append(row)
        return found

    def _of_states(self, stage: int, amount: Callable[[BlockMenu], int]) -> Expr:
        """What the blocks of a stage take in the form of its states, rows (6)."""
        rows = [
            _sum(size * self._x[i][stage] for i, b in enumerate(menu) if (size := amount(b)))
            for menu in self.problem.menus
        ]
        if not self._y:
            return rows[0]
        most = max(sum(map(amount, menu)) for menu in self.problem.menus)
        found = self.model.new_int_var(0, most, "")
        for chosen, row in zip(self._y[stage], rows, strict=True):
            self.model.add(found >= row).only_enforce_if(chosen)
        return found

    def _option(self, kind: str, index: int) -> Option:
        return self.problem.blocks[self._kinds[kind][0]].options[index]

    def _memory(self) -> None:
        """Row (3), in units that are rounded up."""
        problem = self.problem
        room = max(0, problem.limit_bytes - problem.base_bytes)
        # a power of two: amounts that are whole KiB or MiB stay exact
        unit_bytes = 1 << max(0, min(MEMORY_UNIT_BYTES, room // MEMORY_STEPS).bit_length() - 1)
        limit = room // unit_bytes

        def units(amount_bytes: int) -> int:
            return -(-amount_bytes // unit_bytes)

        least = sum(min(o.saved_bytes for o in b.options) for b in problem.blocks)
        least += max(sum(b.state_bytes for b in menu) for menu in problem.menus)
        most = sum(max(max(o.saved_bytes, o.held_bytes) for o in b.options) for b in problem.blocks)
        most = most * max(problem.in_flight) + least
        most += max((o.transient_bytes for b in problem.blocks for o in b.options), default=0)
        if most // unit_bytes + len(problem.blocks) < limit:
            return  # the row can't bind
        for device in range(problem.pp):
            terms: list[Expr] = []
            chosen: dict[int, list[tuple[Option, cp_model.IntVar]]] = {}
            transient = self.model.new_int_var(0, max(0, limit), f"transient{device}")
            for s in problem.stages_of(device):
                chosen[s] = []
                terms.append(self._of_states(s, lambda b: units(b.state_bytes)))
                for (kind, o), count in self._n[s].items():
                    option = self._option(kind, o)
                    chosen[s].append((option, count))
                    used = self.model.new_bool_var(f"used{s}_{kind}_{o}")
                    self.model.add(count <= len(self._kinds[kind]) * used)
                    self.model.add(transient >= units(option.transient_bytes) * used)
            for moment in problem.moments(device):
                held = [
                    units(option.alive_bytes(alive, s)) * count
                    for s, alive in moment.items()
                    for option, count in chosen[s]
                ]
                self.model.add(_sum([*terms, *held]) + transient <= limit)

    def _objective(self) -> None:
        problem, model = self.problem, self.model
        p, count, stages = problem.pp, problem.num_microbatches, problem.num_stages
        forward = [self._time(s, "forward_s") for s in range(stages)]
        backward = [self._time(s, "backward_s") for s in range(stages)]
        each = [self._of_states(s, lambda b: self._steps(b.each_s)) for s in range(stages)]
        backward = [b + e for b, e in zip(backward, each, strict=True)]
        total = [f + b for f, b in zip(forward, backward, strict=True)]
        message = [self._message(s) for s in range(stages)]
        top = TIME_STEPS * 4
        step = model.new_int_var(0, top, "step")
        steps = [self._of_states(s, lambda b: self._steps(b.once_s)) for s in range(stages)]
        for d in range(p):
            model.add(step >= _sum(steps[s] for s in problem.stages_of(d)))
        if problem.schedule.splits_backward:
            self._split_objective(forward, total, each, message, step, top)
            return
        if problem.virtual > 1:
            chunks = [model.new_int_var(0, top, f"chunk{k}") for k in range(problem.virtual)]
            for s in range(stages):
                model.add(chunks[s // p] >= total[s])
            slowest = model.new_int_var(0, top, "slowest")
            for s in range(stages):
                model.add(slowest >= total[s])
            body = model.new_int_var(0, (count + 2 * p) * top, "body")
            fill = _sum(total[s] + 2 * message[s + 1] for s in range(p - 1))
            model.add(body >= count * _sum(chunks) + fill)
            model.add(body >= _sum(total) + 2 * _sum(message) + (count - 1) * slowest)
            model.minimize(body + step)
            return
        base = _sum(total) + 2 * _sum(message) + step
        if problem.schedule in (ScheduleKind.GPIPE, ScheduleKind.FORWARD):
            slow_f = model.new_int_var(0, top, "slow_f")
            slow_b = model.new_int_var(0, top, "slow_b")
            for s in range(stages):
                model.add(slow_f >= forward[s])
                model.add(slow_b >= backward[s])
            model.minimize(base + (count - 1) * (slow_f + slow_b))
            return
        # A period is a quotient; with all denominators' multiple the row stays integral.
        scale = _common_multiple(p)
        floor = math.floor(self._slowest_s / self.unit_s) - len(problem.blocks)
        period = model.new_int_var(max(0, floor) * scale, top * scale, "period")
        for i in range(p):
            for j in range(i, p):
                cycle = _sum(total[i : j + 1]) + 2 * _sum(message[i + 1 : j + 1])
                model.add(period >= scale // (j - i + 1) * cycle)
        model.minimize(scale * base + (count - 1) * period)
        self.unit_s /= scale

    def _split_objective(
        self,
        forward: Sequence[Expr],
        total: Sequence[Expr],
        each: Sequence[Expr],
        message: Sequence[Expr],
        step: cp_model.IntVar,
        top: int,
    ) -> None:
        """The larger of every rank's work behind its fill, and of the way of one micro-batch."""
        problem, model = self.problem, self.model
        count = problem.num_microbatches
        slowest = model.new_int_var(0, top, "slowest")
        body = model.new_int_var(0, (count + 2 * problem.pp) * top, "body")
        for s in range(problem.num_stages):
            model.add(slowest >= total[s])
        for d in range(problem.pp):
            busy = _sum(total[s] for s in problem.stages_of(d))
            model.add(body >= count * busy + _sum(forward[:d]) + _sum(message[: d + 1]))
        weights = _sum(self._time(s, "weight_s") for s in range(problem.num_stages))
        first = _sum(total) - weights - _sum(each)
        model.add(body >= first + 2 * _sum(message) + (count - 1) * slowest)
        model.minimize(body + step)

    def start_from(self, choice: Choice | None, forms: Sequence[int] = ()) -> None:
        """Hint a choice, and what follows from it: a part of an assignment is no start."""
        if choice is None:
            return
        starts, options = choice
        for row, chosen in zip(self._y, forms, strict=False):
            for form, variable in enumerate(row):
                self.model.add_hint(variable, form == chosen)
        for i, row in enumerate(self._g):
            for s, variable in enumerate(row):
                self.model.add_hint(variable, s == 0 or i >= starts[s - 1])
        for s, (low, high) in enumerate(bounds(starts, len(options))):
            for (kind, o), variable in self._n[s].items():
                members = [i for i in self._kinds[kind] if low <= i < high and options[i] == o]
                self.model.add_hint(variable, len(members))
        solver = _solver(WORK_LIMIT)
        solver.parameters.fix_variables_to_their_hinted_value = True
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return
        self.model.clear_hints()  # type: ignore[no-untyped-call]  # ortools leaves it untyped
        for index in range(len(self.model.proto.variables)):
            variable = self.model.get_int_var_from_proto_index(index)
            self.model.add_hint(variable, solver.value(variable))

    def read_forms(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        """Form of every stage; nothing where there is no choice."""
        return tuple(next(a for a, y in enumerate(row) if solver.value(y)) for row in self._y)

    def _time(self, stage: int, field: str) -> Expr:
        return _sum(
            self._steps(getattr(self._option(kind, o), field)) * count
            for (kind, o), count in self._n[stage].items()
        )

    def _message(self, stage: int) -> Expr:
        """Seconds of a message over the boundary before ``stage``."""
        if stage == 0:
            return 0
        return _sum(
            self._steps(time_s) * (self._g[i][stage] - self._g[i - 1][stage])
            for i, time_s in enumerate(self.problem.boundary_s, 1)
        )

    def read(self, solver: cp_model.CpSolver) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Starts and options: among equal blocks of a stage the first ones take later options."""
        n, stages = len(self.problem.blocks), self.problem.num_stages
        starts = tuple(
            next(i for i in range(n) if solver.value(self._g[i][s])) for s in range(1, stages)
        )
        options = [0] * n
        for s, (low, high) in enumerate(bounds(starts, n)):
            for kind, members in self._kinds.items():
                here = [i for i in members if low <= i < high]
                menu = len(self.problem.blocks[members[0]].options)
                picks = [
                    o
                    for o in reversed(range(menu))
                    for _ in range(solver.value(self._n[s][kind, o]))
                ]
                for i, o in zip(here, picks, strict=True):
                    options[i] = o
        return starts, tuple(options)


def _common_multiple(count: int) -> int:
    """A multiple of 1..count, or a near one where that grows too large."""
    scale = 1
    for k in range(2, count + 1):
        a, b = scale, k
        while b:
            a, b = b, a % b
        if scale // a * k > 2520:  # beyond, the remainder is below the resolution of time
            return scale
        scale = scale // a * k
    return scale
