"""Predicted against measured step time and peak live bytes, on 1, 2 and 4 gloo processes.

``python -m tests.bench.this_machine [--ranks 1,2,4] [--seconds 3] [--budget 25] [--out FILE]``:
the profiler measures this machine with as many processes as the plans run on, then every plan is
priced, run and timed. Targets: median error of step time at most 15 %, of peak bytes at most 5 %,
regret of the plan that is predicted to be fastest at most 5 %.

Profile and plans run at real-time priority where the system allows it: otherwise what else runs
on the machine interrupts one of them and not the other, and ranks wait for whoever was interrupted.
``--plain`` leaves the priority as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from tests.spawn import run_ranks

TIME_TARGET, BYTES_TARGET, REGRET_TARGET = 0.15, 0.05, 0.05
Row = dict[str, object]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; gives 0 if the targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the steps of each plan")
    parser.add_argument("--budget", type=float, default=25.0, help="seconds of each profile")
    parser.add_argument("--profile", type=Path, help="go on with this profile")
    parser.add_argument("--out", type=Path, help="rows as JSON")
    parser.add_argument("--plain", action="store_true", help="leave the priority as it is")
    args = parser.parse_args(argv)
    priority = "priority as given" if args.plain else raised_priority()
    started_s = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile or Path(folder) / "profile.json"
        for ranks in map(int, args.ranks.split(",")):
            result = Path(folder) / f"rows{ranks}.json"
            run_all(ranks, profile, result, args)
            rows += json.loads(result.read_text())
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    load = ", ".join(f"{v:.1f}" for v in os.getloadavg())
    figures = summary(rows)
    lines = [table(rows), f"{time.monotonic() - started_s:.0f} s; {priority}; load average {load}"]
    sys.stdout.write("\n".join([*lines, *lines_of(figures), ""]))
    return 0 if all(found <= target for _, found, target in figures) else 1


def raised_priority() -> str:
    """Have this process and its children run before others; says whether that is allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, PermissionError):
        return "priority as given: the system allows no other"
    return "real-time priority"


def run_all(ranks: int, profile: Path, result: Path, args: argparse.Namespace) -> None:
    """Profile and measure on so many processes."""
    script = Path(__file__).with_name("steps.py")
    arguments = (str(profile), str(result), str(args.budget), str(args.seconds))
    for end in run_ranks(ranks, script, timeout_s=900, args=arguments):
        if end.code != 0:
            sys.exit(f"a rank of {ranks} ended with {end.code}:\n{end.errors[-3000:]}")


def summary(rows: Iterable[Row]) -> list[tuple[str, float, float]]:
    """Figures with their targets."""
    rows = list(rows)
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["ranks"]), []).append(row)
    regrets = [regret(group) for group in groups.values() if len(group) > 1]
    time_name = f"median error of step time over {len(rows)} plans"
    return [
        (time_name, median(map(time_error, rows)), TIME_TARGET),
        ("median error of peak live bytes", median(map(bytes_error, rows)), BYTES_TARGET),
        (f"mean regret over {len(regrets)} groups", sum(regrets) / len(regrets), REGRET_TARGET),
    ]


def lines_of(figures: Iterable[tuple[str, float, float]]) -> list[str]:
    return [f"{name}: {found:.1%} (target {target:.0%})" for name, found, target in figures]


def time_error(row: Row) -> float:
    return abs(float(row["predicted_s"]) / float(row["measured_s"]) - 1)


def bytes_error(row: Row) -> float:
    return abs(float(row["predicted_bytes"]) / float(row["measured_bytes"]) - 1)


def regret(group: Sequence[Row]) -> float:
    """How much slower the plan is that is predicted to be the fastest than the fastest."""
    chosen = min(group, key=lambda r: float(r["predicted_s"]))
    return float(chosen["measured_s"]) / min(float(r["measured_s"]) for r in group) - 1


def table(rows: Iterable[Row]) -> str:
    """One line for each plan."""
    lines = [
        f"{'model':14} {'ranks':>5} {'plan':32} {'predicted':>10} {'measured':>10} {'error':>7} "
        f"{'predicted':>10} {'measured':>10} {'error':>7}"
    ]
    lines += [
        f"{r['model']:14} {r['ranks']:>5} {r['plan']:32} "
        f"{float(r['predicted_s']) * 1e3:>7.1f} ms {float(r['measured_s']) * 1e3:>7.1f} ms "
        f"{float(r['predicted_s']) / float(r['measured_s']) - 1:>+7.1%} "
        f"{float(r['predicted_bytes']) / 2**20:>6.1f} MiB "
        f"{float(r['measured_bytes']) / 2**20:>6.1f} MiB "
        f"{float(r['predicted_bytes']) / float(r['measured_bytes']) - 1:>+7.1%}"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
