"""Seconds of a step in a given order, from seconds of stages alone.

What :func:`cost_models.simulate.simulate` finds for the action lists of such a step, without making
them: stages follow each other, each message goes from a stage to its neighbour, gathering precedes
a stage's first compute and reducing follows its last backward. An order is written as numbers once
and kept, since shapes that differ in data ranks, splits or ZeRO level have the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import DeadlockError
from autopar.plan.actions import ActionKind
from autopar.plan.orders import order_of
from autopar.plan.schedule import Alive, Order, alive_together, all_in_flight
from autopar.plan.types import MeshShape, ScheduleKind
from cost_models.simulate import StageSeconds

KEPT_ORDERS = 8
KEPT_FLIGHTS = 1024
_KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
_FORWARD, _BACKWARD, _, _WEIGHT = _KINDS
_NONE = -1

_Step = tuple[int, int, int, int, int, int]
Moments = tuple[tuple[Mapping[int, Alive], ...], ...]


@dataclass(frozen=True, slots=True)
class NumberedOrder:
    """An order as numbers.

    Attributes:
        rows: Per pipeline rank, per compute: stage and kind as one number; the stage if it is its
            first compute; the stage if gradients are reduced after it; the message that it waits
            for; the message that it sends; the lane of that.
        num_messages: Messages.
        edges: Per message its edge, a number.
        edge_stages: Per edge the source and target stage.
        num_lanes: Directed pairs of ranks.
    """

    rows: tuple[tuple[_Step, ...], ...]
    num_messages: int
    edges: tuple[int, ...]
    edge_stages: tuple[tuple[int, int], ...]
    num_lanes: int


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
    return run(_numbered(kind, _alone(mesh), count, warmup), stages, links, each_s)


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
    order = _numbered(kind, _alone(mesh), count, warmup)
    return _ends(order, stages, links, each_s, begin_s, reduces_once)


def order_in(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> Order:
    """An order, kept: :func:`~autopar.plan.orders.order_of`."""
    return _order(kind, _alone(mesh), count, warmup)


def in_flight_of(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Most micro-batches in flight by stage."""
    return _in_flight(kind, _alone(mesh), count, warmup)


