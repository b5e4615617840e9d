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
from operator import ge
from typing import NamedTuple, TypeAlias

from autopar.errors import ConfigError
from autopar.plan.actions import Action, ActionKind
from autopar.plan.types import MeshShape, ScheduleKind

F = ActionKind.FORWARD
B = ActionKind.BACKWARD
I = ActionKind.BACKWARD_INPUT  # noqa: E741 - the schedules' own letter
W = ActionKind.BACKWARD_WEIGHT
# which pass a compute belongs to, by what it reads of other stages: W reads only its own
_PASS = {F: F, B: B, I: B}


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
        case ScheduleKind.GPIPE:
            rounds, all_first = [num_microbatches], True
        case ScheduleKind.ONE_F_ONE_B:
            if virtual > 1:
                raise ConfigError(
                    f"schedule '1f1b' has one stage per pipeline rank, not {virtual}; "
                    "use 'interleaved'"
                )
            rounds, all_first = [num_microbatches], False
        case ScheduleKind.INTERLEAVED:
            rounds, all_first = round_sizes(pp, num_microbatches), False
        case _:
            raise ConfigError(
                f"compute_order: schedule {kind.value!r} splits backwards; its order is that of "
                "autopar.plan.orders.order_of"
            )
    forwards, backwards = _chunk_orders(rounds, virtual)
    total = len(forwards)
    result = []
    for rank in range(pp):
        if all_first:
            warmup = total
        elif virtual == 1:
            warmup = min(total, pp - rank - 1)
        else:
            warmup = min(total, (virtual - 1) * max(rounds) + 2 * (pp - rank - 1))
        row = [Compute(chunk * pp + rank, F, mb) for chunk, mb in forwards[:warmup]]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            row.append(Compute(forward[0] * pp + rank, F, forward[1]))
            row.append(Compute(backward[0] * pp + rank, B, backward[1]))
        row.extend(Compute(chunk * pp + rank, B, mb) for chunk, mb in backwards[total - warmup :])
        result.append(tuple(row))
    return tuple(result)


def forward_order(pp: int, virtual: int, num_microbatches: int) -> Order:
    """Forwards only, as evaluation and inference run them: the first half of GPipe's order."""
    whole = compute_order(ScheduleKind.GPIPE, pp, virtual, num_microbatches)
    return tuple(tuple(c for c in row if c.kind is F) for row in whole)


def round_sizes(pp: int, num_microbatches: int) -> list[int]:
    """Sizes of the rounds of an interleaved schedule, largest first.

    No round is smaller than ``pp`` unless there is only one: with smaller ones the backward of a
    round can be due on one rank before the forward that it waits for is reached on another.

    >>> round_sizes(4, 9)
    [5, 4]
    """
    count = max(1, num_microbatches // pp)
    base, extra = divmod(num_microbatches, count)
    return [base + 1] * extra + [base] * (count - extra)


def _chunk_orders(
    rounds: Sequence[int], virtual: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(Chunk, micro-batch) of every forward and every backward of one rank."""
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    start = 0
    for size in rounds:
        members = range(start, start + size)
        forwards.extend((chunk, mb) for chunk in range(virtual) for mb in members)
        backwards.extend((chunk, mb) for chunk in reversed(range(virtual)) for mb in members)
        start += size
    return forwards, backwards


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
        alive = dict.fromkeys((c.stage for c in row), 0)
        if all(c.kind is F for c in row):
            most.update(dict.fromkeys(alive, 1))
            continue
        for stage, kind, _ in row:
            if kind is F:
                alive[stage] += 1
                most[stage] = max(most.get(stage, 0), alive[stage])
            elif kind is not I:
                alive[stage] -= 1
    return tuple(most[stage] for stage in sorted(most))


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
    return tuple(_alive(row) for row in order)


def _alive(row: Sequence[Compute]) -> tuple[Mapping[int, Alive], ...]:
    stages = sorted({c.stage for c in row})
    if all(c.kind is F for c in row):
        return tuple({s: Alive(int(s == one), 0) for s in stages} for one in stages)
    place = {stage: 2 * at for at, stage in enumerate(stages)}
    alive = [0] * (2 * len(stages))  # before and between, by stage
    seen: dict[tuple[int, ...], None] = {}
    kinds = [c.kind for c in row] + [B]
    for (stage, kind, _), follows in zip(row, kinds[1:], strict=True):
        at = place[stage]
        if kind is F:
            alive[at] += 1
        elif kind is I:
            alive[at] -= 1
            alive[at + 1] += 1
        else:
            alive[at + (kind is W)] -= 1
        # forwards in a row: the last of them has the most
        if kind is I or (kind is F and follows is not F):
            seen[tuple(alive)] = None
    most: list[tuple[int, ...]] = []
    for one in sorted(seen, key=sum, reverse=True):  # nothing is exceeded by what has less in all
        if not any(all(map(ge, other, one)) for other in most):
            most.append(one)
    kept = set(most)
    return tuple(
        {s: Alive(v[place[s]], v[place[s] + 1]) for s in stages} for v in seen if v in kept
    )


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
