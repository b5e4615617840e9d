"""What the solver asks of a price list, and which ranks an axis of the mesh joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from autopar.cluster.topology import Cluster
from autopar.errors import ConfigError
from autopar.ir.graph import Arg, Meta
from autopar.plan.types import DP_AXIS, PP_AXIS, TP_AXIS, MeshShape, StagePlacement
from autopar.units import GB


class CostModel(Protocol):
    """Prices operators and collectives in seconds. Answers never depend on earlier questions."""

    @property
    def source(self) -> str:
        """Where the prices come from, in a sentence for the report."""
        ...

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        """Seconds of one operator on one device.

        Args:
            op: Name, such as ``"aten.mm.default"``.
            args: Its positional arguments.
            operands: Metas of its references in order of appearance, repeats included, those of
                keyword arguments last: ``[metas[name] for name in node.refs()]``.
            results: Meta of its result or results; both with the sizes that the device works on.
        """
        ...

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of one collective, while its sister groups do the same.

        Args:
            kind: A :class:`~cost_models.collectives.CollectiveKind` or its text.
            payload_bytes: The larger of a rank's input and output.
            ranks: Global ranks of the group; for point-to-point the two ends.
        """
        ...


@runtime_checkable
class Comparable(Protocol):
    """A cost model that can tell whether another one has the same prices."""

    def prices_like(self, other: object) -> bool:
        """Whether operators, and collectives over equal links, take as long by another model."""
        ...


@runtime_checkable
class HostCosts(Protocol):
    """What a cost model may know beside operators and collectives: what surrounds the programs."""

    def in_bursts(self) -> CostModel:
        """The same prices, for collectives that are all issued before the first is waited for."""
        ...

    def optimizer_time_s(self, name: str, num_tensors: int, num_bytes: float) -> float | None:
        """Seconds of an optimizer's step on one rank; None if it is not known.

        Args:
            name: Such as ``"adamw"``.
            num_tensors: Parameters that the rank steps.
            num_bytes: Bytes of its share of them.
        """
        ...

    def accumulate_time_s(self, num_tensors: int, num_bytes: float) -> float:
        """Seconds of adding one more micro-batch's gradients to the sums; 0 if not measured.

        Args:
            num_tensors: Gradients that a rank adds.
            num_bytes: Bytes of them.
        """
        ...

    def waiting_s(self, num_ranks: int, num_waits: int, compute_s: float) -> float:
        """Seconds that a rank waits for the slowest of those that it meets; 0 if not measured.

        Args:
            num_ranks: Ranks that meet.
            num_waits: How often.
            compute_s: Seconds that a rank computes in all meanwhile.
        """
        ...

    def call_time_s(self, num_parameters: int) -> float:
        """Seconds of one call with its backward on one rank, beyond its programs.

        Args:
            num_parameters: Parameters that the rank owns.
        """
        ...

    def shared_step_s(self, makespan_s: float, busy_s: Sequence[float], comm_s: float) -> float:
        """Seconds of a step whose ranks share cores, some of them waiting at times.

        Args:
            makespan_s: With operators priced as if all ranks were busy all the time.
            busy_s: Seconds that each pipeline rank computes in it, priced the same way.
            comm_s: Seconds of communication on the path that ends last.
        """
        ...


@runtime_checkable
class SharedMachine(Protocol):
    """What a cost model may know of ranks that take time from each other."""

    def at_work(self, num_ranks: int) -> CostModel:
        """The prices while only the first ``num_ranks`` ranks work; itself if they are the same."""
        ...


def axis_groups(mesh: MeshShape, axis: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks along ``axis`` (``"dp"``, ``"tp"``, ``"pp"``), every group once.

    Raises:
        ConfigError: There is no such axis.

    >>> axis_groups(MeshShape(dp=2, tp=2), "dp")
    ((0, 2), (1, 3))
    """
    pps, dps, tps = range(mesh.pp), range(mesh.dp), range(mesh.tp)
    if axis == TP_AXIS:
        return tuple(tuple(mesh.rank_of(p, d, t) for t in tps) for p in pps for d in dps)
    if axis == DP_AXIS:
        return tuple(tuple(mesh.rank_of(p, d, t) for d in dps) for p in pps for t in tps)
    if axis == PP_AXIS:
        return tuple(tuple(mesh.rank_of(p, d, t) for p in pps) for d in dps for t in tps)
    raise ConfigError(f"mesh {mesh}: has no axis {axis!r} with ranks; its axes are dp, tp and pp")


def slowest_group(cluster: Cluster, mesh: MeshShape, axis: str) -> tuple[int, ...]:
    """The group along ``axis`` with the slowest link: groups of later stages may cross machines.

    A plan is priced with it, since all stages wait for the slowest. For ``"pp"`` it is the
    slowest pair of neighbours.
    """
    groups: Iterable[tuple[int, ...]] = _hops(mesh) if axis == PP_AXIS and mesh.pp > 1 else ()
    # groups that lie alike have the same links: of thousands few differ
    kinds: dict[object, int] = {}
    lies: list[tuple[int, int]] = []
    for at, m in enumerate(cluster.machines):
        kind = kinds.setdefault((m.intra, m.inter, m.site), len(kinds))
        lies += [(at, kind)] * m.num_devices
    known: dict[object, tuple[float, float]] = {}
    seen: set[tuple[tuple[int, int], ...]] = set()  # hops between the same machines are alike
    best: tuple[tuple[float, float], tuple[int, ...]] | None = None
    for group in groups or axis_groups(mesh, axis):
        if len(group) == 2:
            pair = (lies[group[0]], lies[group[1]])
            if pair in seen:
                continue
            seen.add(pair)
        counts = Counter(lies[rank] for rank in group)
        key = tuple((kind, count) for (_, kind), count in counts.items())
        if key not in known:
            link = cluster.link_for(group)
            known[key] = link.bandwidth_bytes_per_s, -link.latency_s
            if best is None or known[key] < best[0]:
                best = known[key], group
    assert best is not None, "a mesh has ranks"
    return best[1]


def _hops(mesh: MeshShape) -> list[tuple[int, ...]]:
    """Pairs of ranks of neighbouring pipeline ranks."""
    width = mesh.dp * mesh.tp
    # the last stage hands over to the first where stages are dealt round robin
    wraps = mesh.virtual > 1 and mesh.placement is StagePlacement.LOOP
    last = width * (mesh.pp - 1)
    hops: list[tuple[int, ...]] = []
    for rank in range(width):
        own = range(rank, rank + last, width)
        hops += zip(own, range(rank + width, rank + last + 1, width), strict=True)
        if wraps:
            hops.append((rank + last, rank))
    return hops


def link_words(cluster: Cluster, mesh: MeshShape) -> dict[str, str]:
    """Axis with several ranks -> the link that its slowest group uses, for people."""
    found = {}
    for axis, size in ((TP_AXIS, mesh.tp), (DP_AXIS, mesh.dp), (PP_AXIS, mesh.pp)):
        if size == 1:
            continue
        group = slowest_group(cluster, mesh, axis)
        link = cluster.link_for(group)
        links = cluster.links_for(group)
        where = "inside a machine" if links.inter is None else "between machines"
        where = "between sites" if links.num_sites > 1 else where
        rate = f"{link.bandwidth_bytes_per_s / GB:.3g} GB/s"
        found[axis] = f"{link.kind.value} {where}, {rate} per device"
    return found