def flights_of(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[tuple[int, ...], Moments]:
    """Most micro-batches in flight by stage, and what is alive together in a rank's stages.

    The latter is empty where each rank has one stage and whole backwards: the former tells it all.
    """
    return _flights(kind, _alone(mesh), count, warmup)


def _alone(mesh: MeshShape) -> MeshShape:
    """The pipeline alone."""
    return MeshShape(pp=mesh.pp, virtual=mesh.virtual, placement=mesh.placement)


@lru_cache(maxsize=KEPT_FLIGHTS)
def _flights(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[tuple[int, ...], Moments]:
    order = _order(kind, mesh, count, warmup)
    is_plain = mesh.virtual == 1 and not kind.splits_backward
    return all_in_flight(order), () if is_plain else alive_together(order)


@lru_cache(maxsize=KEPT_FLIGHTS)
def _in_flight(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> tuple[int, ...]:
    return all_in_flight(_order(kind, mesh, count, warmup))


@lru_cache(maxsize=KEPT_ORDERS)
def _numbered(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> NumberedOrder:
    return numbered_order(_order(kind, mesh, count, warmup), mesh.num_stages)


@lru_cache(maxsize=KEPT_ORDERS)
def _order(
    kind: ScheduleKind, mesh: MeshShape, count: int, warmup: tuple[int, ...] | None
) -> Order:
    return order_of(kind, mesh, count, warmup)


def numbered_order(order: Order, num_stages: int) -> NumberedOrder:
    """An order as numbers.

    Args:
        order: Who computes what in which order.
        num_stages: Stages of all ranks.
    """
    rank_of = {stage: rank for rank, row in enumerate(order) for stage in {c.stage for c in row}}
    count = 1 + max((c.microbatch for row in order for c in row), default=0)
    messages: dict[int, int] = {}  # by reading stage, whether forward, micro-batch
    edges: list[int] = []
    edge_of: dict[tuple[int, int], int] = {}
    lanes: dict[tuple[int, int], int] = {}

    def way(stage: int, is_forward: bool) -> tuple[int, int, int, int, int]:
        """Where a pass reads and sends: first message and edge of each, and the lane; or none."""
        rank = rank_of[stage]
        reads = sends = read_edge = send_edge = lane = _NONE
        near, to = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        if 0 <= near < num_stages and rank_of[near] != rank:
            reads = (2 * stage + is_forward) * count
            read_edge = edge_of.setdefault((near, stage), len(edge_of))
        if 0 <= to < num_stages and rank_of[to] != rank:
            sends = (2 * to + is_forward) * count
            send_edge = edge_of.setdefault((stage, to), len(edge_of))
            lane = lanes.setdefault((rank, rank_of[to]), len(lanes))
        return reads, read_edge, sends, send_edge, lane

    ways = {stage: (way(stage, False), way(stage, True)) for stage in rank_of}
    rows = []
    for row in order:
        last = {stage: at for at, (stage, _, _) in enumerate(row)}
        seen: set[int] = set()
        steps: list[_Step] = []
        for at, (stage, kind, microbatch) in enumerate(row):
            first = _NONE if stage in seen else stage
            seen.add(stage)
            is_forward, is_weights = kind is _FORWARD, kind is _WEIGHT
            reduces = last[stage] == at and (is_weights or kind is _BACKWARD)
            waits = sent = lane = _NONE
            if not is_weights:
                reads, read_edge, sends, send_edge, lane = ways[stage][is_forward]
                if reads >= 0:
                    waits = messages.setdefault(reads + microbatch, len(edges))
                    if waits == len(edges):
                        edges.append(read_edge)
                if sends >= 0:
                    sent = messages.setdefault(sends + microbatch, len(edges))
                    if sent == len(edges):
                        edges.append(send_edge)
            number = 0 if is_forward else 3 if is_weights else 1 if kind is _BACKWARD else 2
            what = stage * 4 + number
            steps.append((what, first, stage if reduces else _NONE, waits, sent, lane))
        rows.append(tuple(steps))
    return NumberedOrder(tuple(rows), len(edges), tuple(edges), tuple(edge_of), len(lanes))


def run(
    order: NumberedOrder,
    stages: Sequence[StageSeconds],
    links: Mapping[tuple[int, int], float],
    each_s: Sequence[float] = (),
) -> float:
    """Seconds of a numbered order; see :func:`step_s`."""
    now, free = _ends(order, stages, links, each_s)
    return max((*now, *free), default=0.0)


def _ends(
    order: NumberedOrder,
    stages: Sequence[StageSeconds],
    links: Mapping[tuple[int, int], float],
    each_s: Sequence[float] = (),
    begin_s: Sequence[float] = (),
    reduces_once: Sequence[bool] = (),
) -> tuple[list[float], list[float]]:
    """When each rank is done, and each lane of messages; see :func:`ends_of`."""
    seconds = [stage.of(kind) for stage in stages for kind in _KINDS]
    gather_s = [stage.of(ActionKind.UNSHARD) for stage in stages]
    reduce_s = [stage.of(ActionKind.REDUCE_GRAD) for stage in stages]
    if reduces_once:
        reduce_s = [time_s * once for time_s, once in zip(reduce_s, reduces_once, strict=True)]
    makes = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)  # gradients of weights
    after_s = [time_s * (kind in makes) for time_s in each_s if any(each_s) for kind in _KINDS]
    edge_s = [links.get(edge, 0.0) for edge in order.edge_stages]
    arrives: list[float | None] = [None] * order.num_messages
    waiting: list[int] = [_NONE] * order.num_messages
    free_s = [0.0] * order.num_lanes
    position, now = [0] * len(order.rows), [*begin_s] or [0.0] * len(order.rows)
    ready = deque(range(len(order.rows)))
    while ready:
        rank = ready.popleft()
        row, at, now_s = order.rows[rank], position[rank], now[rank]
        while at < len(row):
            what, first, last, waits, sends, lane = row[at]
            if waits >= 0:
                there_s = arrives[waits]
                if there_s is None:
                    waiting[waits] = rank
                    break
                if first >= 0:
                    now_s += gather_s[first]
                if there_s > now_s:
                    now_s = there_s
            elif first >= 0:
                now_s += gather_s[first]
            now_s += seconds[what]
            if sends >= 0:
                start_s = free_s[lane] if free_s[lane] > now_s else now_s
                arrives[sends] = free_s[lane] = start_s + edge_s[order.edges[sends]]
                if waiting[sends] >= 0:
                    ready.append(waiting[sends])
            if after_s:
                now_s += after_s[what]
            if last >= 0:
                now_s += reduce_s[last]
            at += 1
        position[rank], now[rank] = at, now_s
    stuck = [r for r, row in enumerate(order.rows) if position[r] < len(row)]
    if stuck:
        raise DeadlockError(f"the order can't finish: pipeline ranks {stuck} wait for messages")
    return now, free_s
