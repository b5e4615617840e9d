"""Micro-benchmarks of collectives: over sizes, groups inside and across nodes, beside computing.

Groups of equal size go at the same time, as sister groups of a mesh do, and every collective runs
in the form in which a program runs it: issued, then waited for, an all-reduce on a copy. Gradients
are reduced and parameters gathered all at once; so bursts, of which all are issued before the first
is waited for, are measured apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar.errors import ConfigError
from autopar.units import KIB, MIB
from cost_models.measure_meter import Meter, Run, Task
from cost_models.profile import Key, Point, PointKind, burst_name

K = PointKind
PAYLOAD_BYTES = (1 * KIB, 1 * MIB, 64 * KIB, 8 * MIB, 256 * KIB, 24 * MIB)
BURST_BYTES = (1 * KIB, 1 * MIB, 64 * KIB)
BURST = 16  # collectives that are issued before the first is waited for
BESIDE_BYTES = 1 * MIB
BESIDE_EDGE = 256
LOCKSTEP_BYTES = 64 * KIB
LOCKSTEP_MATMULS = (1, 4, 12)  # between two collectives
LOCKSTEP_ROUNDS = 4  # of a run: what counts is the mean over rounds
LOCKSTEP_RUNS = 9  # the difference of two times: it takes more of them
ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Groups of equal size that cover the ranks which are busy.

    Attributes:
        groups: Their ranks.
        busy: Ranks of a node that take part.
        nodes: Nodes that each group spans.
    """

    groups: tuple[tuple[int, ...], ...]
    busy: int
    nodes: int

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])

    @property
    def name(self) -> str:
        """As in the name of a point."""
        return "" if self.nodes == 1 else f"{self.nodes} nodes"


def group_shapes(size: int, per_node: int) -> tuple[GroupShape, ...]:
    """Groups of 2, 4, ... ranks of a node, of one rank of each node, of all.

    Args:
        size: Ranks of the job.
        per_node: Ranks of a node; must divide ``size``.

    Raises:
        ConfigError: It does not.

    >>> [(s.size, s.busy, s.nodes) for s in group_shapes(8, 4)]
    [(2, 4, 1), (4, 4, 1), (2, 4, 2), (8, 4, 2)]
    """
    if per_node < 1 or size % per_node:
        raise ConfigError(
            f"profile: {size} ranks on nodes of {per_node}; start as many ranks on every node"
        )
    num_nodes = size // per_node
    shapes: list[GroupShape] = []
    for count in _doublings(per_node):
        firsts = [n * per_node + i for n in range(num_nodes) for i in range(0, per_node, count)]
        whole = [tuple(range(f, f + count)) for f in firsts if f % per_node + count <= per_node]
        shapes.append(GroupShape(tuple(whole), per_node, 1))
    for count in _doublings(num_nodes):
        starts = [n for n in range(0, num_nodes, count) if n + count <= num_nodes]
        rows = [
            tuple((n + i) * per_node + local for i in range(count))
            for n in starts
            for local in range(per_node)
        ]
        shapes.append(GroupShape(tuple(rows), per_node, count))
    if num_nodes > 1 and per_node > 1:
        shapes.append(GroupShape((tuple(range(size)),), per_node, num_nodes))
    return tuple(shapes)


def _doublings(most: int) -> list[int]:
    """2, 4, 8, ... below ``most``, and ``most``; nothing for 1.

    >>> _doublings(6), _doublings(4), _doublings(1)
    ([2, 4, 6], [2, 4], [])
    """
    found = []
    count = 2
    while count < most:
        found.append(count)
        count *= 2
    return [*found, most] if most > 1 else []


