"""Who computes what in which order, and the full action list of every pipeline rank.

Two steps. :func:`compute_order` gives each pipeline rank its order of forwards and backwards:

* *gpipe*: all forwards, then all backwards; every micro-batch is in flight at once.
* *1f1b*: rank ``r`` of ``p`` runs ``p - r - 1`` forwards, then pairs of one forward and one
  backward; at most ``p - r`` micro-batches are in flight.
* *interleaved*: ``v`` stages per rank. Micro-batches go in rounds; within a round all of them pass
  one stage of the rank before the next. Warm-up is ``(v - 1) * round + 2 * (p - r - 1)``.

:func:`action_lists` adds everything around the computing: prologue, parameter gathering, messages,
gradient reduction. The lists hold for each of the ``dp * tp`` ranks of a pipeline rank alike.

Messages. SEND never blocks; RECV posts a receive and the F or B that needs it waits. Per directed
pair of pipeline ranks the receives are posted in the order in which the sender sends, since a
transport may ignore tags (NCCL does); each is posted as late as that allows. One channel per
directed pair is assumed: where both directions of a pair share one, two large sends that cross
would wait for each other. Values between two stages on one rank need no message.

>>> order = compute_order(ScheduleKind.ONE_F_ONE_B, pp=2, virtual=1, num_microbatches=3)
>>> for row in order:
...     print(*row)
0F0 0F1 0B0 0F2 0B1 0B2
1F0 1B0 1F1 1B1 1F2 1B2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, compress
from operator import gt, or_
from typing import NamedTuple, TypeAlias

from autopar.errors import ConfigError
from autopar.plan.actions import Action, ActionKind
from autopar.plan.order_codes import (
    CODED_KINDS,
    NUM_KINDS,
    CodedRow,
    forward_codes,
    microbatches,
    whole_codes,
)
from autopar.plan.types import MeshShape, ScheduleKind

F = ActionKind.FORWARD
B = ActionKind.BACKWARD
I = ActionKind.BACKWARD_INPUT  # noqa: E741 - the schedules' own letter
W = ActionKind.BACKWARD_WEIGHT
# which pass a compute belongs to, by what it reads of other stages: W reads only its own
_PASS = {F: F, B: B, I: B}
FIELD_BITS = 32  # of a number of micro-batches, where several of them are one integer
FIELD = (1 << FIELD_BITS) - 1


class Compute(NamedTuple):
    """The forward (``F``) or backward (``B``, or its halves) of one stage on one micro-batch."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        """Such as ``2F0``."""
        return f"{self.stage}{self.kind.value}{self.microbatch}"


Order: TypeAlias = tuple[tuple[Compute, ...], ...]
"""Per pipeline rank, what it computes, in order."""

ActionLists: TypeAlias = tuple[tuple[Action, ...], ...]
"""Per pipeline rank, everything it does, in order."""

Edge: TypeAlias = tuple[int, int]
"""A source stage and a target stage."""


_made = partial(tuple.__new__, Compute)  # of a triple, without a call of its constructor


def decoded(codes: Sequence[int], stages: Sequence[int]) -> tuple[Compute, ...]:
    """The computes of a rank.

    Args:
        codes: Written as numbers (:mod:`autopar.plan.order_codes`).
        stages: The rank's stages, in the order of the model.

    >>> print(*decoded([0, 4, 5, 1], (2, 5)))
    2F0 5F0 5B0 2B0
    """
    own = [stage for stage in stages for _ in CODED_KINDS]
    kinds = CODED_KINDS * len(stages)
    columns = (map(own.__getitem__, codes), map(kinds.__getitem__, codes), microbatches(codes))
    return tuple(map(_made, zip(*columns, strict=True)))


def coded(row: Sequence[Compute]) -> CodedRow:
    """A rank's computes as numbers, and its stages; micro-batches are taken to be in order."""
    stages = tuple(sorted({c.stage for c in row}))
    first = {stage: NUM_KINDS * at for at, stage in enumerate(stages)}
    return CodedRow([first[stage] + CODED_KINDS.index(kind) for stage, kind, _ in row], stages)


