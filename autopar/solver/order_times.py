"""Seconds of a step in a given order, from seconds of stages alone.

What :func:`cost_models.simulate.simulate` finds for the action lists of such a step, without making
them: stages follow each other, each message goes from a stage to its neighbour, gathering precedes
a stage's first compute and reducing follows its last backward. Orders are written as numbers
(:mod:`autopar.solver.step_rows`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache

from autopar.errors import DeadlockError
from autopar.plan.actions import ActionKind
from autopar.plan.order_codes import CODED_KINDS, NUM_KINDS, CodedRow
from autopar.plan.orders import codes_of
from autopar.plan.schedule import Alive, alive_at_once, most_in_flight
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.solver.step_rows import (
    EACH,
    GATHER,
    NONE,
    NUM_THINGS,
    REDUCE,
    StepRows,
    step_rows,
)
from cost_models.simulate import StageSeconds

KEPT_FLIGHTS = 1024
Moments = tuple[tuple[Mapping[int, Alive], ...], ...]


def step_s(
    kind: ScheduleKind,
    mesh: MeshShape,
    count: int,
    warmup: tuple[int, ...] | None,
    stages: Sequence[StageSeconds],
    links: Mapping[tuple[int, int], float],
    each_s: Sequence[float] = (),
) -> float:
    """Seconds until the last rank and the last message are done.

    Args:
        kind: The schedule.
        mesh: Which pipeline rank has which stages.
        count: Micro-batches.
        warmup: As for :func:`~autopar.plan.orders.order_of`.
        stages: Seconds by stage; of ``once_s`` gathering and reducing count.
        links: Seconds of a message by (source stage, target stage).
        each_s: By stage, seconds of reducing gradients after every backward; none if left out.
    """
    rows = step_rows(kind, mesh, count, warmup, reduces_each=any(each_s))
    now, free = _ends(rows, stages, links, each_s)
    return max((*now, *free), default=0.0)


def ends_of(  # noqa: PLR0913  an order, and all that its steps take
    kind: ScheduleKind,
    mesh: MeshShape,
    count: int,
    warmup: tuple[int, ...] | None,
    stages: Sequence[StageSeconds],
    links: Mapping[tuple[int, int], float],
    *,
    each_s: Sequence[float],
    begin_s: Sequence[float],
    reduces_once: Sequence[bool],
) -> tuple[list[float], list[float]]:
    """When each rank is done, and each lane of messages.

    Arguments are those of :func:`step_s`, when each rank begins, and by stage whether gradients are
    reduced after its last backward.
    """
    rows = step_rows(kind, mesh, count, warmup, reduces_each=any(each_s))
    return _ends(rows, stages, links, each_s, begin_s, reduces_once)


def in_flight_of(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Most micro-batches in flight by stage."""
    return _in_flight(kind, _alone(mesh), settled_count(kind, mesh, count, warmup), warmup)


