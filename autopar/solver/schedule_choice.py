"""Orders of forwards and backwards that share the cuts of a shape: which is the fastest that fits.

A shape of one stage per pipeline rank is ranked as plain 1F1B. Once its cuts are known, the event
simulator runs them in other orders too:

* 1F1B with a deeper warm-up: point-to-point time is a tax on every micro-batch of plain 1F1B, and
  twice the warm-up (``2 (p - i) - 1`` on rank ``i``) buys most of it back for memory; where memory
  is short, as deep as fits;
* zero bubble (ZB-H1): gradients of weights fill what would be bubbles.

An order is taken over plain 1F1B if it is faster by more than rounding: it holds more.

Source: eager 1F1B: Zhuang et al., MLSys 2023. Zero bubble: Qi et al., ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.plan.actions import ActionKind
from autopar.plan.schedule import Alive
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.constraints import Constraints
from autopar.solver.order_times import flights_of, step_s
from autopar.solver.stages_problem import StageProblem, StageSolution, bounds, memory_bytes
from cost_models.simulate import StageSeconds

STEADY_ROUNDS = 3
"""Rounds of micro-batches through the pipeline after which a step repeats itself."""

LEAST_GAIN = 1e-6
"""Share of a step by which another order must be faster than plain 1F1B."""


@dataclass(frozen=True, slots=True)
class ChosenOrder:
    """An order with what it takes.

    Attributes:
        schedule: Its kind.
        warmup: Its warm-up depths, where they are not those of the kind.
        problem: The cut problem with the order's micro-batches in flight.
        memory_bytes: Estimated peak per pipeline rank.
        time_s: Simulated seconds of a step from the menus' figures.
    """

    schedule: ScheduleKind
    warmup: tuple[int, ...] | None
    problem: StageProblem
    memory_bytes: tuple[int, ...]
    time_s: float


def flights(
    schedule: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Most micro-batches alive at once, by stage."""
    return flights_of(schedule, mesh, _enough(schedule, mesh, count, warmup), warmup)[0]


def _enough(
    schedule: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> int:
    """Micro-batches after which ranks hold no more; as many as there are if they are fewer."""
    if schedule in (ScheduleKind.GPIPE, ScheduleKind.FORWARD):
        return count  # all forwards come first: what is alive grows with their number
    if schedule is ScheduleKind.INTERLEAVED:  # the size of rounds depends on their number
        return min(count, (STEADY_ROUNDS + (mesh.virtual > 1)) * mesh.pp + count % mesh.pp)
    # ranks begin with so many forwards at most, then end as many micro-batches as they begin
    return min(count, 1 + max(2 * mesh.pp, *(warmup or (0,))))


def alive_of(
    schedule: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None = None
) -> tuple[tuple[Mapping[int, Alive], ...], ...]:
    """What is alive at once in the stages of a rank.

    Empty where each rank has one stage and whole backwards: then what is in flight tells it all.
    """
    return flights_of(schedule, mesh, _enough(schedule, mesh, count, warmup), warmup)[1]


def is_open_order(schedule: ScheduleKind, mesh: MeshShape, wish: Constraints) -> bool:
    """Whether a shape's order is one of several that share its cuts."""
    return (
        schedule in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE)
        and mesh.virtual == 1
        and mesh.pp > 1
        and wish.warmup is None
        and wish.schedule in (None, ScheduleKind.ONE_F_ONE_B)
    )


def may_split_backward(schedule: ScheduleKind, mesh: MeshShape, wish: Constraints) -> bool:
    """Whether a plan of a shape may run the halves of backwards apart."""
    if wish.schedule is not None:
        return wish.schedule.splits_backward
    return schedule.splits_backward or is_open_order(schedule, mesh, wish)


