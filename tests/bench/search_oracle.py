"""The search against every plan of random chains: ``python -m tests.bench.search_oracle``.

Prints how many of the chosen plans are optimal, the largest loss and the gap beside it, in how many
cases the fastest plan does not fit, and whether a bound was above the best plan. Nothing is
asserted; the same cases are asserted by ``tests/oracle/test_solver_master.py``.
"""

from __future__ import annotations

import argparse
import sys
import time

from autopar.plan.types import ScheduleKind
from tests.oracle.search_cases import ROUNDING, judged

OPTIMAL = 1e-6


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="The search against every plan.")
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--blocks", type=int, default=8, help="most blocks of a chain")
    given = parser.parse_args()
    begin_s = time.process_time()
    rows = [
        (seed, judged(seed, given.blocks)) for seed in range(given.first, given.first + given.count)
    ]
    write = sys.stdout.write
    write(f"cases                 {len(rows)}\n")
    write(f"plans of the largest  {max(v.num_plans for _, v in rows)}\n")
    write(f"memory binds          {sum(v.binds for _, v in rows)}\n")
    for kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZERO_BUBBLE, ScheduleKind.ZBV):
        write(f"{'with ' + kind.value:22}{sum(kind in v.schedules for _, v in rows)}\n")
        write(f"{'  is the best':22}{sum(v.best.problem.schedule is kind for _, v in rows)}\n")
    write(f"optimal               {sum(v.loss <= OPTIMAL for _, v in rows)}\n")
    seed, worst = max(rows, key=lambda row: row[1].loss)
    write(f"largest loss          {worst.loss:.2%} with a gap of {worst.gap:.2%} (seed {seed})\n")
    outside = [s for s, v in rows if (1 + v.loss) * (1 - v.gap) > 1 + ROUNDING]
    above = [s for s, v in rows if v.bound_s > v.best.time_s * (1 + ROUNDING)]
    write(f"loss above the gap    {len(outside)} {outside}\n")
    write(f"bound above a plan    {len(above)} {above}\n")
    gaps = sorted(v.gap for _, v in rows)
    write(f"gap                   median {gaps[len(gaps) // 2]:.2%}, largest {gaps[-1]:.2%}\n")
    gaps = sorted(v.model_gap for _, v in rows)
    write(f"model gap             median {gaps[len(gaps) // 2]:.2%}, largest {gaps[-1]:.2%}\n")
    write(f"processor seconds     {time.process_time() - begin_s:.0f}\n")


if __name__ == "__main__":
    main()
