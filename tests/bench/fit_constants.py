"""Fits the figures marked ``[fitted]`` to published training runs and says how well they hold.

::

    python tests/bench/fit_constants.py --data published.jsonl [--works works.pickle] [--rounds 3]

What a run does (its works) is found once and kept in ``--works``. Every parameter is a factor on
the value in the code, for one GPU type, one kind of link or one kind of operation; none belongs to
a source. The fit is Gauss-Newton on ``log(predicted / measured)``: all sources weigh the same,
large residuals count linearly, and a ridge holds back factors that the runs say little about. It
prints errors by source with the figures in the code, after the fit, and for each source with a fit
that has not seen it; then the values to write into the code.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median

from autopar.cluster.topology import Cluster, Link, LinkKind
from autopar.validation.errors import SkipRecord
from autopar.validation.predict import predict_time
from autopar.validation.prices import ClusterPrices, Prices
from autopar.validation.records import Kind, Record, read_records
from autopar.validation.works import RecordWorks, layer_of, works_of
from cost_models.constants import CONSTANTS, PriceConstants

SOFT = 0.04  # residual from which on errors count linearly
STEP = 0.01  # of a parameter's logarithm, for derivatives
RIDGE = 0.3  # logarithm that costs as much as a residual of SOFT in one source
MOST_FIT = 60  # records of one source that the fit looks at
GPU_TYPES = {"a100-40gb": "a100", "a100-80gb": "a100", "v100-16gb": "v100", "v100-32gb": "v100",
             "h200": "h100-sxm"}  # fmt: skip
CURVE = ("matmul_fraction", "memory_fraction", "attention_fraction", "attention_backward_fraction")
HOST = ("host_operator_s", "host_step_s")
UPPER = {"a100.matmul_fraction": 271.2 / 312, "h100-sxm.matmul_fraction": 794.5 / 989,
         "memory_fraction": 0.95}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run.

    Attributes:
        record: What was measured.
        works: What it does; of one layer for a layer's time.
        measured_s: By quantity: a step, or a layer's forward and whole.
    """

    record: Record
    works: RecordWorks
    measured_s: tuple[float, ...]

    @property
    def gpu(self) -> str:
        """GPU type."""
        name = self.works.cluster.machines[0].device.name
        return GPU_TYPES.get(name, name)


Factors = Mapping[str, float]


def parameters(runs: Sequence[Run]) -> list[str]:
    """Names of what is fitted."""
    gpus = sorted({run.gpu for run in runs})
    names = [f"{gpu}.{name}" for gpu in gpus for name in (*CURVE, *HOST)]
    names += sorted({f"{r.gpu}.{r.works.cluster.machines[0].intra.kind}" for r in runs})
    names += [f"link.{kind}" for kind in (LinkKind.INFINIBAND, LinkKind.ETHERNET)]
    return names + [f"constant.{field.name}" for field in fields(PriceConstants)]


def value_in_code(name: str, runs: Sequence[Run]) -> float:
    """What the code has for a parameter."""
    group, _, field = name.partition(".")
    if group == "constant":
        return float(getattr(CONSTANTS, field))
    if group == "link":
        return next(
            (r.works.cluster.machines[0].inter.bandwidth_bytes_per_s for r in runs
             if r.works.cluster.machines[0].inter.kind == field), 1.0
        )  # fmt: skip
    machine = next(r.works.cluster.machines[0] for r in runs if r.gpu == group)
    if field in CURVE:
        return float(getattr(machine.device.curve, field))
    if field in HOST:
        return float(getattr(machine.device, field))
    return machine.intra.bandwidth_bytes_per_s


