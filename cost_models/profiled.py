"""The cost model that answers from a profile: what was measured, else what was fitted to it.

An operator whose operands were measured costs what it cost; one that was measured at other shapes,
or whose class was, what the curve says; only what no point tells is priced by data sheets or
defaults. Every price names its source. What ranks of one machine take from each other is in the
points that were measured while all of them were busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum

from autopar.cluster.topology import Cluster
from autopar.errors import ConfigError
from autopar.ir.graph import Arg, Meta
from cost_models.analytic import AnalyticCostModel
from cost_models.collectives import CollectiveKind, collective_kind
from cost_models.evaluate import LAYOUT_COPY
from cost_models.fit import (
    LinkCurve,
    MatmulCurve,
    MemoryCurve,
    OpCurve,
    OptimizerCurve,
    WaitCurve,
    busy_factors,
    fit_link,
    fit_matmul,
    fit_memory,
    fit_operator,
    fit_optimizer,
    fit_sums,
    fit_waiting,
    hidden_share,
)
from cost_models.flops import VIEW_OPS, OpClass, Work, work_of
from cost_models.profile import COLLECTIVES, Point, PointKind, Profile, burst_name, op_key

K = PointKind
PROFILED = "profile of "
"""What the source of measured prices begins with."""
_FREE_OPS = frozenset({"getitem"})
_LANES = ("comm", "compute", "both")
# Kind, name and dtype of the points that even a profile which ran out of time has enough of.
_NEEDED = frozenset({(K.MATMUL, "", "float32"), (K.STREAM, "add", "float32")})
# Which points tell how an operator of a class fares while other ranks are busy.
_BUSY_KIND: Mapping[OpClass, PointKind] = {
    OpClass.MATMUL: K.MATMUL, OpClass.ATTENTION: K.MATMUL, OpClass.CONV: K.MATMUL,
    OpClass.MEMORY: K.STREAM, OpClass.FREE: K.LAUNCH,
}  # fmt: skip


class Source(StrEnum):
    """Where a price comes from."""

    MEASURED = "measured"
    FITTED = "fitted"
    DATA_SHEET = "data sheet or default"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds, and where they come from."""

    time_s: float
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """All that is fitted to a profile.

    Attributes:
        launch_s: Seconds of an operator on next to no data.
        view_s: Of a view.
        executor_s: Of running an operator beyond the operator itself, by busy ranks.
        matmul: By dtype.
        memory: By name of the pass.
        attention: Share of the matmul peak, by ``forward`` and ``backward``.
        links: By kind, ranks, name and busy ranks.
        optimizers: By name and busy ranks.
        waiting: By ranks that meet, nodes that they span, and busy ranks.
        sums: Of adding a micro-batch's gradients, by busy ranks.
        busy: By kind of point and busy ranks.
        hidden: Share of the shorter lane that is hidden behind the other, by ranks, nodes, busy.
        left_out: Curves that a profile which ran out of time has too few points of, and why.
    """

    launch_s: float
    view_s: float
    executor_s: Mapping[int, float]
    matmul: Mapping[str, MatmulCurve]
    memory: Mapping[str, MemoryCurve]
    attention: Mapping[str, float]
    links: Mapping[tuple[PointKind, int, str, int], LinkCurve]
    optimizers: Mapping[tuple[str, int], OptimizerCurve]
    waiting: Mapping[tuple[int, str, int], WaitCurve]
    sums: Mapping[int, OptimizerCurve]
    busy: Mapping[tuple[PointKind, int], float]
    hidden: Mapping[tuple[int, str, int], float]
    left_out: tuple[str, ...] = ()

    def parameters(self) -> dict[str, float]:
        """Every fitted number by a name."""
        table = {"launch_s": self.launch_s, "view_s": self.view_s}
        for dtype, matmul in self.matmul.items():
            table[f"matmul {dtype} peak"] = matmul.peak_flops
        for name, memory in self.memory.items():
            for size, bandwidth in memory.levels:
                table[f"memory {name} {size} bytes/s"] = bandwidth
        for name, share in self.attention.items():
            table[f"attention {name} share"] = share
        for (kind, ranks, nodes, busy), link in self.links.items():
            where = " ".join(filter(None, (kind.value, f"{ranks} ranks", nodes, f"{busy} busy")))
            table[f"{where} alpha_s"] = link.alpha_s
            table[f"{where} bytes/s"] = link.bandwidth_bytes_per_s
        for (name, busy), optimizer in self.optimizers.items():
            table[f"{name} {busy} busy per_tensor_s"] = optimizer.per_tensor_s
            table[f"{name} {busy} busy per_byte_s"] = optimizer.per_byte_s
        for (ranks, nodes, busy), waits in self.waiting.items():
            where = " ".join(filter(None, (f"waiting of {ranks} ranks", nodes, f"{busy} busy")))
            table[f"{where} each_s"] = waits.each_s
            table[f"{where} share"] = waits.share
        for (kind, busy), factor in self.busy.items():
            table[f"{kind.value} {busy} busy factor"] = factor
        return table


