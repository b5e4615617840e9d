"""The least time of a run of blocks on a kind of stage, under its memory.

A run starts with every block at its fastest. While it is too large, blocks are made leaner in the
order of seconds per byte (the greedy solution of the linear multiple-choice knapsack), as many of a
kind as the missing bytes ask for. Blocks of one key are interchangeable, so counts suffice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.solver.mixed_problem import MixedProblem, StageKind
from autopar.solver.stages_problem import Option


@dataclass(frozen=True, slots=True)
class _Leaner:
    """A step from an option of one key to a leaner one."""

    key: int
    source: int
    option: int
    seconds: float
    bytes: int


@dataclass(slots=True)
class RunPrices:
    """Times of runs on one kind.

    Attributes:
        kind: The kind.
        limit_bytes: Memory of a device of its class.
    """

    kind: StageKind
    limit_bytes: int
    keys: list[int] = field(init=False)
    menus: list[tuple[Option, ...]] = field(init=False)
    _first: list[int] = field(init=False)
    _steps: list[_Leaner] = field(init=False)
    _state: list[int] = field(init=False)
    _time: list[float] = field(init=False)
    _saved: list[int] = field(init=False)
    _counts: list[list[int]] = field(init=False)
    _known: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers: dict[str, int] = {}
        blocks = self.kind.blocks
        self.keys = [numbers.setdefault(b.key, len(numbers)) for b in blocks]
        self.menus = [next(b.options for b in blocks if b.key == key) for key in numbers]
        self._first = [
            min(range(len(m)), key=lambda o, m=m: (m[o].total_s, m[o].saved_bytes))  # type: ignore[misc]
            for m in self.menus
        ]
        self._steps = [
            step for at, menu in enumerate(self.menus) for step in self._leaner(at, menu)
        ]
        self._steps.sort(key=lambda s: (s.seconds / s.bytes, s.key, s.option))
        self._state, self._time, self._saved = [0], [0.0], [0]
        self._counts = [[0] * (len(blocks) + 1) for _ in self.menus]
        for i, (block, key) in enumerate(zip(blocks, self.keys, strict=True)):
            fastest = self.menus[key][self._first[key]]
            self._state.append(self._state[-1] + block.state_bytes)
            self._time.append(self._time[-1] + fastest.total_s)
            self._saved.append(self._saved[-1] + fastest.saved_bytes)
            for k, row in enumerate(self._counts):
                row[i + 1] = row[i] + (k == key)

    def _leaner(self, key: int, menu: tuple[Option, ...]) -> list[_Leaner]:
        """The lower hull of a menu over bytes, from its fastest option on."""
        found: list[_Leaner] = []
        at = self._first[key]
        while True:
            ratios = [
                ((o.total_s - menu[at].total_s) / (menu[at].saved_bytes - o.saved_bytes), i)
                for i, o in enumerate(menu)
                if o.saved_bytes < menu[at].saved_bytes
            ]
            if not ratios:
                return found
            to = min(ratios)[1]
            found.append(
                _Leaner(
                    key, at, to,
                    menu[to].total_s - menu[at].total_s,
                    menu[at].saved_bytes - menu[to].saved_bytes,
                )
            )  # fmt: skip
            at = to

    def time_s(self, low: int, high: int, flight: int) -> float:
        """Least seconds of forward and backward of a run; infinite if it does not fit."""
        known = (low, high, flight)
        found = self._known.get(known)
        if found is None:
            found = self._known[known] = self._made(low, high, flight)[0]
        return found

    def options(self, low: int, high: int, flight: int) -> tuple[int, ...] | None:
        """The options of a run's blocks for that time; None if it does not fit."""
        time_s, picks = self._made(low, high, flight)
        if math.isinf(time_s):
            return None
        left = [dict(row) for row in picks]
        chosen = []
        for key in self.keys[low:high]:
            option = max(o for o, count in left[key].items() if count > 0)
            left[key][option] -= 1
            chosen.append(option)
        return tuple(chosen)

    def _made(self, low: int, high: int, flight: int) -> tuple[float, list[dict[int, int]]]:
        counts = [row[high] - row[low] for row in self._counts]
        time_s = self._time[high] - self._time[low]
        room = self.limit_bytes - (self._state[high] - self._state[low])
        room -= flight * (self._saved[high] - self._saved[low])
        picks = [{first: count} for first, count in zip(self._first, counts, strict=True)]
        transient = self._transient(picks)
        for step in self._steps:
            if room >= transient:
                break
            if not counts[step.key]:
                continue
            row = picks[step.key]
            left = row.get(step.source, 0)
            # making a block leaner may take more room while it is made again
            wanted = max(transient, self.menus[step.key][step.option].transient_bytes) - room
            moved = min(left, -(-wanted // (flight * step.bytes)))
            row[step.source] = left - moved
            row[step.option] = row.get(step.option, 0) + moved
            time_s += moved * step.seconds
            room += moved * flight * step.bytes
            transient = self._transient(picks)
        return (time_s if room >= transient else math.inf), picks

    def _transient(self, picks: list[dict[int, int]]) -> int:
        return max(
            (
                self.menus[key][option].transient_bytes
                for key, row in enumerate(picks)
                for option, count in row.items()
                if count
            ),
            default=0,
        )


def run_prices(problem: MixedProblem) -> tuple[RunPrices, ...]:
    """Run prices of every kind."""
    return tuple(
        RunPrices(kind, problem.classes[kind.device_class].limit_bytes) for kind in problem.kinds
    )
