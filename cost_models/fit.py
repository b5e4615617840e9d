"""Curves fitted to a profile, by least squares of relative errors.

========= ======================================================================================
matmul    ``launch + flops / peak * (1 + half_k / k + half_edge (1 / m + 1 / n))``: a short k does
          not hide the start of a tile, short edges do not pay for packing the operands
memory    seconds per byte by working set, interpolated between the sizes that were measured: the
          levels of the caches, then the memory
link      ``alpha + payload / bandwidth`` of each collective, group size and number of nodes;
          between payloads that were measured, what lies between their times
optimizer ``tensors * per_tensor + bytes * per_byte``
waiting   ``waits * each + share * computed``, of ranks that compute and meet in turn
operator  ``start + share * roofline``, for one operator over shapes
========= ======================================================================================

No coefficient is negative. A curve needs more points than it has parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import exp, log
from statistics import median

from autopar.errors import ConfigError
from cost_models.profile import Point, PointKind

K = PointKind
MIN_MATMULS = 4
MIN_STREAMS = 2
MIN_PAYLOADS = 3
MIN_OPTIMIZERS = 2
MIN_ROUNDS = 2
SMALLEST_S = 1e-12


def least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
    """Coefficients that are at least 0 and leave the least sum of squared errors.

    With so few unknowns every set of them that may be above 0 is tried.

    Raises:
        ConfigError: No set of unknowns can be told apart by the rows.

    >>> [round(v, 6) for v in least_squares([[1, 1], [1, 2], [1, 3]], [3, 5, 7])]
    [1.0, 2.0]
    """
    width = len(rows[0]) if rows else 0
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(width)]
    best: tuple[float, tuple[float, ...]] | None = None
    for count in range(width, 0, -1):
        for chosen in combinations(range(width), count):
            part = [[row[i] / scale[i] for i in chosen] for row in rows]
            found = _solve(part, targets)
            if found is None or min(found) < 0:
                continue
            values = [0.0] * width
            for i, value in zip(chosen, found, strict=True):
                values[i] = value / scale[i]
            error = sum(
                (sum(a * v for a, v in zip(row, values, strict=True)) - t) ** 2
                for row, t in zip(rows, targets, strict=True)
            )
            if best is None or error < best[0] * (1 - 1e-9):
                best = (error, tuple(values))
    if best is None:
        raise ConfigError(
            f"fit: {len(rows)} points do not tell {width} unknowns apart; measure more sizes"
        )
    return best[1]


def _solve(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Unconstrained least squares by the normal equations; None if they are singular."""
    width = len(rows[0])
    table = [
        [sum(r[i] * r[j] for r in rows) for j in range(width)]
        + [sum(r[i] * t for r, t in zip(rows, targets, strict=True))]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda r: abs(table[r][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-11 * max(1.0, len(rows)):
            return None
        for r in range(width):
            if r != i:
                factor = table[r][i] / table[i][i]
                table[r] = [a - factor * b for a, b in zip(table[r], table[i], strict=True)]
    return [table[i][width] / table[i][i] for i in range(width)]


def _relative(rows: Iterable[tuple[Sequence[float], float]]) -> tuple[float, ...]:
    """Least squares with each row divided by its time, so that short ones count as much."""
    pairs = [(r, max(t, SMALLEST_S)) for r, t in rows]
    return least_squares([[a / t for a in r] for r, t in pairs], [1.0] * len(pairs))


def _check(what: str, points: Sequence[Point], distinct: int, least: int) -> None:
    if distinct < least:
        raise ConfigError(
            f"fit of {what}: has {distinct} different sizes in {len(points)} points, needs at "
            f"least {least}; profile again with a larger --budget"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCurve:
    """Time of a matmul in one dtype.

    Attributes:
        peak_flops: FLOP/s that large ones come close to.
        half_k: Inner size at which half of it is reached.
        half_edge: Rows (or columns) at which half of it is reached.
        launch_s: Seconds of each.
    """

    peak_flops: float
    half_k: float
    half_edge: float
    launch_s: float

    def time_s(self, dims: tuple[int, ...]) -> float:
        """Seconds of ``b, m, n, k``."""
        b, m, n, k = (max(1, size) for size in dims)
        flops = 2.0 * b * m * n * k
        waste = 1.0 + self.half_k / k + self.half_edge * (1.0 / m + 1.0 / n)
        return self.launch_s + flops / self.peak_flops * waste


def fit_matmul(points: Sequence[Point], launch_s: float) -> MatmulCurve:
    """The curve of matmuls of one dtype.

    Raises:
        ConfigError: There are too few.
    """
    dtype = points[0].dtype if points else ""
    _check(f"matmuls in {dtype}", points, len({p.sizes for p in points}), MIN_MATMULS)
    rows = []
    for point in points:
        b, m, n, k = point.sizes
        flops = 2.0 * b * m * n * k
        row = (flops, flops / k, flops * (1.0 / m + 1.0 / n))
        rows.append((row, point.time_s - min(launch_s, point.time_s / 2)))
    per_flop_s, per_k_s, per_edge_s = _relative(rows)
    if per_flop_s <= 0:
        # all is overhead in the range that was measured: the best rate is a lower bound of the peak
        best = max(
            2.0 * p.sizes[0] * p.sizes[1] * p.sizes[2] * p.sizes[3] / p.time_s for p in points
        )
        per_flop_s = 1.0 / best
    return MatmulCurve(
        peak_flops=1.0 / per_flop_s,
        half_k=per_k_s / per_flop_s,
        half_edge=per_edge_s / per_flop_s,
        launch_s=launch_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Time of a pass over memory, by its working set.

    Attributes:
        levels: (Bytes, bytes per second), by bytes.
        launch_s: Seconds of each pass.
    """

    levels: tuple[tuple[int, float], ...]
    launch_s: float

    def bandwidth_bytes_per_s(self, moved_bytes: float) -> float:
        """Between the sizes that were measured interpolated (both logarithmic), beyond constant."""
        levels = self.levels
        if moved_bytes <= levels[0][0]:
            return levels[0][1]
        for (small, fast), (large, slow) in pairwise(levels):
            if moved_bytes <= large:
                share = log(moved_bytes / small) / log(large / small)
                return exp(log(fast) + share * (log(slow) - log(fast)))
        return levels[-1][1]

    def time_s(self, moved_bytes: float) -> float:
        """Seconds of one pass."""
        return self.launch_s + moved_bytes / self.bandwidth_bytes_per_s(moved_bytes)


def fit_memory(points: Sequence[Point], launch_s: float) -> MemoryCurve:
    """The curve of one kind of pass over memory.

    Raises:
        ConfigError: There are too few sizes.
    """
    name = points[0].name if points else ""
    by_size: dict[int, list[float]] = {}
    for point in points:
        by_size.setdefault(point.sizes[0], []).append(point.time_s)
    _check(f"memory passes {name!r}", points, len(by_size), MIN_STREAMS)
    levels = []
    for size, times in sorted(by_size.items()):
        time_s = median(times)
        # of a pass no longer than a launch, half is taken to be the launch
        moving_s = time_s - launch_s if time_s > 1.05 * launch_s else time_s / 2
        levels.append((size, size / moving_s))
    return MemoryCurve(levels=tuple(levels), launch_s=launch_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """Time of one collective in groups of one size.

    Between two payloads that were measured it is what lies between their times: backends change
    the algorithm with the size, and large payloads leave the caches.

    Attributes:
        alpha_s: Seconds whatever the payload.
        bandwidth_bytes_per_s: Payload per second beyond that.
        knots: (Payload, seconds) that were measured, ascending in both.
    """

    alpha_s: float
    bandwidth_bytes_per_s: float
    knots: tuple[tuple[int, float], ...] = ()

    def time_s(self, payload_bytes: float) -> float:
        """Seconds."""
        if not self.knots:
            return self.alpha_s + payload_bytes / self.bandwidth_bytes_per_s
        first_bytes, first_s = self.knots[0]
        if payload_bytes <= first_bytes:
            return first_s
        for (small, fast_s), (large, slow_s) in pairwise(self.knots):
            if payload_bytes <= large:
                return fast_s + (payload_bytes - small) / (large - small) * (slow_s - fast_s)
        last_bytes, last_s = self.knots[-1]
        return last_s + (payload_bytes - last_bytes) / self.bandwidth_bytes_per_s


def ascending(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Times that never fall with the size: neighbours that do are set to their mean.

    Source: Ayer et al., "An empirical distribution function for sampling with incomplete
    information", Annals of Mathematical Statistics 26(4), 1955 (pool adjacent violators).

    >>> ascending([(1, 2.0), (2, 1.0), (3, 5.0)])
    ((1, 1.5), (2, 1.5), (3, 5.0))
    """
    pools: list[tuple[float, int]] = []
    for _, time_s in sorted(pairs):
        pools.append((time_s, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low_s, few), (high_s, more) = pools[-2:]
            pools[-2:] = [((low_s * few + high_s * more) / (few + more), few + more)]
    times = [time_s for time_s, count in pools for _ in range(count)]
    return tuple((size, time_s) for (size, _), time_s in zip(sorted(pairs), times, strict=True))


def fit_link(points: Sequence[Point]) -> LinkCurve:
    """Alpha and bandwidth of one collective in groups of one size.

    Raises:
        ConfigError: There are too few payloads.
    """
    what = f"{points[0].kind} of {points[0].sizes[1]} ranks" if points else "collectives"
    _check(what, points, len({p.sizes[0] for p in points}), MIN_PAYLOADS)
    alpha_s, per_byte_s = _relative(((1.0, float(p.sizes[0])), p.time_s) for p in points)
    return LinkCurve(
        alpha_s=alpha_s,
        bandwidth_bytes_per_s=1.0 / max(per_byte_s, SMALLEST_S * 1e-6),
        knots=ascending([(p.sizes[0], p.time_s) for p in points]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCurve:
    """Time of an optimizer's step."""

    per_tensor_s: float
    per_byte_s: float

    def time_s(self, num_tensors: int, num_bytes: float) -> float:
        """Seconds for so many tensors of so many bytes in all."""
        return num_tensors * self.per_tensor_s + num_bytes * self.per_byte_s


def fit_optimizer(points: Sequence[Point]) -> OptimizerCurve:
    """The curve of one optimizer.

    Raises:
        ConfigError: There are too few sizes.
    """
    what = f"optimizer {points[0].name!r}" if points else "optimizers"
    _check(what, points, len({p.sizes for p in points}), MIN_OPTIMIZERS)
    rows = (((float(p.sizes[0]), float(p.sizes[1])), p.time_s) for p in points)
    per_tensor_s, per_byte_s = _relative(rows)
    return OptimizerCurve(per_tensor_s=per_tensor_s, per_byte_s=per_byte_s)


def fit_sums(points: Sequence[Point]) -> OptimizerCurve:
    """The curve of adding gradients to their sums; of one size all of it goes by the byte."""
    if len({p.sizes for p in points}) < MIN_OPTIMIZERS:
        num_bytes = points[0].sizes[1]
        return OptimizerCurve(
            per_tensor_s=0.0, per_byte_s=median(p.time_s for p in points) / num_bytes
        )
    return fit_optimizer(points)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCurve:
    """Time of one operator over shapes: ``start_s + share * what the roofline says``."""

    start_s: float
    share: float

    def time_s(self, roofline_s: float) -> float:
        """Seconds."""
        return self.start_s + self.share * roofline_s


def fit_operator(pairs: Sequence[tuple[float, float]]) -> OpCurve:
    """From (roofline seconds, measured seconds); with one of them the start is left at 0.

    Raises:
        ConfigError: There is none.
    """
    if not pairs:
        raise ConfigError("fit of an operator: has 0 points, needs at least 1; profile it")
    if len({round(x, 12) for x, _ in pairs}) == 1:
        time_s = median(t for _, t in pairs)
        roofline_s = pairs[0][0]
        share = time_s / roofline_s if roofline_s > 0 else 0.0
        return OpCurve(start_s=0.0 if roofline_s > 0 else time_s, share=share)
    start_s, share = _relative(((1.0, x), t) for x, t in pairs)
    return OpCurve(start_s=start_s, share=share)


def hidden_share(comm_s: float, compute_s: float, both_s: float) -> float:
    """What of the shorter of two lanes is hidden behind the other: 1 all of it, 0 nothing.

    >>> hidden_share(2.0, 3.0, 3.0), hidden_share(2.0, 3.0, 5.0)
    (1.0, 0.0)
    """
    shorter, longer = sorted((comm_s, compute_s))
    return min(1.0, max(0.0, 1.0 - (both_s - longer) / shorter))


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCurve:
    """What meeting other ranks takes beyond the collective itself.

    Attributes:
        each_s: Seconds of each time: a rank that computed has left the backend's threads asleep.
        share: Of the seconds computed in between: the slowest rank takes so much longer than most.
    """

    each_s: float
    share: float

    def time_s(self, num_waits: int, compute_s: float) -> float:
        """Seconds of so many times, with so many seconds of computing in all."""
        return num_waits * self.each_s + self.share * compute_s


def fit_waiting(points: Sequence[Point]) -> WaitCurve:
    """From rounds of computing and a small collective, and both alone.

    Raises:
        ConfigError: There are too few lengths of rounds.
    """
    table: dict[str, dict[int, float]] = {}
    for point in points:
        table.setdefault(point.name.partition(" ")[0], {})[point.sizes[0]] = point.time_s
    rounds, computing = table.get("round", {}), table.get("compute", {})
    counts = sorted(rounds.keys() & computing.keys())
    _check(f"rounds of {points[0].sizes[1]} ranks", points, len(counts), MIN_ROUNDS)
    comm_s = median(table["comm"].values()) if "comm" in table else 0.0
    rows, targets = [], []
    for count in counts:  # a second of a short round counts as much as one of a long round
        rows.append((1.0 / rounds[count], computing[count] / rounds[count]))
        targets.append(1.0 - (computing[count] + comm_s) / rounds[count])
    gains = [sum(row[i] * t for row, t in zip(rows, targets, strict=True)) for i in (0, 1)]
    if max(gains) <= 0:  # nothing is lost: those that wait lend their cores to others
        return WaitCurve(each_s=0.0, share=0.0)
    each_s, share = least_squares(rows, targets)
    return WaitCurve(each_s=each_s, share=share)


def busy_factors(points: Iterable[Point]) -> Mapping[tuple[PointKind, int], float]:
    """How much longer the same work takes while several ranks do it, by kind of work.

    The median over what was measured both alone and with others.
    """
    points = list(points)
    alone = {p.key[:4]: p.time_s for p in points if p.busy == 1}
    ratios: dict[tuple[PointKind, int], list[float]] = {}
    for point in points:
        one_s = alone.get(point.key[:4])
        if point.busy > 1 and one_s is not None and point.kind is not K.OPTIMIZER:
            ratios.setdefault((point.kind, point.busy), []).append(point.time_s / one_s)
    return {key: median(values) for key, values in ratios.items()}