class Collectives:
    """Groups of this job, each made once; every rank must construct it."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._shapes = group_shapes(meter.size, meter.per_node)
        self._own: dict[GroupShape, dist.ProcessGroup | None] = {}
        for shape in self._shapes:
            self._own[shape] = None
            for ranks in shape.groups:
                # a group must be made by all ranks, also by those that are not in it
                group = dist.new_group(list(ranks))
                if meter.rank in ranks:
                    self._own[shape] = group

    def tasks(self) -> Iterator[Task]:
        """Every kind over every size and group, small and telling ones first."""
        for payload_bytes in PAYLOAD_BYTES:
            for shape in self._shapes:
                for kind in _ISSUERS:
                    yield self._task(kind, payload_bytes, shape)
                if shape.size == 2:
                    yield self._task(K.P2P, payload_bytes, shape)
                if payload_bytes in BURST_BYTES:
                    for kind in BURST_KINDS:
                        yield self._task(kind, payload_bytes, shape, is_burst=True)

    def _task(
        self, kind: PointKind, payload_bytes: int, shape: GroupShape, *, is_burst: bool = False
    ) -> Task:
        group = self._own[shape]

        def prepare() -> Run | None:
            if group is None:
                return None
            if kind is K.P2P:
                return _ping_pong(payload_bytes, shape, self._meter)
            issue = _ISSUERS[kind](payload_bytes, group, shape, self._meter)
            return _burst(issue) if is_burst else _waited(issue)

        return Task(
            kind=kind,
            prepare=prepare,
            sizes=(payload_bytes, shape.size),
            name=burst_name(shape.name) if is_burst else shape.name,
            busy=shape.busy,
            runs=BURST if is_burst else 2 if kind is K.P2P else 1,
        )

    def measure_interference(self, known: frozenset[Key], keep: Callable[[Point], None]) -> None:
        """An all-reduce and matmuls of about the same length, each alone and both at once.

        Args:
            known: What need not be measured again; that of rank 0 counts.
            keep: Given every point at once.
        """
        for shape in self._shapes:
            sizes = (BESIDE_BYTES, shape.size)
            names = {n: f"{n} {shape.name}".strip() for n in ("comm", "compute", "both")}
            keys = [(K.BESIDE, n, "float32", sizes, shape.busy) for n in names.values()]
            if self._meter.agree(all(key in known for key in keys)):
                continue
            group = self._own[shape]
            comm = self._task(K.ALL_REDUCE, BESIDE_BYTES, shape)
            comm_s = self._meter.measure(comm).time_s
            square = torch.rand(BESIDE_EDGE, BESIDE_EDGE, device=self._meter.device)
            one_s = self._meter.measure(
                Task(kind=K.MATMUL, prepare=lambda x=square: lambda: x @ x, sizes=(1,) * 4,  # type: ignore[misc]
                     busy=shape.busy)
            ).time_s  # fmt: skip
            count = max(1, self._meter.agree(round(comm_s / one_s)))
            compute = _repeated(square, count)
            runs: dict[str, Run] = {"comm": lambda: None, "compute": compute, "both": compute}
            if group is not None:
                issue = _all_reduce(BESIDE_BYTES, group, shape, self._meter)
                runs["comm"] = _waited(issue)
                runs["both"] = _beside(issue, compute)
            for name, run in runs.items():
                keep(
                    self._meter.measure(
                        Task(kind=K.BESIDE, prepare=_constant(run if group else None),
                             sizes=sizes, name=names[name], busy=shape.busy)
                    )
                )  # fmt: skip

    def measure_lockstep(self, known: frozenset[Key], keep: Callable[[Point], None]) -> None:
        """Rounds of matmuls and a small all-reduce: what waiting for the slowest rank takes.

        Arguments as in :meth:`measure_interference`.
        """
        square = torch.rand(BESIDE_EDGE, BESIDE_EDGE, device=self._meter.device)
        for shape in self._shapes:
            group = self._own[shape]
            for count in LOCKSTEP_MATMULS:
                compute = _repeated(square, count)
                runs: dict[str, Run] = {"compute": compute, "comm": lambda: None, "round": compute}
                if group is not None:
                    runs["comm"] = _waited(_all_reduce(LOCKSTEP_BYTES, group, shape, self._meter))
                    runs["round"] = _in_turn(compute, runs["comm"])
                for name, run in runs.items():
                    task = Task(
                        kind=K.LOCKSTEP, prepare=_constant(_rounds(run) if group else None),
                        sizes=(count, shape.size), name=f"{name} {shape.name}".strip(),
                        busy=shape.busy, runs=LOCKSTEP_ROUNDS, least=LOCKSTEP_RUNS,
                    )  # fmt: skip
                    if not self._meter.agree(task.key in known):
                        keep(self._meter.measure(task))


def _constant(run: Run | None) -> Callable[[], Run | None]:
    return lambda: run


def _repeated(square: torch.Tensor, count: int) -> Run:
    def run() -> None:
        for _ in range(count):
            torch.mm(square, square)

    return run


def _in_turn(first: Run, second: Run) -> Run:
    def run() -> None:
        first()
        second()

    return run


def _rounds(run: Run) -> Run:
    def several() -> None:
        for _ in range(LOCKSTEP_ROUNDS):
            run()

    return several


Issue = Callable[[], tuple[dist.Work, torch.Tensor]]
"""Starts a collective; the tensor must live until it is done."""
Issuer = Callable[[int, dist.ProcessGroup, GroupShape, Meter], Issue]


def _waited(issue: Issue) -> Run:
    def run() -> None:
        work, _ = issue()
        work.wait()

    return run


def _burst(issue: Issue) -> Run:
    def run() -> None:
        started = [issue() for _ in range(BURST)]
        for work, _ in started:
            work.wait()

    return run


def _beside(issue: Issue, compute: Run) -> Run:
    def run() -> None:
        work, _ = issue()
        compute()
        work.wait()

    return run


def _work(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise ConfigError("profile: this rank is not in the group that is measured")
    return work


def _all_reduce(payload_bytes: int, group: dist.ProcessGroup, _: GroupShape, meter: Meter) -> Issue:
    whole = _values(payload_bytes, meter)

    def issue() -> tuple[dist.Work, torch.Tensor]:
        result = whole.clone()
        return _work(dist.all_reduce(result, group=group, async_op=True)), result

    return issue


def _all_gather(
    payload_bytes: int, group: dist.ProcessGroup, shape: GroupShape, meter: Meter
) -> Issue:
    share = _values(payload_bytes // shape.size, meter)
    gather = _newest("all_gather_single", "all_gather_into_tensor")

    def issue() -> tuple[dist.Work, torch.Tensor]:
        gathered = share.new_empty(share.numel() * shape.size)
        return _work(gather(gathered, share, group=group, async_op=True)), gathered

    return issue


def _of_whole(name: str, older: str, *, gives_share: bool) -> Issuer:
    """Collectives into which each rank puts a whole tensor, and gets one share or as much."""

    def make(
        payload_bytes: int, group: dist.ProcessGroup, shape: GroupShape, meter: Meter
    ) -> Issue:
        share = max(1, payload_bytes // ITEM_BYTES // shape.size)
        whole = _values(share * shape.size * ITEM_BYTES, meter)
        start = _newest(name, older)

        def issue() -> tuple[dist.Work, torch.Tensor]:
            result = whole.new_empty(share if gives_share else whole.numel())
            return _work(start(result, whole, group=group, async_op=True)), result

        return issue

    return make


def _broadcast(
    payload_bytes: int, group: dist.ProcessGroup, shape: GroupShape, meter: Meter
) -> Issue:
    value = _values(payload_bytes, meter)
    root = next(ranks for ranks in shape.groups if meter.rank in ranks)[0]
    return lambda: (_work(dist.broadcast(value, root, group=group, async_op=True)), value)


def _ping_pong(payload_bytes: int, shape: GroupShape, meter: Meter) -> Run:
    """There and back between the two ranks of a group: two messages one after another."""
    value = _values(payload_bytes, meter)
    ranks = next(ranks for ranks in shape.groups if meter.rank in ranks)
    is_first = meter.rank == ranks[0]
    peer = ranks[1] if is_first else ranks[0]

    def run() -> None:
        if is_first:
            _work(dist.isend(value, peer)).wait()
        _work(dist.irecv(torch.empty_like(value), peer)).wait()
        if not is_first:
            _work(dist.isend(value, peer)).wait()

    return run


_ISSUERS: dict[PointKind, Issuer] = {
    K.ALL_REDUCE: _all_reduce,
    K.ALL_GATHER: _all_gather,
    K.REDUCE_SCATTER: _of_whole("reduce_scatter_single", "reduce_scatter_tensor", gives_share=True),
    K.ALL_TO_ALL: _of_whole("all_to_all_single", "all_to_all_single", gives_share=False),
    K.BROADCAST: _broadcast,
}
BURST_KINDS = (K.ALL_REDUCE, K.ALL_GATHER, K.REDUCE_SCATTER)


def _values(payload_bytes: int, meter: Meter) -> torch.Tensor:
    """Memory that was written to: the system maps fresh zeros to one page, which stays in cache."""
    return torch.rand(max(1, payload_bytes // ITEM_BYTES), device=meter.device)


def _newest(name: str, older: str) -> Callable[..., dist.Work | None]:
    """A function of torch.distributed under its new name, or its old one before torch 2.13."""
    found: Callable[..., dist.Work | None] = getattr(dist, name, None) or getattr(dist, older)
    return found