def fit_profile(profile: Profile) -> Fits:
    """Fit all curves.

    What was not measured at all is left out. What was measured at too few sizes is refused; in a
    profile that ran out of time it is left out and told, but for what all else is fitted to.

    Raises:
        ConfigError: A curve has too few points; it names the curve, both numbers and the remedy.
    """
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in profile.points:
        groups.setdefault(_curve_of(point), []).append(point)
    launches = {p.name: p.time_s for p in profile.of_kind(K.LAUNCH) if p.busy == 1}
    launch_s = launches.get("add", launches.get("", 0.0))
    matmul: dict[str, MatmulCurve] = {}
    memory: dict[str, MemoryCurve] = {}
    links: dict[tuple[PointKind, int, str, int], LinkCurve] = {}
    optimizers: dict[tuple[str, int], OptimizerCurve] = {}
    sums: dict[int, OptimizerCurve] = {}
    waiting: dict[tuple[int, str, int], WaitCurve] = {}
    left_out: list[str] = []
    if not any(p.kind is K.MATMUL and p.busy == 1 for p in profile.points):
        raise ConfigError(
            f"fit of matmuls: the {len(profile.points)} points of the profile of {profile.machine} "
            "hold 0 of them, needs at least 4 sizes; profile again"
        )
    for points in groups.values():
        first = points[0]
        try:
            if first.kind is K.MATMUL and first.busy == 1:
                matmul[first.dtype] = fit_matmul(points, launch_s)
            elif first.kind is K.STREAM and first.busy == 1:
                memory[first.name or "add"] = fit_memory(points, launch_s)
            elif first.kind in COLLECTIVES:
                links[(first.kind, first.sizes[1], first.name, first.busy)] = fit_link(points)
            elif first.kind is K.OPTIMIZER:
                optimizers[(first.name, first.busy)] = fit_optimizer(points)
            elif first.kind is K.ACCUMULATE:
                sums[first.busy] = fit_sums(points)
            elif first.kind is K.LOCKSTEP:
                nodes = first.name.partition(" ")[2]
                waiting[(first.sizes[1], nodes, first.busy)] = fit_waiting(points)
        except ConfigError as error:
            if profile.is_complete or (first.kind, first.name, first.dtype) in _NEEDED:
                raise
            left_out.append(str(error))
    return Fits(
        launch_s=launch_s,
        view_s=launches.get("view", launch_s),
        executor_s=_executor_s(profile),
        matmul=matmul,
        memory=memory,
        attention=_attention(profile, matmul),
        links=links,
        optimizers=optimizers,
        waiting=waiting,
        sums=sums,
        busy=busy_factors(p for p in profile.points if p.kind in (K.MATMUL, K.STREAM, K.LAUNCH)),
        hidden=_hidden(profile),
        left_out=tuple(left_out),
    )


def _curve_of(point: Point) -> tuple[object, ...]:
    """Points of one curve have the same key."""
    is_met = point.kind in (*COLLECTIVES, K.LOCKSTEP)
    name = point.name.partition(" ")[2] if point.kind is K.LOCKSTEP else point.name
    return point.kind, name, point.dtype, point.busy, point.sizes[1] if is_met else 0


