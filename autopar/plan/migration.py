"""What must travel when a job goes from one plan to another: exact sets of elements.

For every parameter and every rank of the new plan, what the rank will hold is cut along the
boundaries of all that is held now. A piece that the rank holds already stays; another one comes
from a rank that has it and still runs, from its own machine if one there has it, else from the one
that has sent least so far; what no running rank has is lost, and comes from a checkpoint.
Parameters, and optimizer state with them, count at the bytes that they take at rest; gradients and
activations do not travel.

Seconds: every device sends and receives at once, and what goes inside machines and what goes
between them use different links; the slowest device counts. What comes from a checkpoint is not
part of it: nobody told how fast the storage is.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from operator import add

from autopar.cluster import Cluster
from autopar.errors import ConfigError, PlanError
from autopar.ir.graph import Graph, TensorMeta
from autopar.plan.holdings import Box, Holding, Holdings, holdings, volume
from autopar.plan.types import Plan
from autopar.units import format_bytes, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What travels.

    Attributes:
        kept_bytes: What stays on its device.
        moved_bytes: What comes from another device, all receivers together.
        between_bytes: The part of it that goes between machines.
        lost_bytes: What no running device has, each piece once, from a checkpoint.
        received_bytes: Per rank of the new plan, what it receives from other devices.
        sent_bytes: Per rank, what it sends.
        seconds: Of reading what is lost, if ``read_s`` is known, and then of the slowest device.
        parameters: Parameter -> bytes of it that travel or are lost; those without are left out.
        read_s: Part of ``seconds`` in which what is lost is read from a checkpoint; None where
            nobody said how fast that is.
    """

    kept_bytes: int
    moved_bytes: int
    between_bytes: int
    lost_bytes: int
    received_bytes: Mapping[int, int]
    sent_bytes: Mapping[int, int]
    seconds: float
    parameters: Mapping[str, int]
    read_s: float | None = None

    def __str__(self) -> str:
        """One sentence."""
        text = (
            f"{format_bytes(self.moved_bytes)} travel ({format_bytes(self.between_bytes)} between "
            f"machines), {format_bytes(self.kept_bytes)} stay; {format_time(self.seconds)}"
        )
        if self.lost_bytes:
            text += f"; {format_bytes(self.lost_bytes)} are lost and come from a checkpoint"
            if self.read_s is None:
                text += " (reading it is not in the seconds: give checkpoint_bytes_per_s=)"
            else:
                text += f", {format_time(self.read_s)} of it"
        return text


@dataclass(slots=True)
class _Traffic:
    """Bytes by rank: received and sent, inside and between machines."""

    cluster: Cluster
    kept: int = 0
    lost: int = 0
    machines: list[int] = field(init=False)  # by rank
    received: tuple[list[int], list[int]] = field(init=False)  # inside, between; by rank
    sent: tuple[list[int], list[int]] = field(init=False)
    loads: list[int] = field(init=False)  # by rank, all that it sends
    _known: dict[tuple[tuple[int, ...], ...], _Cells] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machines = [
            index for index, m in enumerate(self.cluster.machines) for _ in range(m.num_devices)
        ]
        count = len(self.machines)
        self.received, self.sent = ([0] * count, [0] * count), ([0] * count, [0] * count)
        self.loads = [0] * count

    def nearest(self, sources: Sequence[int], rank: int) -> int:
        """A holder on the rank's own machine if there is one; of those the least busy.

        Args:
            sources: Holders, in order.
            rank: Who receives.
        """
        own = self.machines[rank]
        beside = [source for source in sources if self.machines[source] == own]
        return min(beside or sources, key=self.loads.__getitem__)

    def carry(self, source: int, target: int, amount: int) -> None:
        between = self.machines[source] != self.machines[target]
        self.loads[source] += amount
        self.sent[between][source] += amount
        self.received[between][target] += amount

    def cells(
        self,
        meta: TensorMeta,
        have: Sequence[Mapping[int, Box]],
        want: Sequence[Mapping[int, Box]],
    ) -> _Cells:
        """A tensor cut along the boundaries of all that is held; tensors cut alike share it."""
        boxes = {box for row in (*have, *want) for box in row.values()}
        sides = zip(*boxes, strict=True) if boxes else ((),) * len(meta.shape)
        cuts = tuple(
            tuple(sorted({0, size, *chain.from_iterable(side)}))
            for side, size in zip(sides, meta.shape, strict=True)
        )
        return self._known.setdefault(cuts, _Cells(cuts))

    def seconds(self) -> float:
        slowest_s = 0.0
        for rank, index in enumerate(self.machines):
            machine = self.cluster.machines[index]
            time_s = 0.0
            for between, link in ((False, machine.intra), (True, machine.inter)):
                out, back = self.sent[between][rank], self.received[between][rank]
                if out or back:
                    time_s += link.time_s(max(out, back))
            slowest_s = max(slowest_s, time_s)
        return slowest_s


