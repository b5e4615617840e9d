"""Many facts in one launch: every rank runs all of them and says which hold."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.spawn import run_ranks

MARK = "FACT "


class Facts:
    """Functions in order, collected by decorating them."""

    def __init__(self) -> None:
        self.functions: dict[str, Callable[..., None]] = {}

    def __call__(self, function: Callable[..., None]) -> Callable[..., None]:
        self.functions[function.__name__] = function
        return function

    def chosen(self, names: Iterable[str]) -> list[Callable[..., None]]:
        """Those of these names; all if there is none."""
        wanted = set(names) or self.functions.keys()
        return [function for name, function in self.functions.items() if name in wanted]


def tell(facts: Iterable[Callable[..., None]], *args: object) -> None:
    """Run the facts in order on this rank, each with ``args``; one line of output for each.

    A fact that fails on one rank alone may leave the others waiting; they end by the watch over
    the ranks, and the facts that follow are missing from the output.
    """
    for fact in facts:
        try:
            fact(*args)
            failure = ""
        except (Exception, pytest.fail.Exception):
            failure = traceback.format_exc()
            sys.stderr.write(f"{fact.__name__} fails:\n{failure}\n")  # the others may wait for ever
        sys.stdout.write(f"{MARK}{json.dumps([fact.__name__, failure])}\n")
        sys.stdout.flush()


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