def flights_of(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[tuple[int, ...], Moments]:
    """Most micro-batches in flight by stage, and what is alive together in a rank's stages.

    The latter is empty where each rank has one stage and whole backwards: the former tells it all.
    """
    return _flights(kind, _alone(mesh), settled_count(kind, mesh, count, warmup), warmup)


def settled_count(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> int:
    """The fewest micro-batches known to be alive together as so many are.

    Orders repeat themselves once they are under way: with halves of backwards after two rounds of
    the ranks, micro-batch by micro-batch; interleaved ones round by round, and those that the last
    round lacks are missing in as many rounds before it.

    >>> settled_count(ScheduleKind.INTERLEAVED, MeshShape(pp=4, virtual=2), 130, None)
    18
    """
    pp, rest = mesh.pp, count % mesh.pp
    if warmup is not None:
        return count
    if kind.splits_backward:
        return min(count, 3 * pp)
    if kind is ScheduleKind.INTERLEAVED:
        return min(count, (rest + 2) * pp + rest)
    return count


def _alone(mesh: MeshShape) -> MeshShape:
    """The pipeline alone."""
    return MeshShape(pp=mesh.pp, virtual=mesh.virtual, placement=mesh.placement)


@lru_cache(maxsize=KEPT_FLIGHTS)
def _flights(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[tuple[int, ...], Moments]:
    rows = codes_of(kind, mesh, count, warmup)
    is_plain = mesh.virtual == 1 and not kind.splits_backward
    return _most(rows), () if is_plain else tuple(alive_at_once(*row) for row in rows)


@lru_cache(maxsize=KEPT_FLIGHTS)
def _in_flight(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[int, ...]:
    return _most(codes_of(kind, mesh, count, warmup))


def _most(rows: Sequence[CodedRow]) -> tuple[int, ...]:
    """Most micro-batches in flight by stage."""
    found = {
        stage: most
        for codes, stages in rows
        for stage, most in zip(stages, most_in_flight(codes, len(stages)), strict=True)
    }
    return tuple(found[stage] for stage in sorted(found))


def _ends(
    order: StepRows,
    stages: Sequence[StageSeconds],
    links: Mapping[tuple[int, int], float],
    each_s: Sequence[float] = (),
    begin_s: Sequence[float] = (),
    reduces_once: Sequence[bool] = (),
) -> tuple[list[float], list[float]]:
    """When each rank is done, and each lane of messages; see :func:`ends_of`."""
    by_stage = _seconds(stages, each_s, reduces_once)
    edge_s = [links.get(edge, 0.0) for edge in order.edge_stages]
    arrives: list[float | None] = [None] * order.num_places
    waiting: list[int] = [NONE] * order.num_places
    free_s = [0.0] * order.num_lanes
    tables = [
        (row, [time_s for stage in row.stages for time_s in by_stage[stage]], len(row.things))
        for row in order.rows
    ]
    position, now = [0] * len(tables), [*begin_s] or [0.0] * len(tables)
    ready = deque(range(len(tables)))
    while ready:
        rank = ready.popleft()
        (row, seconds, end), at, now_s = tables[rank], position[rank], now[rank]
        things, microbatches, reads, sends = row.things, row.microbatches, row.reads, row.sends
        while at < end:
            thing = things[at]
            place = reads[thing]
            if place >= 0:
                place += microbatches[at]
                there_s = arrives[place]
                if there_s is None:
                    waiting[place] = rank
                    break
                if there_s > now_s:
                    now_s = there_s
            now_s += seconds[thing]
            place = sends[thing]
            if place >= 0:
                place += microbatches[at]
                lane = row.lanes[thing]
                start_s = free_s[lane] if free_s[lane] > now_s else now_s
                arrives[place] = free_s[lane] = start_s + edge_s[row.edges[thing]]
                if waiting[place] >= 0:
                    ready.append(waiting[place])
            at += 1
        position[rank], now[rank] = at, now_s
    stuck = [r for r, (_, _, end) in enumerate(tables) if position[r] < end]
    if stuck:
        raise DeadlockError(f"the order can't finish: pipeline ranks {stuck} wait for messages")
    return now, free_s


def _seconds(
    stages: Sequence[StageSeconds], each_s: Sequence[float], reduces_once: Sequence[bool]
) -> list[list[float]]:
    """By stage and thing."""
    once = reduces_once or (True,) * len(stages)
    each = each_s or (0.0,) * len(stages)
    found = []
    for stage, reduces, after_s in zip(stages, once, each, strict=True):
        row = [0.0] * NUM_THINGS
        row[:NUM_KINDS] = [stage.of(kind) for kind in CODED_KINDS]
        row[GATHER] = stage.of(ActionKind.UNSHARD)
        row[REDUCE] = stage.of(ActionKind.REDUCE_GRAD) * reduces
        row[EACH] = after_s
        found.append(row)
    return found
