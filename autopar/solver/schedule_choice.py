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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.plan.actions import ActionKind
from autopar.plan.orders import order_of, plain_warmup, receives_ahead
from autopar.plan.schedule import Alive, Order, action_lists, alive_together, all_in_flight
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.constraints import Constraints
from autopar.solver.stages_problem import StageProblem, StageSolution, bounds, memory_bytes
from cost_models.simulate import StageSeconds, simulate

Together: TypeAlias = tuple[tuple[Mapping[int, Alive], ...], ...]
"""By rank, moments: stage -> what is alive in it."""

STEADY_ROUNDS = 3  # rounds of micro-batches through the pipeline after which a step is periodic
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
    return all_in_flight(order_of(schedule, mesh, count, warmup))


def alive_of(
    schedule: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None = None
) -> Together:
    """What is alive at once in the stages of a rank.

    Empty where each rank has one stage and whole backwards: then what is in flight tells it all.
    """
    return _alive_of(schedule, mesh, order_of(schedule, mesh, count, warmup))


def _alive_of(schedule: ScheduleKind, mesh: MeshShape, order: Order) -> Together:
    if mesh.virtual == 1 and not schedule.splits_backward:
        return ()
    return alive_together(order)


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


def least_flights(
    schedule: ScheduleKind,
    mesh: MeshShape,
    count: int,
    warmup: tuple[int, ...] | None,
    wish: Constraints,
) -> tuple[int, ...]:
    """Micro-batches before their backward that a stage has at once, in any order it may get.

    What is held between the halves of a backward comes on top, and is left out.
    """
    if is_open_order(schedule, mesh, wish):
        return tuple(min(count, depth) for depth in plain_warmup(mesh.pp))
    if not schedule.splits_backward:
        return flights(schedule, mesh, count, warmup)
    found = [0] * mesh.num_stages
    for moments in alive_together(order_of(schedule, mesh, count)):
        for moment in moments:
            for stage, alive in moment.items():
                found[stage] = max(found[stage], alive.before)
    return tuple(found)


def deepest_warmup(
    schedule: ScheduleKind, mesh: MeshShape, warmup: tuple[int, ...] | None, wish: Constraints
) -> tuple[int, ...]:
    """Most forwards before the first backward, by rank, in any order of 1F1B that it may get."""
    if warmup is not None:
        return warmup
    plain = plain_warmup(mesh.pp)
    is_open = is_open_order(schedule, mesh, wish)
    return tuple(2 * depth - 1 for depth in plain) if is_open else plain


def best_order(
    schedule: ScheduleKind,
    warmup: tuple[int, ...] | None,
    mesh: MeshShape,
    problem: StageProblem,
    stages: StageSolution,
    wish: Constraints,
    *,
    zero_level: int = 0,
) -> ChosenOrder:
    """The fastest order that fits, for given cuts; the shape's own if no other is better.

    Args:
        schedule: The shape's.
        warmup: Likewise.
        mesh: Likewise.
        problem: The cut problem.
        stages: Its cuts and options.
        wish: What the user fixed.
        zero_level: Of all parameters.
    """
    own = _tried(schedule, warmup, mesh, problem, stages, zero_level)
    if not is_open_order(schedule, mesh, wish):
        return own
    best = plain = plain_order(mesh, problem, stages, zero_level=zero_level)
    limit_s = plain.time_s * (1 - LEAST_GAIN)
    for kind, depths in _others(mesh, plain, stages, wish):
        found = _tried(kind, depths, mesh, problem, stages, zero_level)
        fits = max(found.memory_bytes) <= problem.limit_bytes
        if fits and found.time_s < min(limit_s, best.time_s):
            best = found
    if best is plain and max(plain.memory_bytes) > problem.limit_bytes:
        return own
    return best


