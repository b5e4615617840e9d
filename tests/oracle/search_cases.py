"""Small random chains with every plan of theirs: what the whole search is compared with.

A case is a chain of up to eight blocks on eight devices: cut problems of all meshes, numbers of
micro-batches and schedules, among them interleaved, zero bubble and ZB-V. Two chains in five let
every stage choose between two forms of its states: a large one, or a small one whose gradients are
reduced after every backward. Blocks of a kind are interchangeable, so the plans are gone through by
how many blocks of a kind a stage runs with each option; each stands for all that differ in names
alone. Each is run by its order
(:mod:`autopar.solver.step_paths`, which the tests compare with the event simulator).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from math import comb, inf, prod

from autopar.plan.actions import ActionKind
from autopar.plan.orders import order_of
from autopar.plan.schedule import action_lists, alive_together, all_in_flight
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.solver.cuts import better_stages, first_stages
from autopar.solver.master import Master
from autopar.solver.order_bound import OrderBound
from autopar.solver.schedule_choice import simulated_s
from autopar.solver.stages import solve_stages
from autopar.solver.stages_problem import (
    BlockMenu,
    Option,
    StageProblem,
    StageSolution,
    bounds,
)
from autopar.solver.state_choice import Chosen, FormChoice
from autopar.solver.state_forms import resolved, with_forms
from autopar.solver.step_paths import StepPaths, paths_of
from autopar.units import MIB
from cost_models.simulate import StageSeconds, simulate

DEVICES = 8
MOST_PLANS = 100_000
NO_LIMIT = 1 << 50
ROUNDING = 1e-9
PLAIN = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)
V = StagePlacement.V


@dataclass(frozen=True)
class Found:
    """A plan of a shape, and the simulated seconds of its step."""

    problem: StageProblem
    solution: StageSolution
    estimate_s: float

    @property
    def chosen(self) -> StageProblem:
        """What blocks cost in the forms of their stages."""
        return resolved(self.problem, self.solution.starts, self.solution.forms)

    @property
    def step_s(self) -> float:
        return self.estimate_s

    @property
    def fits(self) -> bool:
        return max(self.solution.memory_bytes) <= self.problem.limit_bytes


class ChainSpace:
    """Shapes of a chain on eight devices: cut problems whose menus depend on the mesh."""

    early_efforts, efforts = 2, 3

    def bound_s(self, shape: StageProblem, effort: int, enough_s: float) -> float:
        if effort == 0:
            return 0.0
        splits = shape.schedule.splits_backward
        bound = OrderBound(problem=shape, is_open=False, may_split=splits)
        return bound.quick().least_s() if effort == 1 else bound.least_s(enough_s)

    def open(self, shape: StageProblem, best_s: float) -> Found | None:
        if shape.forms:
            return self._chosen(shape, FormChoice(shape).any())
        solved = first_stages(shape)
        if solved is None and shape.virtual == 1:
            solved = solve_stages(shape)
        return None if solved is None else self._found(shape, solved)

    def outlook_s(self, shape: StageProblem, best_s: float) -> float:
        found = self.open(shape, best_s)
        return inf if found is None else found.estimate_s

    def _found(self, shape: StageProblem, solution: StageSolution) -> Found:
        return Found(shape, solution, simulated_s(shape.mesh, shape, solution))

    def _chosen(self, shape: StageProblem, chosen: Chosen | None) -> Found | None:
        if chosen is None:
            return None
        solution = replace(chosen.solution, forms=chosen.forms)
        return Found(shape, solution, chosen.time_s)

    def improve(self, candidate: Found) -> Found:
        problem = candidate.problem
        if problem.forms:
            solution = candidate.solution
            found = FormChoice(problem).improved(solution.starts, solution.forms)
            return min(
                (candidate, self._chosen(problem, found) or candidate),
                key=lambda row: row.estimate_s,
            )
        solved = better_stages(problem, candidate.solution.starts)
        rows = [candidate] if solved is None else [candidate, self._found(problem, solved)]
        return min(rows, key=lambda row: row.estimate_s)

    def model_bound_s(self, candidate: Found, enough_s: float) -> float:
        return self.bound_s(candidate.problem, 2, enough_s)

    def judge(self, candidate: Found) -> Found:
        return candidate

    def preference(self, candidate: Found) -> tuple[float, int, int, int, str]:
        return candidate.estimate_s, candidate.problem.pp, 0, 0, ""

    def is_plain(self, shape: StageProblem) -> bool:
        return False

    def is_late(self) -> bool:
        return False

    def spent(self, shape: StageProblem) -> float:
        return 0.0

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


def _meshes(rng: random.Random, count: int) -> Iterator[tuple[MeshShape, ScheduleKind]]:
    """Meshes with schedules; some chains have plain ones alone."""
    for pp in (1, 2, 4, 8):
        if pp <= count:
            for kind in PLAIN:
                yield MeshShape(pp=pp), kind
    if rng.random() < 0.6:
        for pp in (2, 4):
            if pp <= count:
                yield MeshShape(pp=pp), ScheduleKind.ZERO_BUBBLE
            if 2 * pp <= count:
                yield MeshShape(pp=pp, virtual=2), ScheduleKind.INTERLEAVED
                yield MeshShape(pp=pp, virtual=2, placement=V), ScheduleKind.ZBV


def _menus(
    rng: random.Random, count: int
) -> tuple[list[tuple[float, int, int, float, float]], list[int], list[float]]:
    kinds = [
        (
            rng.uniform(0.5, 2.0), rng.randint(5, 20) * MIB, rng.randint(1, 10) * MIB,
            rng.random(), rng.uniform(0.2, 0.6),
        )
        for _ in range(2)
    ]  # fmt: skip
    return kinds, [rng.randrange(2) for _ in range(count)], [rng.uniform(0.0, 2.0) for _ in "abc"]


def shapes_of(seed: int, most_blocks: int) -> list[StageProblem]:
    """Cut problems of all meshes, micro-batches and schedules of a random chain; no limit."""
    rng = random.Random(seed)
    count = rng.randint(3, most_blocks)
    kinds, picks, once = _menus(rng, count)
    boundaries = [rng.uniform(0.0, 0.3) for _ in range(count - 1)]
    small = (rng.uniform(0.1, 0.6), rng.uniform(0.26, 0.7)) if seed % 5 < 2 else None
    found = []
    num_plans = 0
    for (mesh, kind), microbatches in product(_meshes(rng, count), (2, 4)):
        share = 8 / (DEVICES // mesh.pp * microbatches) ** 0.9  # small ones are less efficient
        order = order_of(kind, mesh, microbatches)
        menus = tuple(_menu(pick, kinds[pick], share, once) for pick in picks)
        problem = StageProblem(
            blocks=menus,
            boundary_s=tuple(b * share for b in boundaries),
            pp=mesh.pp,
            virtual=mesh.virtual,
            num_microbatches=microbatches,
            schedule=kind,
            in_flight=all_in_flight(order),
            limit_bytes=NO_LIMIT,
            placement=mesh.placement,
            together=alive_together(order) if mesh.virtual > 1 or kind.splits_backward else (),
        )
        choices = 2 ** (count + mesh.num_stages * (small is not None))
        num_plans += comb(count - 1, mesh.num_stages - 1) * choices
        if num_plans <= MOST_PLANS:
            found.append(problem if small is None else _with_small_form(problem, *small))
    return found


def _with_small_form(problem: StageProblem, share: float, factor: float) -> StageProblem:
    """The problem with a second form: less state, gradients reduced after every backward.

    Args:
        problem: With states of one form.
        share: Of the bytes, that the other form has.
        factor: Of the seconds of reducing once, that reducing after one backward takes.
    """
    count = problem.num_microbatches
    other = tuple(
        replace(
            b,
            state_bytes=int(share * b.state_bytes),
            step_s=b.step_s - b.reduce_s + count * factor * b.reduce_s,
            reduce_s=count * factor * b.reduce_s,
            num_reduces=count,
        )
        for b in problem.blocks
    )
    return with_forms(problem, [problem.blocks, other])


def _menu(
    pick: int,
    kind: tuple[float, int, int, float, float],
    share: float,
    once: Sequence[float],
) -> BlockMenu:
    time_s, saved, state, again, weights = kind
    kept = int(saved * share)
    return BlockMenu(
        key=str(pick),
        options=(
            Option(
                name="none", forward_s=time_s * share, backward_s=2 * time_s * share,
                saved_bytes=kept, transient_bytes=kept // 2,
                weight_s=2 * weights * time_s * share, held_bytes=kept // 3,
            ),
            Option(
                name="full", forward_s=time_s * share, backward_s=(2 + again) * time_s * share,
                saved_bytes=kept // 5, transient_bytes=kept,
                weight_s=2 * weights * time_s * share, held_bytes=kept // 3,
            ),
        ),
        state_bytes=state,
        step_s=sum(once),
        gather_s=once[0],
        reduce_s=once[1],
    )  # fmt: skip


# -- every plan ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """One plan: seconds, peak, and what makes it."""

    time_s: float
    peak_bytes: int
    problem: StageProblem
    starts: tuple[int, ...]
    options: tuple[int, ...]
    forms: tuple[int, ...] = ()

    @property
    def chosen(self) -> StageProblem:
        """What blocks cost in the forms of their stages."""
        return resolved(self.problem, self.starts, self.forms)


@dataclass(frozen=True)
class _Stage:
    """A stage with some options of its blocks."""

    options: tuple[int, ...]
    forward_s: float
    backward_s: float
    weight_s: float
    saved: int
    held: int
    transient: int


def _stages(problem: StageProblem, low: int, high: int) -> list[_Stage]:
    """A run of blocks with every choice of options, those that differ in names alone once."""
    found: dict[tuple[tuple[str, int], ...], _Stage] = {}
    for options in product(*(range(len(problem.blocks[i].options)) for i in range(low, high))):
        keys = [problem.blocks[i].key for i in range(low, high)]
        mark = tuple(sorted(zip(keys, options, strict=True)))
        if mark in found:
            continue
        rows = [
            problem.blocks[i].options[o] for i, o in zip(range(low, high), options, strict=True)
        ]
        backward_s = sum(o.backward_s for o in rows)
        weight_s = backward_s if low == 0 else sum(o.weight_s for o in rows)
        found[mark] = _Stage(
            options, sum(o.forward_s for o in rows), backward_s, weight_s,
            sum(o.saved_bytes for o in rows), sum(o.held_bytes for o in rows),
            max(o.transient_bytes for o in rows),
        )  # fmt: skip
    return list(found.values())


def every_plan(problem: StageProblem) -> Iterator[Plan]:
    """Every plan of a shape, run by its order."""
    count, stages = len(problem.blocks), problem.num_stages
    graph = paths_of(
        problem.schedule, problem.mesh, problem.num_microbatches, reduces_each=bool(problem.forms)
    )
    menus = {
        (low, high): _stages(problem, low, high)
        for low in range(count)
        for high in range(low + 1, min(count, low + problem.most_blocks) + 1)
    }
    for starts in combinations(range(1, count), stages - 1):
        runs = bounds(starts, count)
        if any(run not in menus for run in runs):
            continue
        for forms in product(range(len(problem.menus)), repeat=stages):
            once = _Once.of(resolved(problem, starts, forms), runs)
            yield from _with_every_option(problem, starts, forms, once, graph, menus)


@dataclass(frozen=True)
class _Once:
    """What stages take whatever they recompute."""

    gather: list[float]
    reduce: list[float]
    each: list[float]
    update: list[float]
    state: list[int]

    @classmethod
    def of(cls, problem: StageProblem, runs: Sequence[tuple[int, int]]) -> _Once:
        blocks = [problem.blocks[low:high] for low, high in runs]
        each = [sum(b.each_s for b in row) for row in blocks]
        reduce = [sum(b.reduce_s for b in row) for row in blocks]
        return cls(
            [sum(b.gather_s for b in row) for row in blocks],
            [0.0 if e else r for r, e in zip(reduce, each, strict=True)],
            each,
            [sum(b.update_s for b in row) for row in blocks],
            [sum(b.state_bytes for b in row) for row in blocks],
        )


def _with_every_option(
    problem: StageProblem,
    starts: tuple[int, ...],
    forms: tuple[int, ...],
    once: _Once,
    graph: StepPaths,
    menus: dict[tuple[int, int], list[_Stage]],
) -> Iterator[Plan]:
    ranks = [problem.stages_of(d) for d in range(problem.pp)]
    moments = [problem.moments(d) for d in range(problem.pp)]
    message = [0.0, *(problem.boundary_s[s - 1] for s in starts)]
    last_s = max(sum(once.update[s] for s in row) for row in ranks)
    for picks in product(*(menus[run] for run in bounds(starts, len(problem.blocks)))):
        backward = [p.backward_s for p in picks]
        weights = [p.weight_s for p in picks]
        inputs = [b - w for b, w in zip(backward, weights, strict=True)]
        forward = [p.forward_s for p in picks]
        seconds = [
            forward, backward, inputs, weights, once.gather, once.reduce, message, once.each
        ]  # fmt: skip
        peak = max(
            sum(once.state[s] for s in row)
            + max(
                sum(
                    n.before * picks[s].saved + n.between * (picks[s].held if s else picks[s].saved)
                    for s, n in moment.items()
                )
                for moment in own
            )
            + max(picks[s].transient for s in row)
            for row, own in zip(ranks, moments, strict=True)
        )
        options = tuple(o for p in picks for o in p.options)
        yield Plan(
            graph.end_s(seconds) + last_s, peak, problem, starts, options,
            forms if problem.forms else (),
        )  # fmt: skip


def event_s(problem: StageProblem, starts: Sequence[int], options: Sequence[int]) -> float:
    """Seconds of a step in the event simulator, the optimizer's last.

    Args:
        problem: Without a choice of forms.
        starts: First block of stages 1, 2, ...
        options: Option of every block.
    """
    mesh, count = problem.mesh, problem.num_microbatches
    stages, levels = [], []
    runs = bounds(starts, len(problem.blocks))
    for stage, (low, high) in enumerate(runs):
        blocks = problem.blocks[low:high]
        num_reduces = blocks[0].num_reduces
        levels.append(2 if num_reduces > 1 else 1)
        chosen = [b.options[o] for b, o in zip(blocks, options[low:high], strict=True)]
        backward_s = sum(o.backward_s for o in chosen)
        stages.append(
            StageSeconds(
                forward_s=sum(o.forward_s for o in chosen),
                backward_s=backward_s,
                weight_s=sum(o.weight_s for o in chosen) if stage else backward_s,
                once_s={
                    ActionKind.UNSHARD: sum(b.gather_s for b in blocks),
                    ActionKind.REDUCE_GRAD: sum(b.reduce_s for b in blocks) / num_reduces,
                },
            )
        )
    ahead = [(s - 1, s) for s in range(1, problem.num_stages)]
    lists = action_lists(
        order_of(problem.schedule, mesh, count),
        mesh,
        forward_edges=ahead,
        backward_edges=[(b, a) for a, b in ahead],
        zero_levels=levels,
    )
    links = {}
    for (a, b), start in zip(ahead, starts, strict=True):
        links[a, b] = links[b, a] = problem.boundary_s[start - 1]
    update = [sum(b.update_s for b in problem.blocks[low:high]) for low, high in runs]
    last_s = max(sum(update[s] for s in problem.stages_of(d)) for d in range(problem.pp))
    return simulate(lists, stages, p2p_s=links).makespan_s + last_s


# -- a case ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Verdict:
    """What the search found for a case, against the best of all plans.

    Attributes:
        num_plans: Plans of the case, all that differ in names alone counted.
        schedules: Schedules among its shapes.
        binds: Whether the fastest plan without a limit does not fit.
        has_forms: Whether stages choose between two forms of their states.
        best: The fastest plan that fits.
        winner: What the search chose.
        bound_s: The search's bound.
        model_gap: The search's.
    """

    num_plans: int
    schedules: frozenset[ScheduleKind]
    binds: bool
    has_forms: bool
    best: Plan
    winner: Found | None
    bound_s: float
    model_gap: float

    @property
    def gap(self) -> float:
        """Share of the chosen plan's time that the bound leaves open."""
        return 0.0 if self.winner is None else 1 - self.bound_s / self.winner.step_s

    @property
    def loss(self) -> float:
        """Share by which the chosen plan is slower than the best."""
        return inf if self.winner is None else self.winner.step_s / self.best.time_s - 1