def _executor_s(profile: Profile) -> dict[int, float]:
    """By busy ranks, over all operators of all programs that were measured."""
    totals: dict[int, tuple[float, int]] = {}
    for point in profile.of_kind(K.STEP):
        if point.name == "executor":
            time_s, number = totals.get(point.busy, (0.0, 0))
            count = point.sizes[0]
            totals[point.busy] = (time_s + count * point.time_s, number + count)
    return {busy: time_s / number for busy, (time_s, number) in totals.items()}


def _attention(profile: Profile, matmul: Mapping[str, MatmulCurve]) -> dict[str, float]:
    """Median share of the peak of float32 matmuls, by direction."""
    found: dict[str, list[float]] = {}
    peak = matmul.get("float32")
    for point in profile.of_kind(K.ATTENTION):
        if peak is not None:
            b, h, s, t, d = point.sizes
            flops = 2.0 * b * h * s * t * d  # causal: half of two matmuls of 2 b h s t d
            flops *= 2.5 if point.name == "backward" else 1.0
            found.setdefault(point.name, []).append(flops / point.time_s / peak.peak_flops)
    return {name: sorted(shares)[len(shares) // 2] for name, shares in found.items()}


def _hidden(profile: Profile) -> dict[tuple[int, str, int], float]:
    table: dict[tuple[int, str, int], dict[str, float]] = {}
    for point in profile.of_kind(K.BESIDE):
        lane, _, nodes = point.name.partition(" ")
        table.setdefault((point.sizes[1], nodes, point.busy), {})[lane] = point.time_s
    return {
        key: hidden_share(*(lanes[name] for name in _LANES))
        for key, lanes in table.items()
        if all(name in lanes for name in _LANES)
    }


class ProfiledCostModel:
    """Prices of the machine of a profile (a :class:`~cost_models.base.CostModel`).

    Attributes:
        cluster: The ranks that are priced; those of a machine that work are busy at the same time.
        fits: The curves.
    """

    def __init__(self, cluster: Cluster, profile: Profile) -> None:
        """Fit ``profile``, for ranks on ``cluster``.

        Raises:
            ConfigError: The profile is of another kind of device than the cluster, or has too few
                points for a fit.
        """
        kinds = {m.device.kind.value for m in cluster.machines}
        if kinds != {profile.device}:
            raise ConfigError(
                f"profile of {profile.machine!r}: is of device {profile.device!r}, the cluster "
                f"{cluster} has {', '.join(sorted(kinds))}; profile on the device, or leave the "
                "profile out"
            )
        self.cluster = cluster
        self.fits = fit_profile(profile)
        self._profile = profile
        self._analytic = AnalyticCostModel(cluster)
        self._ranks = max(m.num_at_work for m in cluster.machines)
        self._is_burst = False
        self._executor_s = self._at_ranks(self.fits.executor_s, K.LAUNCH)
        self._ops: dict[str, dict[int, float]] = {}
        by_op: dict[str, list[tuple[float, float]]] = {}
        for point in profile.of_kind(K.OP):
            self._ops.setdefault(point.name, {})[point.busy] = point.time_s
            flops, moved_bytes = point.sizes
            alone_s = point.time_s / self._factor(K.STREAM, point.busy)
            roofline_s = self._roofline_s(float(flops), float(moved_bytes), point.dtype)
            by_op.setdefault(point.name.partition("(")[0], []).append((roofline_s, alone_s))
        self._op_curves: dict[str, OpCurve] = {
            op: fit_operator(pairs) for op, pairs in by_op.items()
        }
        self._calls = {
            (p.name, p.busy): p.time_s for p in profile.of_kind(K.STEP) if p.name != "executor"
        }

    @property
    def source(self) -> str:
        """Where the prices come from."""
        profile = self._profile
        rest = "the rest fitted"
        if self.fits.left_out:
            rest += f", {len(self.fits.left_out)} curves with too few points left out"
        return (
            f"{PROFILED}{profile.machine} on {profile.date}, torch "
            f"{profile.versions.get('torch', 'unknown')}: {len(profile.points)} points, "
            f"{len(self._ops)} operators with their shapes; {rest}"
        )

    def at_work(self, num_ranks: int) -> ProfiledCostModel:
        """The prices while only the first ``num_ranks`` ranks work; itself if they are the same."""
        cluster = self.cluster.at_work(num_ranks)
        if max(m.num_at_work for m in cluster.machines) == self._ranks:
            return self
        found = ProfiledCostModel(cluster, self._profile)
        found._is_burst = self._is_burst
        return found

    # ------------------------------------------------------------ operators
    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        """Seconds of one operator."""
        return self.op_price(op, args, operands, results).time_s

    def op_price(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> Price:
        """Seconds of one operator with their source."""
        executor_s = self._executor_s
        if op in _FREE_OPS:
            return Price(executor_s, Source.FREE)
        work = work_of(op, args, operands, results)
        kind = _BUSY_KIND[work.op_class]
        measured = self._ops.get(op_key(op, args, operands))
        if measured:
            busy = min(measured, key=lambda b: abs(b - self._ranks))
            scale = self._factor(kind, self._ranks) / self._factor(kind, busy)
            return Price(executor_s + measured[busy] * scale, Source.MEASURED)
        alone = self._fitted(op, work)
        return Price(executor_s + alone.time_s * self._factor(kind, self._ranks), alone.source)

    def _fitted(self, op: str, work: Work) -> Price:
        if work.op_class is OpClass.FREE:
            is_view = op in VIEW_OPS and self.fits.view_s > 0
            return Price(self.fits.view_s if is_view else 0.0, Source.FITTED)
        if op == LAYOUT_COPY and (copy_curve := self.fits.memory.get("transposed_copy")):
            return Price(copy_curve.time_s(work.moved_bytes), Source.FITTED)
        curve = self._op_curves.get(op)
        if work.op_class is OpClass.MATMUL and work.dims and work.dtype in self.fits.matmul:
            return Price(self.fits.matmul[work.dtype].time_s(work.dims), Source.FITTED)
        roofline_s = self._roofline_s(work.flops, work.moved_bytes, work.dtype)
        if curve is not None:
            return Price(curve.time_s(roofline_s), Source.FITTED)
        launch_s = work.num_kernels * self.fits.launch_s
        peak = self.fits.matmul.get(work.dtype)
        if work.op_class is OpClass.ATTENTION and peak is not None and self.fits.attention:
            name = "backward" if "backward" in op else "forward"
            share = self.fits.attention.get(name, next(iter(self.fits.attention.values())))
            return Price(launch_s + work.flops / (peak.peak_flops * share), Source.FITTED)
        if work.op_class is OpClass.MEMORY and self.fits.memory:
            return Price(launch_s + roofline_s, Source.FITTED)
        return Price(launch_s + roofline_s, Source.DATA_SHEET)

    def _roofline_s(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Arithmetic at the fitted peak or bytes at the bandwidth of their working set."""
        device = self._analytic.device
        matmul, memory = self.fits.matmul.get(dtype), self.fits.memory.get("add")
        peak = matmul.peak_flops if matmul else device.peak_flops_for(dtype)
        bandwidth = device.memory_bandwidth_bytes_per_s
        if memory is not None:
            bandwidth = memory.bandwidth_bytes_per_s(moved_bytes)
        return max(flops / peak, moved_bytes / bandwidth)

    def _factor(self, kind: PointKind, busy: int) -> float:
        """How much longer work takes while ``busy`` ranks of the machine do it."""
        if busy <= 1:
            return 1.0
        found = self.fits.busy.get((kind, busy))
        if found is not None:
            return max(1.0, found)
        # cores that are shared are shared evenly; what ranks on cores of their own take from each
        # other was not measured
        return max(1.0, busy / max(1, self._profile.num_cores))

    def _at_ranks(self, table: Mapping[int, float], kind: PointKind) -> float:
        """What was measured with this many busy ranks, or with the next best; 0 if nothing was."""
        if not table:
            return 0.0
        busy = min(table, key=lambda b: abs(b - self._ranks))
        return table[busy] * self._factor(kind, self._ranks) / self._factor(kind, busy)

    # ------------------------------------------------------------ collectives
    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of one collective among ``ranks``."""
        return self.collective_price(kind, payload_bytes, ranks).time_s

    def collective_price(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> Price:
        """Seconds of one collective with their source.

        Raises:
            ConfigError: ``payload_bytes`` is negative or the kind is unknown.
        """
        which = collective_kind(kind)
        group = tuple(dict.fromkeys(ranks))
        if payload_bytes < 0 or len(group) < 2 or payload_bytes == 0:
            time_s = self._analytic.collective_time_s(which, payload_bytes, group)
            return Price(time_s, Source.FREE)
        size = 2 if which is CollectiveKind.P2P else len(group)
        nodes = self.cluster.links_for(group).num_machines
        name = "" if nodes == 1 else f"{nodes} nodes"
        point_kind = PointKind(which.value)
        if self._is_burst and any(
            key[:3] == (point_kind, size, burst_name(name)) for key in self.fits.links
        ):
            name = burst_name(name)
        found = [
            b for k, n, where, b in self.fits.links if (k, n, where) == (point_kind, size, name)
        ]
        if not found:
            time_s = self._analytic.collective_time_s(which, payload_bytes, group)
            return Price(time_s, Source.DATA_SHEET)
        busy = min(found, key=lambda b: abs(b - self._ranks))
        curve = self.fits.links[(point_kind, size, name, busy)]
        is_measured = payload_bytes in {payload for payload, _ in curve.knots}
        source = Source.MEASURED if is_measured else Source.FITTED
        return Price(curve.time_s(payload_bytes), source)

    # ------------------------------------------------------------ around the programs
    def in_bursts(self) -> ProfiledCostModel:
        """The same prices, for collectives that are all issued before the first is waited for."""
        found = copy(self)
        found._is_burst = True
        return found

    def optimizer_time_s(self, name: str, num_tensors: int, num_bytes: float) -> float | None:
        """Seconds of an optimizer's step on one rank; None if it was not measured."""
        found = [busy for n, busy in self.fits.optimizers if n == name]
        if not found:
            return None
        busy = min(found, key=lambda b: abs(b - self._ranks))
        scale = self._factor(K.STREAM, self._ranks) / self._factor(K.STREAM, busy)
        return self.fits.optimizers[(name, busy)].time_s(num_tensors, num_bytes) * scale

    def accumulate_time_s(self, num_tensors: int, num_bytes: float) -> float:
        """Seconds of adding one more micro-batch's gradients; 0 if that was not measured."""
        times = {b: curve.time_s(num_tensors, num_bytes) for b, curve in self.fits.sums.items()}
        return self._at_ranks(times, K.STREAM)

    def waiting_s(self, num_ranks: int, num_waits: int, compute_s: float) -> float:
        """Seconds that a rank waits for the slowest of those that it meets; 0 if not measured."""
        of_size = {b: curve for (n, _, b), curve in self.fits.waiting.items() if n == num_ranks}
        if not of_size:
            return 0.0
        busy = min(of_size, key=lambda b: abs(b - self._ranks))
        return of_size[busy].time_s(num_waits, compute_s)

    def call_time_s(self, num_parameters: int) -> float:
        """Seconds of a call and its backward on one rank beyond its programs; 0 if not measured."""
        found = [busy for name, busy in self._calls if name == "call"]
        if not found:
            return 0.0
        busy = min(found, key=lambda b: abs(b - self._ranks))
        each_s = self._calls.get(("parameter", busy), 0.0)
        scale = self._factor(K.LAUNCH, self._ranks) / self._factor(K.LAUNCH, busy)
        return (self._calls["call", busy] + num_parameters * each_s) * scale

    def shared_step_s(self, makespan_s: float, busy_s: Sequence[float], comm_s: float) -> float:
        """Seconds of a step whose ranks share cores, some of them waiting at times.

        Two bounds: no rank is faster than on a core of its own, and the cores can't do the work of
        all ranks faster than they would do it without a pause.
        """
        cores = min(self._ranks, max(1, self._profile.num_cores))
        slowdown = self._factor(K.MATMUL, self._ranks) / self._factor(K.MATMUL, cores)
        if slowdown <= 1 or not busy_s:
            return makespan_s
        alone_s = (makespan_s - comm_s) / slowdown
        return min(makespan_s, comm_s + max(alone_s, sum(busy_s) / len(busy_s)))
