"""How well predictions agree with measurements: errors, rank correlation, regret, verdicts.

A relative error is ``predicted / measured - 1``; figures over sources are medians and means of the
sources' own medians, so that a source with many records weighs no more than another.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

LEAST_GROUP = 3  # runs of a sweep group, below which a rank correlation says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of one quantity.

    Attributes:
        count: How many.
        mean_abs: Mean of absolute values.
        median_abs: Median of absolute values.
        bias: Mean with sign.
    """

    count: int
    mean_abs: float
    median_abs: float
    bias: float

    @staticmethod
    def of(errors: Sequence[float]) -> Errors | None:
        """None without any."""
        if not errors:
            return None
        sizes = [abs(e) for e in errors]
        return Errors(
            count=len(errors), mean_abs=fmean(sizes), median_abs=median(sizes), bias=fmean(errors)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Out-of-memory verdicts: counts of (predicted, measured)."""

    hits: int = 0
    false_alarms: int = 0
    misses: int = 0
    agreed_fits: int = 0

    @staticmethod
    def of(pairs: Iterable[tuple[bool, bool]]) -> Verdicts:
        """From (predicted out of memory, measured out of memory)."""
        found = list(pairs)
        return Verdicts(
            hits=found.count((True, True)), false_alarms=found.count((True, False)),
            misses=found.count((False, True)), agreed_fits=found.count((False, False)),
        )  # fmt: skip

    @property
    def precision(self) -> float | None:
        """Share of predicted failures that failed; None if none was predicted."""
        predicted = self.hits + self.false_alarms
        return self.hits / predicted if predicted else None

    @property
    def recall(self) -> float | None:
        """Share of failures that were predicted; None if there were none."""
        failed = self.hits + self.misses
        return self.hits / failed if failed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Plans of one model on the same devices with the same batch.

    Attributes:
        key: What they share.
        count: Runs that fit.
        spearman: Rank correlation; None if one side is constant.
        regret: Measured time of the plan predicted fastest over the best measured one, less 1.
    """

    key: Hashable
    count: int
    spearman: float | None
    regret: float


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, ties shared.

    >>> ranks([10.0, 20.0, 10.0])
    [1.5, 3.0, 1.5]
    """
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for position in order[start:stop]:
            found[position] = (start + stop + 1) / 2
        start = stop
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Rank correlation; None where a side has no spread.

    >>> spearman([1, 2, 3], [10, 20, 15])
    0.5
    """
    a, b = ranks(left), ranks(right)
    mean = (len(a) + 1) / 2
    cross = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return cross / spread**0.5 if spread else None


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """What choosing by prediction loses; of several predicted equal the first counts.

    >>> regret([1.0, 2.0], [12.0, 10.0])
    0.2
    """
    chosen = min(range(len(predicted)), key=lambda i: predicted[i])
    return round(measured[chosen] / min(measured) - 1.0, 12)


def groups(runs: Iterable[tuple[Hashable, float, float]]) -> tuple[Group, ...]:
    """Sweep groups from (key, predicted, measured), in order of first appearance."""
    by_key: dict[Hashable, list[tuple[float, float]]] = {}
    for key, predicted, measured in runs:
        by_key.setdefault(key, []).append((predicted, measured))
    return tuple(
        Group(
            key=key,
            count=len(pairs),
            spearman=spearman([p for p, _ in pairs], [m for _, m in pairs]),
            regret=regret([p for p, _ in pairs], [m for _, m in pairs]),
        )
        for key, pairs in by_key.items()
        if len(pairs) >= LEAST_GROUP
    )


def over_sources(by_source: Mapping[str, Errors | None]) -> dict[str, float]:
    """Macro figures: median and mean of the sources' median errors, mean of their biases."""
    found = [e for e in by_source.values() if e is not None]
    if not found:
        return {}
    return {
        "macro_median": median(e.median_abs for e in found),
        "macro_mean": fmean(e.mean_abs for e in found),
        "macro_mean_of_medians": fmean(e.median_abs for e in found),
        "macro_bias": fmean(e.bias for e in found),
    }
