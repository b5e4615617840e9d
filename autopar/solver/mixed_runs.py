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


@dataclass(frozen=True, slots=True)
class _Move:
    """What one step does to a run of which all blocks of its key take the same option.

    Attributes:
        key: Whose blocks become leaner.
        source: The option that all of them have.
        option: The leaner one.
        seconds: More, per block.
        bytes: Fewer that a block saves of a micro-batch.
        meanwhile_bytes: The largest transient while some of them are leaner.
        transient_bytes: The largest one once all of them are.
    """

    key: int
    source: int
    option: int
    seconds: float
    bytes: int
    meanwhile_bytes: int
    transient_bytes: int


@dataclass(frozen=True, slots=True)
class _Run:
    """A run with every block at its fastest, and how it becomes leaner.

    Attributes:
        counts: Blocks by key.
        seconds: Of the run.
        room_bytes: Left for what is saved and made.
        saved_bytes: Of a micro-batch.
        transient_bytes: The largest.
        moves: In the order in which they are made.
    """

    counts: tuple[int, ...]
    seconds: float
    room_bytes: int
    saved_bytes: int
    transient_bytes: int
    moves: tuple[_Move, ...]


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
    _chosen: dict[tuple[int, int, int], tuple[int, ...] | None] = field(default_factory=dict)
    _runs: dict[tuple[int, int], _Run] = field(default_factory=dict)
    _moves: dict[tuple[bool, ...], tuple[int, tuple[_Move, ...]]] = field(default_factory=dict)

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
            found = self._known[known] = self._least_s(low, high, flight)
        return found

    def fits(self, low: int, high: int, flight: int, period_s: float) -> bool:
        """Whether a run takes no longer than that: at its fastest first, which is found at once."""
        if self._time[high] - self._time[low] > period_s:
            return False
        return self.time_s(low, high, flight) <= period_s

    def options(self, low: int, high: int, flight: int) -> tuple[int, ...] | None:
        """The options of a run's blocks for that time; None if it does not fit."""
        known = (low, high, flight)
        if known not in self._chosen:
            self._chosen[known] = self._options(low, high, flight)
        return self._chosen[known]

    def _options(self, low: int, high: int, flight: int) -> tuple[int, ...] | None:
        run = self._run(low, high)
        made = self._made(run, flight)
        if made is None:
            return None
        picks = [
            {first: count} if count else {}
            for first, count in zip(self._first, run.counts, strict=True)
        ]
        for move, moved in made:
            of_key = picks[move.key]
            kept = of_key.pop(move.source) - moved
            of_key.update({move.source: kept} if kept else {})
            of_key[move.option] = moved
        left = [sorted(row.items()) for row in picks]
        chosen = []
        for key in self.keys[low:high]:
            row = left[key]
            option, count = row[-1]
            if count > 1:
                row[-1] = (option, count - 1)
            else:
                row.pop()
            chosen.append(option)
        return tuple(chosen)

    def _run(self, low: int, high: int) -> _Run:
        """A run; what it takes for each number of micro-batches in flight begins with it."""
        found = self._runs.get((low, high))
        if found is None:
            counts = tuple(row[high] - row[low] for row in self._counts)
            transient, moves = self._moves_of(tuple(count > 0 for count in counts))
            found = self._runs[low, high] = _Run(
                counts=counts,
                seconds=self._time[high] - self._time[low],
                room_bytes=self.limit_bytes - (self._state[high] - self._state[low]),
                saved_bytes=self._saved[high] - self._saved[low],
                transient_bytes=transient,
                moves=moves,
            )
        return found

    def _moves_of(self, are_there: tuple[bool, ...]) -> tuple[int, tuple[_Move, ...]]:
        """The largest transient at the fastest, and the moves, of runs of blocks of some keys.

        All blocks of a key move together, but for the last move: after it the run fits.
        """
        if are_there in self._moves:
            return self._moves[are_there]
        at = {key: first for key, first in enumerate(self._first) if are_there[key]}

        def largest() -> int:
            return max((self.menus[k][o].transient_bytes for k, o in at.items()), default=0)

        begin = transient = largest()
        moves = []
        for step in self._steps:
            if at.get(step.key) != step.source:
                continue  # none of its blocks are there, or at what it starts from
            meanwhile = max(transient, self.menus[step.key][step.option].transient_bytes)
            at[step.key] = step.option
            transient = largest()
            moves.append(
                _Move(
                    step.key, step.source, step.option, step.seconds, step.bytes,
                    meanwhile, transient,
                )
            )  # fmt: skip
        self._moves[are_there] = begin, tuple(moves)
        return self._moves[are_there]

    def _least_s(self, low: int, high: int, flight: int) -> float:
        run = self._run(low, high)
        made = self._made(run, flight)
        if made is None:
            return math.inf
        time_s = run.seconds
        for move, count in made:
            time_s += count * move.seconds
        return time_s

    def _made(self, run: _Run, flight: int) -> list[tuple[_Move, int]] | None:
        """The moves that make a run fit, each with its number of blocks; None if none do."""
        made: list[tuple[_Move, int]] = []
        room = run.room_bytes - flight * run.saved_bytes
        if room >= run.transient_bytes:
            return made
        for move in run.moves:
            # making a block leaner may take more room while it is made again
            each = flight * move.bytes
            moved, count = -((room - move.meanwhile_bytes) // each), run.counts[move.key]
            if moved < count:
                made.append((move, moved))
                return made
            made.append((move, count))
            room += count * each
            if room >= move.transient_bytes:
                return made
        return None


def run_prices(problem: MixedProblem) -> tuple[RunPrices, ...]:
    """Run prices of every kind."""
    return tuple(
        RunPrices(kind, problem.classes[kind.device_class].limit_bytes) for kind in problem.kinds
    )
