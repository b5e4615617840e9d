"""What ranks do in a step as numbers: computes, gathering, reducing, messages that are waited for.

A rank's row is a list of *things*: ``8 * own stage + thing``, where the first four things are the
kinds of computes (:mod:`autopar.plan.order_codes`). A message has a *place*, a number: that of the
first micro-batch over an edge, and one more for each further one. Stages send to their neighbours
alone. Rows are kept, since shapes that differ in data ranks, splits or ZeRO level have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from autopar.plan.actions import ActionKind
from autopar.plan.order_codes import CODED_KINDS, NUM_KINDS, CodedRow, microbatches
from autopar.plan.orders import codes_of
from autopar.plan.types import MeshShape, ScheduleKind

KEPT_ROWS = 16
NUM_THINGS = 2 * NUM_KINDS
GATHER, REDUCE, EACH = range(NUM_KINDS, NUM_KINDS + 3)
NONE = -1
_WHOLE = (CODED_KINDS.index(ActionKind.BACKWARD), CODED_KINDS.index(ActionKind.BACKWARD_WEIGHT))
_FORWARD = CODED_KINDS.index(ActionKind.FORWARD)
_WEIGHT = CODED_KINDS.index(ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one rank does.

    Attributes:
        stages: Its stages, in the order of the model.
        things: What it does, in order.
        microbatches: Of each thing, among its likes.
        reads: By thing, the place of the first message that it waits for, or ``NONE``.
        sends: Likewise of what it sends.
        edges: By thing, the number of the edge that it sends over, or ``NONE``.
        lanes: By thing, the number of the directed pair of ranks, or ``NONE``.
    """

    stages: tuple[int, ...]
    things: Sequence[int]
    microbatches: Sequence[int]
    reads: Sequence[int]
    sends: Sequence[int]
    edges: Sequence[int]
    lanes: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepRows:
    """What all ranks do.

    Attributes:
        rows: By rank.
        num_stages: Stages of all ranks.
        num_places: Places of messages.
        edge_stages: By edge its source and target stage.
        num_lanes: Directed pairs of ranks.
    """

    rows: tuple[StepRow, ...]
    num_stages: int
    num_places: int
    edge_stages: tuple[tuple[int, int], ...]
    num_lanes: int


def step_rows(
    kind: ScheduleKind,
    mesh: MeshShape,
    count: int,
    warmup: tuple[int, ...] | None = None,
    *,
    reduces_each: bool = False,
) -> StepRows:
    """The rows of an order.

    Args:
        kind: The schedule.
        mesh: Which pipeline rank has which stages.
        count: Micro-batches.
        warmup: As for :func:`~autopar.plan.orders.order_of`.
        reduces_each: Whether gradients may be reduced after every backward too, not only after
            the last one.
    """
    pipeline = MeshShape(pp=mesh.pp, virtual=mesh.virtual, placement=mesh.placement)
    return _rows(kind, pipeline, count, warmup, reduces_each)


@lru_cache(maxsize=KEPT_ROWS)
def _rows(
    kind: ScheduleKind,
    mesh: MeshShape,
    count: int,
    warmup: tuple[int, ...] | None,
    reduces_each: bool,
) -> StepRows:
    edges: dict[tuple[int, int], int] = {}
    lanes: dict[tuple[int, int], int] = {}
    rows: list[StepRow] = []
    for rank, row in enumerate(codes_of(kind, mesh, count, warmup)):
        things = _things(row, reduces_each)
        rows.append(
            StepRow(
                row.stages, things, microbatches(things), *_ways(rank, mesh, count, edges, lanes)
            )
        )
    places = 2 * mesh.num_stages * count
    return StepRows(tuple(rows), mesh.num_stages, places, tuple(edges), len(lanes))


def _things(row: CodedRow, reduces_each: bool) -> list[int]:
    """Computes with gathering before a stage's first one, and reducing after its last backward."""
    codes, back = row.codes, row.codes[::-1]
    stages = range(len(row.stages))
    makes = [NUM_THINGS * at + kind for at in stages for kind in range(NUM_KINDS)]
    own = [{code for code in set(codes) if code // NUM_KINDS == at} for at in stages]
    more: dict[int, list[int]] = {}  # by the position that it stands before
    for at, kinds in enumerate(own):
        last = len(codes) - 1 - min(map(back.index, kinds))
        if codes[last] % NUM_KINDS in _WHOLE:
            more.setdefault(last + 1, []).append(NUM_THINGS * at + REDUCE)
    for at, kinds in enumerate(own):
        more.setdefault(min(map(codes.index, kinds)), []).append(NUM_THINGS * at + GATHER)
    each: list[tuple[int, ...]] = [(thing,) for thing in makes]
    for at in stages if reduces_each else ():
        for kind in _WHOLE:
            each[NUM_KINDS * at + kind] += (NUM_THINGS * at + EACH,)
    found: list[int] = []
    begin = 0
    for position in sorted({*more, len(codes)}):
        found += chain.from_iterable(map(each.__getitem__, codes[begin:position]))
        found += more.get(position, ())
        begin = position
    return found


def _ways(
    rank: int,
    mesh: MeshShape,
    count: int,
    edges: dict[tuple[int, int], int],
    lanes: dict[tuple[int, int], int],
) -> tuple[list[int], list[int], list[int], list[int]]:
    """By thing of a rank: what it reads and sends, over which edge and which lane."""
    stages = mesh.stages_of(rank)
    reads, sends, over, along = ([NONE] * (NUM_THINGS * len(stages)) for _ in range(4))
    for at, stage in enumerate(stages):
        for kind in range(NUM_KINDS):
            if kind == _WEIGHT:
                continue
            ahead = kind == _FORWARD
            near, to = (stage - 1, stage + 1) if ahead else (stage + 1, stage - 1)
            thing = NUM_THINGS * at + kind
            if 0 <= near < mesh.num_stages and mesh.pipeline_rank(near) != rank:
                reads[thing] = (2 * stage + ahead) * count
            if 0 <= to < mesh.num_stages and mesh.pipeline_rank(to) != rank:
                sends[thing] = (2 * to + ahead) * count
                over[thing] = edges.setdefault((stage, to), len(edges))
                along[thing] = lanes.setdefault((rank, mesh.pipeline_rank(to)), len(lanes))
    return reads, sends, over, along
