"""The command ``python -m cost_models.validate``: options in, tables and a JSON file out."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from autopar.errors import AutoparError, ConfigError
from autopar.validation.engine import Outcome, SourceSummary, summaries, validate
from autopar.validation.memory import printed_bytes
from autopar.validation.metrics import Errors, Verdicts, over_sources
from autopar.validation.records import CONVENTIONS, Skipped

FORMAT_VERSION = 1
FAILED = 2
INTERRUPTED = 130  # as shells do


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cost_models.validate",
        description="Predict time and memory of published training runs and compare.",
    )
    parser.add_argument(
        "--data", type=Path, required=True,
        help="records, one JSON object a line (form: README of autopar/validation)",
    )  # fmt: skip
    parser.add_argument("--source", help="only records with this source_id")
    parser.add_argument("--out", type=Path, help="every record's prediction as JSON")
    args = parser.parse_args(argv)
    try:
        if args.out is not None:  # before minutes of work, not after them
            _check_writable(args.out)
        _run(args.data, args.source, args.out)
    except (AutoparError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return FAILED
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        return INTERRUPTED
    return 0


def _check_writable(out: Path) -> None:
    if out.is_dir() or not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: is a folder, or lies in none; name a file in one")
    existing = out if out.exists() else out.resolve().parent
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"--out {out}: can't be written; choose another file")


def _run(data: Path, source: str | None, out: Path | None) -> None:
    with Progress(
        "[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(), console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        task = bar.add_task("predicting", total=None)
        outcomes, skipped = validate(
            data, source=source,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    found = summaries(outcomes, skipped)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in (_sources_table(found), _memory_table(found), _groups_table(found)):
        if table.row_count:
            console.print(table)
    for line in (*_totals(found), *_assumed_lines(outcomes), *_skipped_lines(skipped)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(as_json(outcomes, skipped, found), indent=1), encoding="utf-8")
        console.print(f"wrote {out}", markup=False, highlight=False)


# -- tables ----------------------------------------------------------------------------------------
def _sources_table(found: Sequence[SourceSummary]) -> Table:
    table = _table(
        "iteration time by source: predicted over measured, less 1",
        "records", "skipped", "timed", "median abs", "mean abs", "bias",
    )  # fmt: skip
    for one in found:
        cells = _cells(one.time, "median_abs", "mean_abs", "bias")
        table.add_row(one.source, str(one.records), str(one.skipped), *cells)
    return table


def _memory_table(found: Sequence[SourceSummary]) -> Table:
    table = _table(
        "memory, other quantities (a layer's time or bytes) and out-of-memory verdicts",
        "memory", "median abs", "bias", "other", "median abs", "OOM", "precision", "recall",
    )  # fmt: skip
    for one in found:
        failed = one.verdicts.hits + one.verdicts.misses
        if one.memory or one.other or failed or one.verdicts.false_alarms:
            table.add_row(
                one.source,
                *_cells(one.memory, "median_abs", "bias"),
                *_cells(one.other, "median_abs"),
                str(failed),
                _share(one.verdicts.precision),
                _share(one.verdicts.recall),
            )
    return table


def _table(title: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("source")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _groups_table(found: Sequence[SourceSummary]) -> Table:
    table = _table(
        "sweeps: same model, devices and batch",
        "groups", "runs", "mean Spearman", "mean regret", "worst regret",
    )  # fmt: skip
    for one in found:
        if one.groups:
            table.add_row(
                one.source, str(len(one.groups)), str(sum(g.count for g in one.groups)),
                _number(_mean([g.spearman for g in one.groups])),
                _share(_mean([g.regret for g in one.groups])),
                _share(max(g.regret for g in one.groups)),
            )  # fmt: skip
    return table


def _totals(found: Sequence[SourceSummary]) -> list[str]:
    figures = over_sources({s.source: s.time for s in found})
    lines = []
    if figures:
        lines.append(
            f"iteration time over {_counted(sum(s.time is not None for s in found), 'source')}: "
            f"macro-median {figures['macro_median']:.1%}, macro-mean {figures['macro_mean']:.1%}, "
            f"bias {figures['macro_bias']:+.1%}"
        )
    memory = over_sources({s.source: s.memory for s in found})
    if memory:
        lines.append(
            f"memory over {_counted(sum(s.memory is not None for s in found), 'source')}: "
            f"macro-median {memory['macro_median']:.1%}, bias {memory['macro_bias']:+.1%}"
        )
    verdicts = total_verdicts(found)
    if verdicts.hits + verdicts.misses + verdicts.false_alarms:
        lines.append(
            f"out of memory: {verdicts.hits} of {verdicts.hits + verdicts.misses} found, "
            f"{verdicts.false_alarms} false alarms among "
            f"{verdicts.false_alarms + verdicts.agreed_fits} that ran: precision "
            f"{_share(verdicts.precision)}, recall {_share(verdicts.recall)}"
        )
    sweeps = [g for s in found for g in s.groups]
    if sweeps:
        lines.append(
            f"{len(sweeps)} sweeps: mean Spearman {_number(_mean([g.spearman for g in sweeps]))}, "
            f"mean regret {_share(_mean([g.regret for g in sweeps]))}"
        )
    return lines


def total_verdicts(found: Sequence[SourceSummary]) -> Verdicts:
    """Verdicts of all sources together."""
    return Verdicts(
        hits=sum(s.verdicts.hits for s in found),
        false_alarms=sum(s.verdicts.false_alarms for s in found),
        misses=sum(s.verdicts.misses for s in found),
        agreed_fits=sum(s.verdicts.agreed_fits for s in found),
    )


def _assumed_lines(outcomes: Sequence[Outcome]) -> list[str]:
    counts = Counter(name for o in outcomes for name in o.record.assumed)
    return [f"assumed where not stated:{'' if counts else ' nothing'}"] + [
        f"  {name} ({_counted(count, 'record')}): {CONVENTIONS[name]}"
        for name, count in counts.most_common()
    ]


def _skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    counts = Counter((s.source, s.reason) for s in skipped)
    return [f"skipped: {len(skipped)}"] + [
        f"  {count} of {source}: {reason}" for (source, reason), count in counts.most_common()
    ]


def _cells(errors: Errors | None, *names: str) -> list[str]:
    if errors is None:
        return ["-"] * (len(names) + 1)
    values = [getattr(errors, name) for name in names]
    signed = [
        f"{v:+.1%}" if n == "bias" else f"{v:.1%}" for n, v in zip(names, values, strict=True)
    ]
    return [str(errors.count), *signed]


def _mean(values: Sequence[float | None]) -> float | None:
    found = [v for v in values if v is not None]
    return fmean(found) if found else None


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# -- JSON ------------------------------------------------------------------------------------------
def as_json(
    outcomes: Sequence[Outcome], skipped: Sequence[Skipped], found: Sequence[SourceSummary]
) -> dict[str, object]:
    """Everything as plain values; units end the names."""
    return {
        "format": FORMAT_VERSION,
        "conventions": dict(CONVENTIONS),
        "sources": [_source_json(s) for s in found],
        "over_sources": over_sources({s.source: s.time for s in found}),
        "records": [_outcome_json(o) for o in outcomes] + [
            {"name": s.name, "source": s.source, "status": "skipped", "reason": s.reason}
            for s in skipped
        ],
    }  # fmt: skip


def _source_json(summary: SourceSummary) -> dict[str, object]:
    table = asdict(summary)
    table["groups"] = [
        {"count": g.count, "spearman": g.spearman, "regret": g.regret, "key": str(g.key)}
        for g in summary.groups
    ]
    verdicts = summary.verdicts
    table["verdicts"] |= {"precision": verdicts.precision, "recall": verdicts.recall}
    return table


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    record, time, memory = outcome.record, outcome.time, outcome.memory
    table: dict[str, object] = {
        "name": record.name, "source": record.source, "line": record.line,
        "status": record.status, "family": str(record.family), "assumed": list(record.assumed),
        "measured_s": record.measured.iteration_s, "time_error": outcome.time_error,
        "measured_memory_bytes": record.measured.printed_bytes,
        "memory_error": outcome.memory_error,
        "pairs": {name: list(pair) for name, pair in outcome.pairs.items()},
    }  # fmt: skip
    if time is not None:
        table["predicted"] = {
            "total_s": time.total_s, "parts_s": time.parts_s,
            "stage_forward_s": list(time.forward_s), "stage_backward_s": list(time.backward_s),
        }  # fmt: skip
    if memory is not None:
        table["memory"] = {
            "total_bytes": memory.total_bytes, "parts_bytes": memory.parts_bytes,
            "reserve_bytes": memory.reserve_bytes,
            "printed_bytes": printed_bytes(record, memory),
            "usable_bytes": memory.usable_bytes, "fits": memory.fits, "rank": memory.rank,
            "rank_bytes": list(memory.rank_bytes),
        }  # fmt: skip
    return table