def best_order(
    schedule: ScheduleKind,
    warmup: tuple[int, ...] | None,
    mesh: MeshShape,
    problem: StageProblem,
    stages: StageSolution,
    wish: Constraints,
    *,
    is_promising: Callable[[], bool] = lambda: True,
) -> ChosenOrder:
    """The fastest order that fits, for given cuts; the shape's own if no other is better.

    Args:
        schedule: The shape's.
        warmup: Likewise.
        mesh: Likewise.
        problem: The cut problem.
        stages: Its cuts and options.
        wish: What the user fixed.
        is_promising: Whether it is worth while to try others than plain 1F1B.
    """
    own = _tried(schedule, warmup, mesh, problem, stages)
    if not is_open_order(schedule, mesh, wish):
        return own
    is_plain = schedule is ScheduleKind.ONE_F_ONE_B and warmup is None
    best = plain = own if is_plain else plain_order(mesh, problem, stages)
    limit_s = plain.time_s * (1 - LEAST_GAIN)
    others = _others(mesh, plain, stages, wish) if is_promising() else ()
    for kind, depths in others:
        tried, memory = _held(kind, depths, mesh, problem, stages)
        if max(memory) > problem.limit_bytes:
            continue
        found = _run(kind, depths, mesh, tried, stages, memory)
        if found.time_s < min(limit_s, best.time_s):
            best = found
    if best is plain and max(plain.memory_bytes) > problem.limit_bytes:
        return own
    return best


def plain_order(mesh: MeshShape, problem: StageProblem, stages: StageSolution) -> ChosenOrder:
    """Plain 1F1B of given cuts."""
    return _tried(ScheduleKind.ONE_F_ONE_B, None, mesh, problem, stages)


def _others(
    mesh: MeshShape, plain: ChosenOrder, stages: StageSolution, wish: Constraints
) -> Iterator[tuple[ScheduleKind, tuple[int, ...] | None]]:
    deeper = deeper_warmup(mesh, plain.problem, stages)
    if deeper is not None:
        yield ScheduleKind.ONE_F_ONE_B, deeper
    if wish.schedule is None:
        yield ScheduleKind.ZERO_BUBBLE, None


def deeper_warmup(
    mesh: MeshShape, problem: StageProblem, stages: StageSolution
) -> tuple[int, ...] | None:
    """Twice the plain warm-up as far as memory and micro-batches go; None if that is the plain one.

    Args:
        mesh: One stage per pipeline rank.
        problem: The cut problem with plain 1F1B's micro-batches in flight.
        stages: Its cuts and options.
    """
    runs = bounds(stages.starts, len(problem.blocks))
    needed = memory_bytes(problem, stages.starts, stages.options)
    depths: list[int] = []
    for rank, (low, high) in enumerate(runs):
        plain = mesh.pp - rank
        each = sum(
            problem.blocks[i].options[stages.options[i]].saved_bytes for i in range(low, high)
        )
        room = problem.limit_bytes - needed[rank]
        more = max(0, room) // each if each else plain
        depth = max(1, min(2 * plain - 1, plain + more, problem.num_microbatches))
        depths.append(min(depth, depths[-1]) if depths else depth)
    classic = [min(mesh.pp - rank, problem.num_microbatches) for rank in range(mesh.pp)]
    return tuple(depths) if depths > classic else None


def _tried(
    kind: ScheduleKind,
    warmup: tuple[int, ...] | None,
    mesh: MeshShape,
    problem: StageProblem,
    stages: StageSolution,
) -> ChosenOrder:
    tried, memory = _held(kind, warmup, mesh, problem, stages)
    return _run(kind, warmup, mesh, tried, stages, memory)


def _held(
    kind: ScheduleKind,
    warmup: tuple[int, ...] | None,
    mesh: MeshShape,
    problem: StageProblem,
    stages: StageSolution,
) -> tuple[StageProblem, tuple[int, ...]]:
    """The cut problem in an order, and estimated peaks per pipeline rank."""
    count = problem.num_microbatches
    alive, together = flights_of(kind, mesh, _enough(kind, mesh, count, warmup), warmup)
    tried = replace(problem, schedule=kind, in_flight=alive, together=together)
    return tried, memory_bytes(tried, stages.starts, stages.options)