class Pricing:
    """Prices of a run with some figures multiplied."""

    def __init__(self, factors: Factors) -> None:
        self.factors = factors
        self.constants = replace(
            CONSTANTS,
            **{
                f.name: self._bounded(f"constant.{f.name}", getattr(CONSTANTS, f.name))
                for f in fields(PriceConstants)
            },
        )
        self._clusters: dict[int, Cluster] = {}

    def __call__(self, works: RecordWorks) -> Prices:
        key = id(works.cluster)
        if key not in self._clusters:
            self._clusters[key] = self._cluster(works.cluster)
        return ClusterPrices(self._clusters[key], works.family, self.constants)

    def _bounded(self, name: str, value: float) -> float:
        new = value * self.factors.get(name, 1.0)
        field = name.partition(".")[2]
        if field.endswith(("_fraction", "_share")) or field == "slowdown":
            new = min(new, UPPER.get(name, UPPER.get(field, 1.0)))
        return new

    def _cluster(self, cluster: Cluster) -> Cluster:
        machine = cluster.machines[0]
        gpu = GPU_TYPES.get(machine.device.name, machine.device.name)
        curve = replace(
            machine.device.curve,
            **{n: self._bounded(f"{gpu}.{n}", getattr(machine.device.curve, n)) for n in CURVE},
        )
        device = replace(
            machine.device,
            curve=curve,
            **{n: self._bounded(f"{gpu}.{n}", getattr(machine.device, n)) for n in HOST},
        )
        return replace(
            cluster,
            machines=tuple(
                replace(
                    m, device=device,
                    intra=self._link(m.intra, f"{gpu}.{m.intra.kind}"),
                    inter=self._link(m.inter, f"link.{m.inter.kind}"),
                )
                for m in cluster.machines
            ),
        )  # fmt: skip

    def _link(self, link: Link, name: str) -> Link:
        factor = self.factors.get(name, 1.0)
        return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)


def residuals(run: Run, pricing: Pricing) -> list[float]:
    """``log(predicted / measured)`` of each quantity of a run."""
    time = predict_time(run.works, pricing)
    if run.record.kind is Kind.LAYER:
        forward_s, backward_s = sum(time.forward_s), sum(time.backward_s)
        predicted = [forward_s, forward_s + backward_s]
    else:
        predicted = [time.total_s]
    return [log(p / m) for p, m in zip(predicted, run.measured_s, strict=True)]


def load_runs(data: Path, cache: Path | None) -> list[Run]:
    """Measured runs with their works, from ``cache`` if it exists."""
    if cache is not None and cache.exists():
        runs: list[Run] = pickle.loads(cache.read_bytes())  # the tool's own file
        return runs
    runs = []
    for record in read_records(data)[0]:
        measured = record.measured
        seconds: tuple[float, ...] = ()
        if record.kind is Kind.LAYER and measured.layer_forward_s and measured.layer_backward_s:
            forward_s = measured.layer_forward_s
            seconds = (forward_s, forward_s + measured.layer_backward_s)
        elif record.kind is Kind.STEP and measured.iteration_s and not record.is_oom:
            seconds = (measured.iteration_s,)
        if seconds:
            try:
                make = layer_of if record.kind is Kind.LAYER else works_of
                runs.append(Run(record, make(record), seconds))
            except SkipRecord as reason:
                sys.stderr.write(f"{record.name}: skipped, {reason}\n")
    if cache is not None:
        cache.write_bytes(pickle.dumps(runs))
    return runs


