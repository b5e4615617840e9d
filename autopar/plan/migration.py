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
from itertools import pairwise, product

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
    received: dict[tuple[int, bool], int] = field(default_factory=dict)
    sent: dict[tuple[int, bool], int] = field(default_factory=dict)
    machines: list[int] = field(init=False)  # by rank
    loads: list[int] = field(init=False)  # by rank, all that it sends

    def __post_init__(self) -> None:
        self.machines = [
            index for index, m in enumerate(self.cluster.machines) for _ in range(m.num_devices)
        ]
        self.loads = [0] * len(self.machines)

    def nearest(self, sources: Sequence[int], rank: int) -> int:
        """A holder on the rank's own machine if there is one; of those the least busy."""
        machines, loads = self.machines, self.loads
        own = machines[rank]
        best = sources[0]
        least = (machines[best] != own, loads[best], best)
        for source in sources[1:]:
            key = (machines[source] != own, loads[source], source)
            if key < least:
                best, least = source, key
        return best

    def carry(self, source: int, target: int, amount: int) -> None:
        between = self.machines[source] != self.machines[target]
        self.loads[source] += amount
        for table, rank in ((self.sent, source), (self.received, target)):
            table[rank, between] = table.get((rank, between), 0) + amount

    def seconds(self) -> float:
        slowest_s = 0.0
        for rank in {r for r, _ in (*self.sent, *self.received)}:
            machine = self.cluster.machines[self.machines[rank]]
            time_s = 0.0
            for between, link in ((False, machine.intra), (True, machine.inter)):
                out, back = self.sent.get((rank, between), 0), self.received.get((rank, between), 0)
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
        between_bytes=sum(n for (_, between), n in traffic.received.items() if between),
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


def _by_rank(table: Mapping[tuple[int, bool], int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for (rank, _), amount in sorted(table.items()):
        found[rank] = found.get(rank, 0) + amount
    return found


def _travel(
    meta: TensorMeta,
    have: Sequence[Mapping[int, Box]],
    want: Sequence[Mapping[int, Box]],
    traffic: _Traffic,
    weight: float,
) -> int:
    """Account for one tensor; the elements that travel or are lost, all receivers together."""
    sides: list[set[tuple[int, int]]] = [set() for _ in meta.shape]
    for row in (*have, *want):
        for box in set(row.values()):
            for side, interval in zip(sides, box, strict=True):
                side.add(interval)
    cuts = [
        sorted({0, size, *(at for interval in side for at in interval)})
        for side, size in zip(sides, meta.shape, strict=True)
    ]
    known: dict[Box, list[tuple[Box, int]]] = {}  # cells of a box, with their elements

    def cells(box: Box) -> list[tuple[Box, int]]:
        found = known.get(box)
        if found is None:
            found = known[box] = [(cell, volume(cell)) for cell in _cells(box, cuts)]
        return found

    holders: dict[Box, list[int]] = {}
    own: dict[int, list[Box]] = {}
    for row in have:
        for rank, box in row.items():
            own.setdefault(rank, []).append(box)
            for cell, _ in cells(box):
                holders.setdefault(cell, []).append(rank)
    moved = 0
    for row in want:
        for rank, box in sorted(row.items()):
            mine = own.get(rank, ())
            for cell, elements in cells(box):
                amount = round(elements * weight)
                if any(_contains(outer, cell) for outer in mine):
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


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))
