"""Five pairs of profiles of this machine, one right after the other: do their fits agree?

``python -m tests.bench.profile_repeat [--pairs 5] [--ranks 2] [--budget 15]`` prints for each pair
the median over all fitted parameters of how far the two are apart, then the parameters that differ
most. Target: at most 10 % in the median.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from cost_models.profile import load_profile
from cost_models.profiled import fit_profile
from tests.spawn import run_ranks

TARGET = 0.10
SCRIPT = """
import sys
from pathlib import Path

from autopar.api.profiling import profile_machine

profile_machine(Path(sys.argv[1]), budget_s=float(sys.argv[2]))
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; gives 0 if the target is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of each profile")
    args = parser.parse_args(argv)
    started_s = time.monotonic()
    apart: dict[str, list[float]] = {}
    lines, medians = [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(args.pairs):
            first, second = (
                fitted(Path(folder) / f"{pair}{side}.json", args.ranks, args.budget)
                for side in "ab"
            )
            found = differences(first, second)
            medians.append(median(found.values()))
            lines.append(f"pair {pair + 1}: {len(found)} parameters, median {medians[-1]:.1%}")
            for name, value in found.items():
                apart.setdefault(name, []).append(value)
    worst = sorted(apart, key=lambda name: -median(apart[name]))[:8]
    lines += [f"  {median(apart[name]):>7.1%} {name}" for name in worst]
    every = [value for values in apart.values() for value in values]
    load = ", ".join(f"{v:.1f}" for v in os.getloadavg())
    lines.append(f"{time.monotonic() - started_s:.0f} s; load average {load}")
    lines.append(f"median over all pairs and parameters: {median(every):.1%} (target {TARGET:.0%})")
    sys.stdout.write("\n".join([*lines, ""]))
    return 0 if median(every) <= TARGET else 1


def fitted(path: Path, ranks: int, budget_s: float) -> Mapping[str, float]:
    """What is fitted to a new profile."""
    for end in run_ranks(ranks, SCRIPT, timeout_s=300, args=(str(path), str(budget_s))):
        if end.code != 0:
            sys.exit(f"a rank ended with {end.code}:\n{end.errors[-3000:]}")
    return fit_profile(load_profile(path)).parameters()


def differences(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """How far two values are apart, over the smaller one; what is 0 in both is left out."""
    found = {}
    for name in first.keys() & second.keys():
        low, high = sorted((first[name], second[name]))
        if high > 0:
            found[name] = (high - low) / max(low, 1e-3 * high)
    return found


if __name__ == "__main__":
    sys.exit(main())