def plain_order(
    mesh: MeshShape, problem: StageProblem, stages: StageSolution, *, zero_level: int = 0
) -> ChosenOrder:
    """Plain 1F1B of given cuts."""
    return _tried(ScheduleKind.ONE_F_ONE_B, None, mesh, problem, stages, zero_level)


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
    zero_level: int,
) -> ChosenOrder:
    order = order_of(kind, mesh, problem.num_microbatches, warmup)
    alive = all_in_flight(order)
    together = _alive_of(kind, mesh, order)
    tried = replace(problem, schedule=kind, in_flight=alive, together=together)
    return ChosenOrder(
        schedule=kind,
        warmup=warmup,
        problem=tried,
        memory_bytes=memory_bytes(tried, stages.starts, stages.options),
        time_s=simulated_s(mesh, tried, stages, warmup=warmup, zero_level=zero_level),
    )


def simulated_s(
    mesh: MeshShape,
    problem: StageProblem,
    solution: StageSolution,
    *,
    warmup: tuple[int, ...] | None = None,
    zero_level: int = 0,
) -> float:
    """Simulated seconds of a step from the menus' figures.

    A step of many micro-batches is periodic after some rounds; what follows is added, not run.

    Args:
        mesh: The pipeline.
        problem: Its cut problem, with the order's kind.
        solution: Its cuts and options.
        warmup: Depths of 1F1B, where they are not the plain ones.
        zero_level: Of all parameters.
    """
    count, round_ = problem.num_microbatches, mesh.pp
    is_deep = warmup is not None or problem.schedule.splits_backward
    enough = (STEADY_ROUNDS + (mesh.virtual > 1) + 2 * is_deep) * round_ + count % round_
    if count <= enough + 2 * round_:
        return _simulated_s(mesh, problem, solution, warmup, zero_level, count)
    first_s, second_s = (
        _simulated_s(mesh, problem, solution, warmup, zero_level, n)
        for n in (enough, enough + round_)
    )
    return first_s + (count - enough) / round_ * (second_s - first_s)


def _simulated_s(
    mesh: MeshShape,
    problem: StageProblem,
    solution: StageSolution,
    warmup: tuple[int, ...] | None,
    zero_level: int,
    count: int,
) -> float:
    runs = bounds(solution.starts, len(problem.blocks))
    chosen = [b.options[o] for b, o in zip(problem.blocks, solution.options, strict=True)]
    reduces = problem.num_microbatches if zero_level >= 2 else 1
    seconds = []
    for stage, (low, high) in enumerate(runs):
        backward_s = sum(o.backward_s for o in chosen[low:high])
        # nothing waits for the first stage's backward: all of it is the half of the weights
        weight_s = backward_s if stage == 0 else sum(o.weight_s for o in chosen[low:high])
        blocks = problem.blocks[low:high]
        seconds.append(
            StageSeconds(
                forward_s=sum(o.forward_s for o in chosen[low:high]),
                backward_s=backward_s,
                weight_s=min(weight_s, backward_s),
                once_s={
                    ActionKind.UNSHARD: sum(b.gather_s for b in blocks),
                    ActionKind.REDUCE_GRAD: sum(b.reduce_s for b in blocks) / reduces,
                },
            )
        )
    update = [sum(b.update_s for b in problem.blocks[low:high]) for low, high in runs]
    order = order_of(problem.schedule, mesh, count, warmup)
    ahead = [(s - 1, s) for s in range(1, mesh.num_stages)]
    trains = problem.schedule is not ScheduleKind.FORWARD
    lists = action_lists(
        order,
        mesh,
        forward_edges=ahead,
        backward_edges=[(t, s) for s, t in ahead] if trains else (),
        zero_levels=(zero_level,) * mesh.num_stages,
        prefetch=receives_ahead(warmup),
    )
    links = {}
    for s, start in enumerate(solution.starts, 1):  # a message: the mean of both ways
        links[s - 1, s] = links[s, s - 1] = (1 if trains else 2) * problem.boundary_s[start - 1]
    run = simulate(lists, seconds, p2p_s=links)
    return run.makespan_s + max(sum(update[s] for s in mesh.stages_of(d)) for d in range(mesh.pp))