def compute_order(kind: ScheduleKind, pp: int, virtual: int, num_microbatches: int) -> Order:
    """Order of forwards and backwards per pipeline rank.

    Args:
        kind: The schedule.
        pp: Pipeline ranks, >= 1.
        virtual: Stages per pipeline rank, >= 1; stage ``s`` runs on rank ``s % pp``.
        num_microbatches: Micro-batches, >= 1; any number, also fewer than ranks.

    Raises:
        ConfigError: A count is below 1, or 1F1B is asked for with several stages per rank.

    Source:
        GPipe: Huang et al. 2019. 1F1B and interleaving: Narayanan et al., "Efficient large-scale
        language model training on GPU clusters", SC 2021; rounds for a number of micro-batches
        that ``pp`` does not divide follow torch.distributed.pipelining, uneven rounds are ours.
    """
    for name, count in (("pp", pp), ("virtual", virtual), ("num_microbatches", num_microbatches)):
        if count < 1:
            raise ConfigError(f"compute_order: {name} is {count}, the least is 1")
    match kind:
        case ScheduleKind.FORWARD:
            return forward_order(pp, virtual, num_microbatches)
        case ScheduleKind.ONE_F_ONE_B if virtual > 1:
            raise ConfigError(
                f"schedule '1f1b' has one stage per pipeline rank, not {virtual}; use 'interleaved'"
            )
        case ScheduleKind.GPIPE | ScheduleKind.ONE_F_ONE_B | ScheduleKind.INTERLEAVED:
            rows = whole_codes(kind, pp, virtual, num_microbatches)
            return _dealt(rows, pp, virtual)
    raise ConfigError(
        f"compute_order: schedule {kind.value!r} splits backwards; its order is that of "
        "autopar.plan.orders.order_of"
    )


def _dealt(rows: Iterable[Sequence[int]], pp: int, virtual: int) -> Order:
    """An order whose stages are dealt round robin."""
    return tuple(decoded(row, range(rank, pp * virtual, pp)) for rank, row in enumerate(rows))


def forward_order(pp: int, virtual: int, num_microbatches: int) -> Order:
    """Forwards only, as evaluation and inference run them: the first half of GPipe's order."""
    return _dealt(forward_codes(pp, virtual, num_microbatches), pp, virtual)


def in_flight(order: Order, stage: int) -> int:
    """Most micro-batches of ``stage`` whose forward has begun and whose backward has not ended.

    Where there are no backwards it is 1: nothing is kept when a forward has ended.
    """
    computes = [c for row in order for c in row if c.stage == stage]
    if computes and all(c.kind is F for c in computes):
        return 1
    alive = most = 0
    for compute in computes:
        alive += {F: 1, I: 0}.get(compute.kind, -1)
        most = max(most, alive)
    return most


def all_in_flight(order: Order) -> tuple[int, ...]:
    """:func:`in_flight` of every stage, in one walk.

    >>> all_in_flight(compute_order(ScheduleKind.ONE_F_ONE_B, pp=3, virtual=1, num_microbatches=9))
    (3, 2, 1)
    """
    most: dict[int, int] = {}
    for row in order:
        codes, stages = coded(row)
        most.update(zip(stages, most_in_flight(codes, len(stages)), strict=True))
    return tuple(most[stage] for stage in sorted(most))


def most_in_flight(codes: Sequence[int], num_stages: int) -> list[int]:
    """The same of the stages of a rank whose computes are written as numbers."""
    if not _has_backwards(codes):
        return [1] * num_stages
    found = []
    for at in range(num_stages):
        change = [0] * (NUM_KINDS * num_stages)
        change[NUM_KINDS * at : NUM_KINDS * (at + 1)] = [1, -1, 0, -1]
        found.append(max(accumulate(map(change.__getitem__, codes))))
    return found


def _has_backwards(codes: Sequence[int]) -> bool:
    return any(CODED_KINDS[code % NUM_KINDS] is not F for code in set(codes))


class Alive(NamedTuple):
    """Micro-batches in flight in a stage: before their backward, and between its two halves."""

    before: int
    between: int


def alive_together(order: Order) -> tuple[tuple[Mapping[int, Alive], ...], ...]:
    """What is in flight in all stages of a rank at once: moments that no other one exceeds.

    Per pipeline rank, tables of stage -> micro-batches whose forward has begun, and of those whose
    backward is half done. Where there are no backwards it is 1 for one stage at a time.

    >>> order = compute_order(ScheduleKind.INTERLEAVED, pp=1, virtual=2, num_microbatches=2)
    >>> [{s: n.before for s, n in moment.items()} for moment in alive_together(order)[0]]
    [{0: 1, 1: 1}, {0: 2, 1: 0}]
    """
    return tuple(alive_at_once(*coded(row)) for row in order)