@cache
def judged(seed: int, most_blocks: int) -> Verdict:
    """A case by exhaustive search and by ours; every second one has a limit that binds."""
    shapes = shapes_of(seed, most_blocks)
    plans = [plan for shape in shapes for plan in every_plan(shape)]
    free = min(plans, key=lambda p: (p.time_s, p.peak_bytes))
    limit = NO_LIMIT
    if seed % 2:  # the fastest plan must not fit, the leanest must
        least = min(p.peak_bytes for p in plans)
        limit = least + int((free.peak_bytes - least) * random.Random(seed).uniform(0.05, 0.99))
        shapes = [replace(shape, limit_bytes=limit) for shape in shapes]
    best = min((p for p in plans if p.peak_bytes <= limit), key=lambda p: p.time_s)
    master: Master[StageProblem, Found, Found] = Master(ChainSpace())
    winner = master.run(shapes[:3], shapes[3:])
    return Verdict(
        num_plans=sum(
            comb(len(s.blocks) - 1, s.num_stages - 1)
            * prod(len(b.options) for b in s.blocks)
            * len(s.menus) ** s.num_stages
            for s in shapes
        ),
        schedules=frozenset(s.schedule for s in shapes),
        binds=free.peak_bytes > limit,
        has_forms=any(s.forms for s in shapes),
        best=best,
        winner=winner,
        bound_s=master.bound_s,
        model_gap=master.model_gap,
    )
