"""Many facts in one launch: every rank runs all of them and says which hold."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.spawn import run_ranks

MARK = "FACT "


def tell(facts: Sequence[Callable[[], None]]) -> None:
    """Run the facts in order on this rank; one line of output for each.

    A fact that fails on one rank alone may leave the others waiting; they end by the watch over
    the ranks, and the facts that follow are missing from the output.
    """
    for fact in facts:
        try:
            fact()
            failure = ""
        except Exception:
            failure = traceback.format_exc()
        sys.stdout.write(f"{MARK}{json.dumps([fact.__name__, failure])}\n")


def launch(
    world_size: int, script: Path, *, args: tuple[str, ...] = (), timeout_s: float = 120.0
) -> dict[str, str]:
    """What went wrong with each fact on any rank, by name; "" where it holds on all."""
    results = run_ranks(world_size, script, args=args, timeout_s=timeout_s)
    told: list[dict[str, str]] = []
    for result in results:
        lines = [line for line in result.output.splitlines() if line.startswith(MARK)]
        told.append(dict(json.loads(line.removeprefix(MARK)) for line in lines))
    failures: dict[str, str] = {"ranks end well": ""}
    for rank, (result, facts) in enumerate(zip(results, told, strict=True)):
        if result.code != 0:
            failures["ranks end well"] += f"rank {rank} ended with {result.code}:\n{result.errors}"
        for name in {name for other in told for name in other}:
            failure = facts.get(name, "not reached")
            failures[name] = failures.get(name, "") + (f"rank {rank}: {failure}" if failure else "")
    return failures


def check(failures: dict[str, str], name: str) -> None:
    """Fail unless the fact was told by all ranks and holds."""
    assert name in failures, f"{name} was not reached: {failures['ranks end well'][-3000:]}"
    assert not failures[name], failures[name]