def alive_at_once(codes: Sequence[int], stages: Sequence[int]) -> tuple[Mapping[int, Alive], ...]:
    """The same of a rank whose computes are written as numbers."""
    if not _has_backwards(codes):
        return tuple({s: Alive(int(s == one), 0) for s in stages} for one in stages)
    # what is alive is one integer, of a field for each number
    fields = [1 << FIELD_BITS * at for at in range(2 * len(stages))]  # before, between, by stage
    change: list[int] = []
    for before, between in zip(fields[::2], fields[1::2], strict=True):
        change += [before, -before, between - before, -between]
    alive = accumulate(map(change.__getitem__, codes))
    # forwards in a row: the last of them has the most; beside them halves of backwards add
    kinds = CODED_KINDS * len(stages)
    is_forward, is_half = ([kind is own for kind in kinds] for own in (F, I))
    ahead = list(map(is_forward.__getitem__, codes))
    last_ahead = map(gt, ahead, chain(ahead[1:], (False,)))
    tells = map(or_, last_ahead, map(is_half.__getitem__, codes))
    seen = dict.fromkeys(compress(alive, tells))
    return tuple(_unpacked(one, stages) for one in _not_exceeded(seen, len(fields)))


def _unpacked(packed: int, stages: Sequence[int]) -> dict[int, Alive]:
    numbers = [packed >> FIELD_BITS * at & FIELD for at in range(2 * len(stages))]
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return {stage: Alive(*pair) for stage, pair in zip(stages, pairs, strict=True)}


def _not_exceeded(seen: Iterable[int], num_fields: int) -> Iterator[int]:
    """Those that no other one has at least as much of everything as, in order."""
    rows = list(seen)
    # a bit above each number, which the difference keeps where the number is not the smaller one
    guards = sum(1 << FIELD_BITS * at + FIELD_BITS - 1 for at in range(num_fields))
    most: list[int] = []
    # what has less in all exceeds nothing; as a digit sum is what nines leave
    for one in sorted(rows, key=FIELD.__rmod__, reverse=True):
        if not any((other - one) & guards == guards for other in most):
            most.append(one | guards)
    kept = {one ^ guards for one in most}
    return (one for one in rows if one in kept)


def action_lists(
    order: Order,
    mesh: MeshShape,
    *,
    forward_edges: Iterable[Edge] = (),
    backward_edges: Iterable[Edge] = (),
    tied: Iterable[Edge] = (),
    zero_levels: Sequence[int] = (),
    prefetch: int = 0,
) -> ActionLists:
    """Everything that each pipeline rank does in one step.

    A list reads: PROLOGUE of each own stage; FETCH_TIED; then per compute, in order, the UNSHARD
    and the RECVs it needs, itself, the SENDs of what it made, RESHARD, REDUCE_GRAD; last SYNC_TIED.

    Args:
        order: From :func:`autopar.plan.orders.order_of` or :func:`forward_order`. A rank's stages
            are those that it computes, whatever the mesh says.
        mesh: Tells the number of stages.
        forward_edges: (s, t), s < t, where a forward of t reads a value of the forward of s. Any
            pair, neighbours or not: a value that skips stages is sent straight.
        backward_edges: (s, t), s > t, where a backward of t reads a value of the backward of s.
        tied: (owner, borrower) stages of a weight that two stages share. FETCH_TIED moves the value
            from the owner before the step, SYNC_TIED the gradient to the owner after it; both ends
            have the action, with the other stage as ``peer``.
        zero_levels: ZeRO level of each stage; none given means 0. From level 2 on REDUCE_GRAD
            follows every B and carries its micro-batch, below it follows the last B and carries
            None. At level 3 a stage is unsharded for each run of its computes and resharded when
            the rank turns to another stage; below, once before the first and after the last.
        prefetch: Computes by which receives are posted ahead of the latest moment.

    Raises:
        ConfigError: An edge names a stage that does not exist, or points the wrong way.
    """
    forward = _checked_edges(forward_edges, mesh, "forward")
    backward = _checked_edges(backward_edges, mesh, "backward")
    ties = _checked_edges(tied, mesh, "tied")
    levels = tuple(zero_levels) or (0,) * mesh.num_stages
    if len(levels) != mesh.num_stages:
        raise ConfigError(
            f"action_lists: {len(levels)} ZeRO levels for {mesh.num_stages} stages; give one each"
        )
    rank_of = {compute.stage: rank for rank, row in enumerate(order) for compute in row}
    targets = {F: _by_source(forward), B: _by_source(backward)}
    receives = _receives(order, rank_of, targets, prefetch)
    lists = []
    for rank, row in enumerate(order):
        own = sorted({compute.stage for compute in row})
        actions = [Action(stage, ActionKind.PROLOGUE) for stage in own]
        actions += _tied_actions(ActionKind.FETCH_TIED, ties, own)
        around = zip(row, receives[rank], _around(row, levels), strict=True)
        for compute, received, (before, after) in around:
            actions += before
            actions += received
            actions.append(Action(*compute))
            actions += _sends(compute, targets, rank_of)
            actions += after
        if any(compute.kind is not F for compute in row):
            actions += _tied_actions(ActionKind.SYNC_TIED, ties, own)
        lists.append(tuple(actions))
    return tuple(lists)