def thinned(runs: Sequence[Run]) -> list[Run]:
    """At most MOST_FIT runs of each source, evenly spaced."""
    found: list[Run] = []
    for source in dict.fromkeys(r.record.source for r in runs):
        own = [r for r in runs if r.record.source == source]
        stride = max(1, -(-len(own) // MOST_FIT))
        found += own[::stride]
    return found


@dataclass(frozen=True, slots=True)
class Rows:
    """Residuals and their derivatives, one row for each measured quantity."""

    sources: tuple[str, ...]
    errors: tuple[float, ...]
    slopes: tuple[tuple[float, ...], ...]


def linearised(runs: Sequence[Run], names: Sequence[str], logs: Sequence[float]) -> Rows:
    """Rows at ``logs``, the parameters' logarithms."""
    base = Pricing(dict(zip(names, map(exp, logs), strict=True)))
    errors = [residuals(run, base) for run in runs]
    columns: list[list[float]] = []
    for index, name in enumerate(names):
        moved = list(logs)
        moved[index] += STEP
        pricing = Pricing(dict(zip(names, map(exp, moved), strict=True)))
        group = name.partition(".")[0]
        column: list[float] = []
        for run, old in zip(runs, errors, strict=True):
            if group in ("constant", "link") or group == run.gpu:
                new = residuals(run, pricing)
                column += [(b - a) / STEP for a, b in zip(old, new, strict=True)]
            else:
                column += [0.0] * len(old)
        columns.append(column)
    sources = [r.record.source for r, e in zip(runs, errors, strict=True) for _ in e]
    return Rows(
        tuple(sources),
        tuple(e for many in errors for e in many),
        tuple(zip(*columns, strict=True)),
    )


def solved(rows: Rows, logs: Sequence[float], left_out: str | None = None) -> list[float]:
    """New logarithms that fit the linearised rows; without one source if ``left_out``."""
    size = len(logs)
    new = list(logs)
    used = [i for i, s in enumerate(rows.sources) if s != left_out]
    counts = {s: rows.sources.count(s) for s in set(rows.sources)}
    for _ in range(12):  # weights of large residuals follow the solution
        matrix = [[0.0] * size for _ in range(size)]
        right = [0.0] * size
        for i in used:
            slope = rows.slopes[i]
            error = rows.errors[i] + sum(
                s * (n - o) for s, n, o in zip(slope, new, logs, strict=True)
            )
            weight = 1.0 / counts[rows.sources[i]] / sqrt(1.0 + (error / SOFT) ** 2)
            at_new = error - sum(s * n for s, n in zip(slope, new, strict=True))
            for a in range(size):
                if slope[a]:
                    right[a] -= weight * slope[a] * at_new
                    for b in range(size):
                        matrix[a][b] += weight * slope[a] * slope[b]
        for a in range(size):
            matrix[a][a] += (SOFT / RIDGE) ** 2
        new = _solve(matrix, right)
        # a factor moves by at most a half in one round, where the rows are still about right
        new = [max(o - 0.4, min(o + 0.4, n)) for n, o in zip(new, logs, strict=True)]
    return new


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss elimination of a positive definite system."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for a in range(size):
        pivot = rows[a][a]
        for b in range(a + 1, size):
            share = rows[b][a] / pivot
            if share:
                rows[b] = [x - share * y for x, y in zip(rows[b], rows[a], strict=True)]
    found = [0.0] * size
    for a in reversed(range(size)):
        known = sum(rows[a][b] * found[b] for b in range(a + 1, size))
        found[a] = (rows[a][size] - known) / rows[a][a]
    return found


def report(title: str, errors: Mapping[str, Sequence[float]]) -> None:
    """Errors by source and over sources; ``errors`` are logarithms."""
    _say(f"\n{title}\n{'source':24}{'count':>6}{'mean':>8}{'median':>8}{'bias':>8}  (percent)")
    means, medians, biases = [], [], []
    for source, logs in sorted(errors.items()):
        relative = [exp(e) - 1.0 for e in logs]
        sizes = [abs(r) for r in relative]
        means.append(fmean(sizes))
        medians.append(median(sizes))
        biases.append(median(relative))
        _say(
            f"{source:24}{len(logs):6}{100 * means[-1]:8.1f}{100 * medians[-1]:8.1f}"
            f"{100 * biases[-1]:+8.1f}"
        )
    _say(
        f"{'over sources':24}{'':6}{100 * fmean(means):8.1f}{100 * median(medians):8.1f}"
        f"{100 * fmean(biases):+8.1f}"
    )


def by_source(runs: Sequence[Run], pricing: Pricing) -> dict[str, list[float]]:
    """Residuals of all runs."""
    found: dict[str, list[float]] = {}
    for run in runs:
        found.setdefault(run.record.source, []).extend(residuals(run, pricing))
    return found


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--works", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs = load_runs(options.data, options.works)
    few, names = thinned(runs), parameters(runs)
    logs = [0.0] * len(names)
    report("figures in the code", by_source(runs, Pricing({})))
    for round_ in range(options.rounds):
        logs = solved(linearised(few, names, logs), logs)
        pricing = Pricing(dict(zip(names, map(exp, logs), strict=True)))
        report(f"round {round_ + 1}", by_source(few, pricing))
    report("fitted", by_source(runs, Pricing(dict(zip(names, map(exp, logs), strict=True)))))
    rows = linearised(few, names, logs)
    unseen: dict[str, list[float]] = {}
    for source in sorted(set(rows.sources)):
        other = Pricing(dict(zip(names, map(exp, solved(rows, logs, source)), strict=True)))
        unseen.update(by_source([r for r in runs if r.record.source == source], other))
    report("each source by a fit that has not seen it", unseen)
    _say("\nvalues")
    fitted = Pricing(dict(zip(names, map(exp, logs), strict=True)))
    for name in names:
        old = value_in_code(name, runs)
        _say(f"{name:44}{old:14.4g}{fitted._bounded(name, old):14.4g}")


if __name__ == "__main__":
    main()
