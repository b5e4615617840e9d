"""Runs of operators that repeat along a graph, so that what holds for one holds for all.

A deep model is a few runs of operators over and over. A *piece* is such a run; pieces of one *kind*
have the same operators, in the caller's words, and the same references among themselves. What they
read from elsewhere is numbered by first use. So an answer for one piece that depends on these outer
values alone is the answer for every piece of its kind with the same outer values.

Finding them takes time linear in the number of operators, but for a bounded number of comparisons
of slices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Node

MAX_CANDIDATES = 48  # distances at which a run is compared with what follows it
MAX_PERIOD = 4096  # operators of a run that repeats
MIN_SAVED = 16  # operators in the repeats of a run that is worth while


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of operators.

    Attributes:
        kind: Number of its kind.
        low: Index of its first operator.
        high: Index beyond its last one.
        outer: Values that it reads and does not make, by first use.
        repeats: Whether other pieces are of its kind.
    """

    kind: int
    low: int
    high: int
    outer: tuple[str, ...]
    repeats: bool


def find_pieces(
    nodes: Sequence[Node], word: Callable[[Node], Hashable]
) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """A graph's operators as pieces, in order.

    Args:
        nodes: Operators in execution order.
        word: What tells operators apart, how many references they have included, but not which.

    Returns:
        The pieces, and the number of every operator's word.
    """
    numbers: dict[Hashable, int] = {}
    words = tuple([numbers.setdefault(word(node), len(numbers)) for node in nodes])
    kinds: dict[object, int] = {}
    count: dict[int, int] = {}
    found: list[tuple[int, int, int, tuple[str, ...]]] = []
    for low, high in repeated_runs(words):
        wiring, outer = _wiring(nodes[low:high])
        kind = kinds.setdefault((words[low:high], wiring), len(kinds))
        count[kind] = count.get(kind, 0) + 1
        found.append((kind, low, high, outer))
    pieces = tuple(Piece(k, low, high, outer, count[k] > 1) for k, low, high, outer in found)
    return pieces, words


def repeated_runs(words: Sequence[int]) -> list[tuple[int, int]]:
    """A sequence in runs: each repeat by itself, and what lies between repeats.

    >>> repeated_runs([9, *[1, 2, 3, 4] * 5, 7])
    [(0, 1), (1, 5), (5, 9), (9, 13), (13, 17), (17, 21), (21, 22)]
    """
    if max(words, default=0) > sys.maxunicode:
        return [(0, len(words))]
    text = "".join(map(chr, words))
    again = _next_same(words)
    runs: list[tuple[int, int]] = []
    at = start = 0
    while at < len(text):
        period, end = _period(text, again, at)
        if not period:
            at += 1
            continue
        if start < at:
            runs.append((start, at))
        runs += [(low, low + period) for low in range(at, end, period)]
        at = start = end
    if start < at:
        runs.append((start, at))
    return runs


def _next_same(words: Sequence[int]) -> list[int]:
    """Per place the next one with the same word, or the number of places."""
    after: dict[int, int] = {}
    found = [len(words)] * len(words)
    for at in range(len(words) - 1, -1, -1):
        found[at] = after.get(words[at], len(words))
        after[words[at]] = at
    return found


def _period(text: str, again: Sequence[int], at: int) -> tuple[int, int]:
    """Length of the run at a place whose repeats go furthest, and their end; zeros if none does."""
    best = (0, 0, 0)
    follows = again[at]
    for _ in range(MAX_CANDIDATES):
        period = follows - at
        if follows + period > len(text) or period > MAX_PERIOD:
            break
        unit = text[at:follows]
        end = follows
        while text.startswith(unit, end):
            end += period
        if end - follows >= max(period, MIN_SAVED):
            best = max(best, (end - at, -period, end))
        follows = again[follows]
    return -best[1], best[2]


def _wiring(nodes: Sequence[Node]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """References of a run: places in it, or below zero by first use of what it does not make."""
    place = {node.name: at for at, node in enumerate(nodes)}
    outer: dict[str, int] = {}
    wiring: list[int] = []
    for node in nodes:
        for ref in node.refs():
            at = place.get(ref)
            wiring.append(-1 - outer.setdefault(ref, len(outer)) if at is None else at)
    return tuple(wiring), tuple(outer)