def _checked_edges(edges: Iterable[Edge], mesh: MeshShape, what: str) -> tuple[Edge, ...]:
    """Edges without repeats, in order."""
    result = tuple(sorted(set(edges)))
    for source, target in result:
        if not (0 <= source < mesh.num_stages and 0 <= target < mesh.num_stages):
            raise ConfigError(
                f"action_lists: {what} edge ({source}, {target}) names a stage that does not "
                f"exist; there are {mesh.num_stages}"
            )
        wrong = {"forward": source >= target, "backward": source <= target}
        if wrong.get(what, source == target):
            raise ConfigError(
                f"action_lists: {what} edge ({source}, {target}) points the wrong way; a forward "
                "value goes to a later stage, a backward value to an earlier one, a tied weight to "
                "another stage"
            )
    return result


def _by_source(edges: Iterable[Edge]) -> dict[int, list[int]]:
    """Targets of each source."""
    table: dict[int, list[int]] = {}
    for source, target in edges:
        table.setdefault(source, []).append(target)
    return table


def _receives(
    order: Order,
    rank_of: Mapping[int, int],
    targets: Mapping[ActionKind, Mapping[int, list[int]]],
    prefetch: int,
) -> list[list[list[Action]]]:
    """Per rank and per position in its order, the receives to post just before that compute.

    Per directed pair of ranks the messages are taken in the sender's order, from the last one back:
    a receive must be posted before its own consumer and no later than the receive that follows it.
    """
    position_of = {
        (compute.stage, _PASS[compute.kind], compute.microbatch): i
        for row in order
        for i, compute in enumerate(row)
        if compute.kind in _PASS
    }
    messages: dict[Edge, list[tuple[Action, int]]] = {}
    for rank, row in enumerate(order):
        for stage, kind, microbatch in row:
            if kind not in _PASS:
                continue
            made_by = _PASS[kind]
            for target in targets[made_by].get(stage, ()):
                receiver = rank_of[target]
                if receiver == rank:
                    continue
                receive = ActionKind.RECV_F if made_by is F else ActionKind.RECV_B
                action = Action(target, receive, microbatch, stage)
                position = position_of[target, made_by, microbatch]
                messages.setdefault((rank, receiver), []).append((action, position))
    result: list[list[list[Action]]] = [[[] for _ in row] for row in order]
    for (_, receiver), sent in sorted(messages.items()):
        latest = len(order[receiver]) - 1
        for action, needed_at in reversed(sent):
            latest = min(latest, needed_at)
            result[receiver][max(0, latest - prefetch)].insert(0, action)
    return result


def _sends(
    compute: Compute,
    targets: Mapping[ActionKind, Mapping[int, list[int]]],
    rank_of: Mapping[int, int],
) -> Iterator[Action]:
    stage, kind, microbatch = compute
    if kind not in _PASS:
        return
    send = ActionKind.SEND_F if kind is F else ActionKind.SEND_B
    for target in targets[_PASS[kind]].get(stage, ()):
        if rank_of[target] != rank_of[stage]:
            yield Action(stage, send, microbatch, target)


def _tied_actions(kind: ActionKind, ties: Iterable[Edge], own: Collection[int]) -> Iterator[Action]:
    """Both ends of every tie that touches this rank, in one global order."""
    for owner, borrower in ties:
        ends = (owner, borrower) if kind is ActionKind.FETCH_TIED else (borrower, owner)
        for stage, peer in (ends, ends[::-1]):  # the end that gives comes first
            if stage in own:
                yield Action(stage, kind, None, peer)


def _around(
    row: Sequence[Compute], levels: Sequence[int]
) -> Iterator[tuple[list[Action], list[Action]]]:
    """Per compute of a rank, the gathering before it, and the freeing and reducing after it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, compute in enumerate(row):
        first.setdefault(compute.stage, position)
        last[compute.stage] = position
    for position, (stage, kind, microbatch) in enumerate(row):
        begins, ends = first[stage] == position, last[stage] == position
        turns = levels[stage] >= 3
        before, after = [], []
        if begins or (turns and row[position - 1].stage != stage):
            before.append(Action(stage, ActionKind.UNSHARD))
        if ends or (turns and row[position + 1].stage != stage):
            after.append(Action(stage, ActionKind.RESHARD))
        makes_gradients = kind is B or kind is W
        if makes_gradients and levels[stage] >= 2:
            after.append(Action(stage, ActionKind.REDUCE_GRAD, microbatch))
        elif makes_gradients and ends:
            after.append(Action(stage, ActionKind.REDUCE_GRAD))
        yield before, after