def migration(
    before: Plan,
    after: Plan,
    graph: Graph,
    cluster: Cluster,
    *,
    ranks: Mapping[int, int] | None = None,
    state_bytes: Mapping[str, int] | None = None,
    checkpoint_bytes_per_s: float | None = None,
    held: Holdings | None = None,
) -> Migration:
    """What must travel from one plan to another.

    Args:
        before: The plan that runs now.
        after: The one that is to run.
        graph: The joint graph of both.
        cluster: Where the second runs; its links carry the bytes.
        ranks: Rank under the first plan -> rank under the second of the same device; devices that
            are gone are left out. All ranks keep their number if left out.
        state_bytes: Parameter -> bytes of its optimizer state; none if left out.
        checkpoint_bytes_per_s: How fast all ranks together read a checkpoint, if that is known.
        held: The holdings of the first plan, if they are known.

    Raises:
        PlanError: The plans are of different models.
        ConfigError: The checkpoint is read at no speed.
    """
    if checkpoint_bytes_per_s is not None and not 0 < checkpoint_bytes_per_s < math.inf:
        raise ConfigError(
            f"checkpoint_bytes_per_s is {checkpoint_bytes_per_s:g}, must be above 0 and finite"
        )
    if before.model_hash != after.model_hash:
        raise PlanError(
            f"migration: the plans are of models {before.model_hash:.12} and "
            f"{after.model_hash:.12}; plan the same model"
        )
    stays = {r: r for r in range(min(before.num_devices, after.num_devices))}
    stays = stays if ranks is None else dict(ranks)
    old = holdings(before, graph) if held is None else held
    new = holdings(after, graph)
    traffic = _Traffic(cluster)
    groups: dict[object, list[str]] = {}
    for name, (meta, rows) in new.items():
        key = (meta.shape, _identity(old[name][1]), _identity(rows))
        groups.setdefault(key, []).append(name)
    moved: dict[str, int] = {}
    for names in groups.values():
        first = names[0]
        meta = new[first][0]
        # what is alike travels alike: one set of pieces at the bytes of all
        weights = {n: _element_bytes(new[n][0], (state_bytes or {}).get(n, 0)) for n in names}
        total = sum(weights.values())
        have = [
            {stays[r]: box for r, box in row.boxes.items() if r in stays} for row in old[first][1]
        ]
        pieces = _travel(meta, have, [row.boxes for row in new[first][1]], traffic, total)
        for name in names:
            if pieces:
                moved[name] = round(pieces * weights[name])
    received, sent = _by_rank(traffic.received), _by_rank(traffic.sent)
    read_s = None
    if checkpoint_bytes_per_s is not None:
        read_s = traffic.lost / checkpoint_bytes_per_s
    return Migration(
        kept_bytes=traffic.kept,
        moved_bytes=sum(received.values()),
        between_bytes=sum(traffic.received[True]),
        lost_bytes=traffic.lost,
        received_bytes=received,
        sent_bytes=sent,
        seconds=traffic.seconds() + (read_s or 0.0),
        parameters=dict(sorted(moved.items())),
        read_s=read_s,
    )


def _identity(rows: Sequence[Holding]) -> tuple[int, ...]:
    """Equal for parameters that lie alike: holdings are shared between them."""
    return tuple(id(row) for row in rows)


def _element_bytes(meta: TensorMeta, state_bytes: int) -> float:
    return (meta.bytes + state_bytes) / max(1, meta.numel)


def _by_rank(tables: tuple[list[int], list[int]]) -> dict[int, int]:
    """Bytes inside and between machines together, of ranks that have any."""
    sums = map(add, *tables)
    return {rank: amount for rank, amount in enumerate(sums) if amount}


@dataclass(slots=True)
class _Cells:
    """Cells of boxes that are cut at the same places; a cell is told by a number.

    Attributes:
        cuts: By dim, where boxes begin and end.
    """

    cuts: tuple[tuple[int, ...], ...]
    _numbers: dict[Box, int] = field(default_factory=dict)
    _of: dict[Box, list[tuple[int, int]]] = field(default_factory=dict)

    def of(self, box: Box) -> list[tuple[int, int]]:
        """Cells of a box, with their elements."""
        found = self._of.get(box)
        if found is None:
            numbers = self._numbers
            found = self._of[box] = [
                (numbers.setdefault(cell, len(numbers)), volume(cell))
                for cell in _cells(box, self.cuts)
            ]
        return found


def _travel(
    meta: TensorMeta,
    have: Sequence[Mapping[int, Box]],
    want: Sequence[Mapping[int, Box]],
    traffic: _Traffic,
    weight: float,
) -> int:
    """Account for one tensor; the elements that travel or are lost, all receivers together."""
    cells = traffic.cells(meta, have, want)
    ranks: dict[int, set[int]] = {}  # by cell, who holds it
    for row in have:
        for rank, box in row.items():
            for cell, _ in cells.of(box):
                ranks.setdefault(cell, set()).add(rank)
    holders = {cell: sorted(found) for cell, found in ranks.items()}
    amounts: dict[int, int] = {}  # bytes by elements
    moved = 0
    for row in want:
        for rank, box in sorted(row.items()):
            for cell, elements in cells.of(box):
                amount = amounts.get(elements)
                if amount is None:
                    amount = amounts[elements] = round(elements * weight)
                if rank in ranks.get(cell, ()):
                    traffic.kept += amount
                    continue
                moved += elements
                sources = holders.get(cell)
                if sources is None:
                    traffic.lost += amount
                    holders[cell] = [rank]
                    continue
                traffic.carry(traffic.nearest(sources, rank), rank, amount)
    return moved


def _cells(box: Box, cuts: Sequence[Sequence[int]]) -> list[Box]:
    """A box cut at all boundaries inside it."""
    intervals = []
    for (low, high), points in zip(box, cuts, strict=True):
        inside = points[bisect_left(points, low) : bisect_right(points, high)]
        intervals.append(list(pairwise(inside)))
    return list(product(*intervals))