def _run(
    kind: ScheduleKind,
    warmup: tuple[int, ...] | None,
    mesh: MeshShape,
    problem: StageProblem,
    stages: StageSolution,
    memory: tuple[int, ...],
) -> ChosenOrder:
    return ChosenOrder(
        schedule=kind,
        warmup=warmup,
        problem=problem,
        memory_bytes=memory,
        time_s=simulated_s(mesh, problem, stages, warmup),
    )


def simulated_s(
    mesh: MeshShape,
    problem: StageProblem,
    solution: StageSolution,
    warmup: tuple[int, ...] | None = None,
) -> float:
    """Simulated seconds of a step from the menus' figures.

    A step of many micro-batches is periodic after some rounds: what follows is added, not run. The
    optimizer's seconds are added last.
    """
    kind = problem.schedule
    run = _Run(mesh, problem, solution)
    return (
        sum(weight * run.step_s(kind, n, warmup) for n, weight in sampled_counts(problem, warmup))
        + run.update_s
    )


def sampled_counts(
    problem: StageProblem, warmup: tuple[int, ...] | None = None
) -> tuple[tuple[int, float], ...]:
    """Numbers of micro-batches and weights whose weighted steps are the step of all of them.

    One number where there are few; else two a round apart, since a step is periodic after some
    rounds.
    """
    count, pp = problem.num_microbatches, problem.pp
    rounds = STEADY_ROUNDS + (problem.virtual > 1) + (warmup is not None)
    enough = rounds * pp + count % pp
    if count <= enough + 2 * pp:
        return ((count, 1.0),)
    more = (count - enough) / pp
    return (enough, 1.0 - more), (enough + pp, more)


class _Run:
    """Estimated stages, to be run in any order."""

    def __init__(self, mesh: MeshShape, problem: StageProblem, solution: StageSolution) -> None:
        self._mesh = mesh
        blocks = problem.blocks
        chosen = [b.options[o] for b, o in zip(blocks, solution.options, strict=True)]
        runs = bounds(solution.starts, len(blocks))
        self._seconds, self._each_s = [], list[float]()
        for stage, (low, high) in enumerate(runs):
            backward_s = sum(o.backward_s for o in chosen[low:high])
            # nothing waits for the first stage's backward: all of it is the half of the weights
            weight_s = backward_s if stage == 0 else sum(o.weight_s for o in chosen[low:high])
            gather_s = sum(b.gather_s for b in blocks[low:high])
            each_s = sum(b.each_s for b in blocks[low:high])
            self._each_s.append(each_s)
            reduce_s = 0.0 if each_s else sum(b.reduce_s for b in blocks[low:high])
            self._seconds.append(
                StageSeconds(
                    forward_s=sum(o.forward_s for o in chosen[low:high]),
                    backward_s=backward_s,
                    weight_s=min(weight_s, backward_s),
                    once_s={ActionKind.UNSHARD: gather_s, ActionKind.REDUCE_GRAD: reduce_s},
                )
            )
        update = [sum(b.update_s for b in blocks[low:high]) for low, high in runs]
        self.update_s = max(sum(update[s] for s in mesh.stages_of(d)) for d in range(mesh.pp))
        self._links: dict[tuple[int, int], float] = {}
        # a message is the mean of both ways
        ways = 1 if problem.schedule is not ScheduleKind.FORWARD else 2
        for s, start in enumerate(solution.starts, 1):
            seconds = ways * problem.boundary_s[start - 1]
            self._links[s - 1, s] = self._links[s, s - 1] = seconds

    def step_s(self, kind: ScheduleKind, count: int, warmup: tuple[int, ...] | None) -> float:
        """Seconds of a step in an order, before the optimizer's."""
        return step_s(kind, self._mesh, count, warmup, self._seconds, self._links, self._each_s)
