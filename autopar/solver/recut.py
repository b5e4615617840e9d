"""Cuts and options of ranks that have several stages each, improved by moving blocks.

What such ranks wait for each other depends on all cuts at once, and their stages share the memory
of the rank; no surrogate tells that well. Here every choice is run: the longest path of the step
(:mod:`autopar.solver.step_paths`) is what the event simulator would say.

1. For given cuts a rank's blocks begin with their fastest options. While a moment of the step holds
   too much, the exchange with the fewest seconds per byte *of that moment* is taken: stages with
   more micro-batches in flight are made leaner first.
2. A move takes one block from a stage to another; the stages between them shift. Moves off the
   longest path's dearest stages are tried first, and one that makes the step shorter is kept, until
   none does or the trials are used up.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import mul

from autopar.plan.schedule import Alive
from autopar.solver.chain_sums import ChainSums, ExchangeStep, sums_of
from autopar.solver.schedule_choice import sampled_counts
from autopar.solver.stages_problem import (
    StageProblem,
    StageSolution,
    bounds,
    memory_bytes,
    surrogate_s,
)
from autopar.solver.step_paths import StepPaths, Term, joint_paths_of

MAX_TRIALS = 300  # work limit: choices that are run
MAX_THINGS = 1_500_000  # work limit: computes of all choices that are run
MAX_MOVES = 40  # of one choice
MOST_STARTS = 3  # cuts that blocks are moved from
GAIN = 1e-6  # of a step, that a move must save

Starts = tuple[int, ...]
_Picks = list[list[list[int]]]
"""By stage, by kind, by option: blocks."""
_Holds = list[list[list[list[int]]]]
"""By moment, by stage, by kind, by option: bytes."""
_Exchange = tuple[int, ExchangeStep, int]
"""Stage among those of the rank, step, bytes that a block gives back."""


@dataclass(frozen=True, slots=True)
class _Choice:
    starts: Starts
    picks: _Picks
    time_s: float


@dataclass(slots=True)
class Recut:
    """A search among the cuts of one problem.

    Args:
        problem: The chain; several stages per rank, or one.
        max_trials: Choices that are run, at most.
    """

    problem: StageProblem
    max_trials: int = MAX_TRIALS
    _sums: ChainSums = field(init=False)
    _kind: list[int] = field(init=False)
    _menus: list[int] = field(init=False)
    _steps: list[ExchangeStep] = field(init=False)
    _first: list[int] = field(init=False)
    _counts: list[list[int]] = field(init=False)
    _held: dict[int, _Holds] = field(default_factory=dict)
    _bytes: dict[tuple[Alive, bool], list[list[int]]] = field(default_factory=dict)
    _transients: list[tuple[int, int, int]] = field(init=False)
    _times: list[list[list[float]]] = field(init=False)
    _sampled: Sequence[tuple[int, float]] = field(init=False)  # steps that are run, with weights
    _made: StepPaths | None = None
    _known: dict[object, _Picks | None] = field(default_factory=dict)
    _begun: dict[int, list[list[int]]] = field(default_factory=dict)
    _of_rows: dict[int, tuple[list[list[int]], tuple[float, float, float]]] = field(
        default_factory=dict
    )
    _exchanged: dict[tuple[int, int], list[_Exchange]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        self._sampled = sampled_counts(problem)
        sums = self._sums = sums_of(problem.blocks)
        self._kind, self._counts = sums.kind, sums.counts
        self._menus = sums.first  # a block of each kind
        self._first, self._steps = sums.start, sums.steps
        menus = [problem.blocks[i].options for i in self._menus]
        self._transients = [
            (o.transient_bytes, kind, option)
            for kind, menu in enumerate(menus)
            for option, o in enumerate(menu)
        ]
        self._transients.sort(reverse=True)
        self._times = [  # forward, backward, what of that makes gradients of weights
            [[o.forward_s for o in menu] for menu in menus],
            [[o.backward_s for o in menu] for menu in menus],
            [[o.weight_s for o in menu] for menu in menus],
        ]

    @property
    def _graph(self) -> StepPaths:
        """The steps that are run as one graph; made when a choice is found to fit."""
        if self._made is None:
            problem = self.problem
            each = any(b.num_reduces > 1 for b in problem.blocks)
            counts = tuple(n for n, _ in self._sampled)
            self._made = joint_paths_of(problem.schedule, problem.mesh, counts, reduces_each=each)
        return self._made

    def improved(self, *starts: Starts) -> StageSolution | None:
        """The best choice found from the best of some cuts on; None if none of them fits."""
        begun = [choice for choice in map(self._choice, starts) if choice is not None]
        begun = nsmallest(MOST_STARTS, begun, key=lambda c: c.time_s)
        found = min(map(self._improved, begun), key=lambda c: c.time_s, default=None)
        return None if found is None else self._solution(found.starts, found.picks)

    def fitted(self, starts: Starts) -> StageSolution | None:
        """Given cuts with the options that make them fit; None if they can't. Nothing is run."""
        picks = self._picks(starts)
        return None if picks is None else self._solution(starts, picks)

    def _improved(self, best: _Choice) -> _Choice:
        trials, moved = 1, self.problem.fixed_starts is None
        count = sum(n for n, _ in self._sampled)
        most = min(self.max_trials, MAX_THINGS // (2 * self.problem.num_stages * count))
        while moved:
            moved = False
            for tried in self._moves(best):
                if trials >= most:
                    break
                trials += 1
                found = self._choice(tried)
                if found is not None and found.time_s < best.time_s * (1 - GAIN):
                    best, moved = found, True
                    break
        return best

    def _solution(self, starts: Starts, picks: _Picks) -> StageSolution:
        problem = self.problem
        options = [0] * len(problem.blocks)
        for stage, (low, high) in enumerate(bounds(starts, len(options))):
            left = [
                [o for o in reversed(range(len(row))) for _ in range(row[o])]
                for row in picks[stage]
            ]
            for i in range(low, high):
                options[i] = left[self._kind[i]].pop(0)
        chosen = tuple(options)
        return StageSolution(
            starts=starts,
            options=chosen,
            objective_s=surrogate_s(problem, starts, chosen),
            bound_s=0.0,
            memory_bytes=memory_bytes(problem, starts, chosen),
            is_optimal=False,
        )

    # -- moves ---------------------------------------------------------------------------------
    def _moves(self, choice: _Choice) -> Iterator[Starts]:
        """Cuts with one block moved from one stage to another, most promising first."""
        dear = self._dearness(choice)
        runs = bounds(choice.starts, len(self.problem.blocks))
        most = self.problem.most_blocks
        # the dearest sources and the cheapest targets have all of the most promising pairs
        sources = [s for s, (low, high) in enumerate(runs) if high - low > 1]
        targets = [s for s, (low, high) in enumerate(runs) if high - low < most]
        sources = nsmallest(MAX_MOVES + 1, sources, key=lambda s: -dear[s])
        targets = nsmallest(MAX_MOVES + 1, targets, key=lambda s: dear[s])
        pairs = (
            (dear[target] - dear[source], abs(target - source), source, target)
            for source in sources
            for target in targets
            if source != target
        )
        for _, _, source, target in nsmallest(MAX_MOVES, pairs):
            starts = list(choice.starts)
            if source < target:
                starts[source:target] = [s - 1 for s in starts[source:target]]
            else:
                starts[target:source] = [s + 1 for s in starts[target:source]]
            yield tuple(starts)

    def _dearness(self, choice: _Choice) -> list[float]:
        """How much of a micro-batch's time in each stage is on the longest paths."""
        dear = [0.0] * self.problem.num_stages
        seconds = self._seconds(choice.starts, choice.picks)
        paths = self._graph.dearest(seconds)
        for (_, weight), path in zip(self._sampled, paths, strict=True):
            for (term, stage), count in path.items():
                if term is not Term.MESSAGE:
                    dear[stage] += weight * count * (2.0 if term is Term.BACKWARD else 1.0)
        return dear

    # -- one choice ----------------------------------------------------------------------------
    def _choice(self, starts: Starts) -> _Choice | None:
        """Given cuts with the options that make them fit, run; None if they can't."""
        picks = self._picks(starts)
        if picks is None:
            return None
        runs = bounds(starts, len(self.problem.blocks))
        seconds = self._seconds(starts, picks)
        ends_s = self._graph.ends_s(seconds)
        time_s = sum(weight * s for (_, weight), s in zip(self._sampled, ends_s, strict=True))
        update = [self._sums.update[high] - self._sums.update[low] for low, high in runs]
        ranks = (self.problem.stages_of(d) for d in range(self.problem.pp))
        return _Choice(starts, picks, time_s + max(sum(update[s] for s in row) for row in ranks))

    def _picks(self, starts: Starts) -> _Picks | None:
        """Options of all stages that fit; None if there are none."""
        picks: _Picks = [[] for _ in range(self.problem.num_stages)]
        runs = bounds(starts, len(self.problem.blocks))
        for device in range(self.problem.pp):
            stages = self.problem.stages_of(device)
            own = [runs[s] for s in stages]
            # blocks of a kind are alike: it is how many of each there are that counts
            counts = tuple(row[high] - row[low] for low, high in own for row in self._counts)
            key = device, counts
            if key not in self._known:
                self._known[key] = self._fitted(device, own, counts)
            fitted = self._known[key]
            if fitted is None:
                return None
            for s, row in zip(stages, fitted, strict=True):
                picks[s] = row
        return picks

    def _fitted(
        self, device: int, runs: Sequence[tuple[int, int]], counts: Sequence[int]
    ) -> _Picks | None:
        """Options of a rank's stages that fit into its memory.

        Args:
            device: The rank.
            runs: Blocks of each of its stages.
            counts: How many blocks of each kind these are, stage after stage.
        """
        problem = self.problem
        picks: _Picks = []
        state = sum(self._sums.state[high] - self._sums.state[low] for low, high in runs)
        for low, high in runs:
            row = [[0] * len(problem.blocks[i].options) for i in self._menus]
            for k, at in enumerate(self._first):
                row[k][at] = self._counts[k][high] - self._counts[k][low]
            picks.append(row)
        room = problem.limit_bytes - problem.base_bytes - state
        holds = self._holds(device)
        held = [sum(map(mul, counts, sizes)) for sizes in self._fastest(device)]
        taken = [[sum(row) for row in zip(*rows, strict=True)] for rows in zip(*picks, strict=True)]
        while True:
            most, worst = max((size, at) for at, size in enumerate(held))
            excess = most + self._transient_bytes(taken) - room
            if excess <= 0:
                return picks
            possible = (
                row for row in self._exchanges(device, worst)
                if picks[row[0]][row[1].kind][row[1].source]
            )  # fmt: skip
            found = next(possible, None)
            if found is None:
                return None
            at, step, less = found
            blocks = picks[at][step.kind]
            moved = min(blocks[step.source], -(-excess // less))
            for amounts in (blocks, taken[step.kind]):
                amounts[step.source] -= moved
                amounts[step.option] += moved
            for moment, table in enumerate(holds):
                sizes = table[at][step.kind]
                held[moment] += moved * (sizes[step.option] - sizes[step.source])

    def _holds(self, device: int) -> _Holds:
        """What each option holds at each moment of a rank, by stage and kind."""
        if device not in self._held:
            stages, nothing = self.problem.stages_of(device), Alive(0, 0)
            self._held[device] = [
                [self._amounts(moment.get(s, nothing), s) for s in stages]
                for moment in self.problem.moments(device)
            ]
        return self._held[device]

    def _amounts(self, alive: Alive, stage: int) -> list[list[int]]:
        """Bytes of each kind's options with so many micro-batches alive; stages share them."""
        key = (alive, stage == 0)
        if key not in self._bytes:
            blocks = self.problem.blocks
            self._bytes[key] = [
                [o.alive_bytes(alive, stage) for o in blocks[i].options] for i in self._menus
            ]
        return self._bytes[key]

    def _fastest(self, device: int) -> list[list[int]]:
        """What the fastest option of each kind holds at each moment, stage after stage."""
        if device not in self._begun:
            self._begun[device] = [
                [
                    sizes[at]
                    for amounts in table
                    for sizes, at in zip(amounts, self._first, strict=True)
                ]
                for table in self._holds(device)
            ]
        return self._begun[device]

    def _transient_bytes(self, taken: Sequence[Sequence[int]]) -> int:
        """The largest transient of options that are taken.

        Args:
            taken: Per kind and option, how many blocks.
        """
        return next(size for size, kind, option in self._transients if taken[kind][option])

    def _exchanges(self, device: int, moment: int) -> list[_Exchange]:
        """Exchanges that free bytes at a moment of a rank, fewest seconds per byte first."""
        if (device, moment) not in self._exchanged:
            table = self._holds(device)[moment]
            found: list[tuple[float, _Exchange]] = []
            for at, amounts in enumerate(table):
                for step in self._steps:
                    less = amounts[step.kind][step.source] - amounts[step.kind][step.option]
                    if less > 0:
                        found.append((step.seconds / less, (at, step, less)))
            found.sort(key=lambda row: row[0])  # equal ones stay in order
            self._exchanged[device, moment] = [row for _, row in found]
        return self._exchanged[device, moment]

    def _stage_s(self, rows: list[list[int]]) -> tuple[float, float, float]:
        """Forward, backward and what of that makes gradients of weights, of a stage's options.

        Choices share the options of ranks that they have in common.
        """
        known = self._of_rows.get(id(rows))
        if known is None or known[0] is not rows:
            forward_s, backward_s, weight_s = (
                sum(
                    count * time_s
                    for row, times in zip(rows, table, strict=True)
                    for count, time_s in zip(row, times, strict=True)
                    if count
                )
                for table in self._times
            )
            known = self._of_rows[id(rows)] = rows, (forward_s, backward_s, weight_s)
        return known[1]

    def _seconds(self, starts: Starts, picks: _Picks) -> list[list[float]]:
        """Seconds by term and stage."""
        problem = self.problem
        forward, backward, weights = map(list, zip(*map(self._stage_s, picks), strict=True))
        weights[0] = backward[0]  # nothing waits for the first stage's backward
        weights = [min(w, b) for w, b in zip(weights, backward, strict=True)]
        inputs = [b - w for b, w in zip(backward, weights, strict=True)]
        runs = bounds(starts, len(problem.blocks))
        gather, reduce = (
            [row[high] - row[low] for low, high in runs]
            for row in (self._sums.gather, self._sums.reduce)
        )
        each = [sum(problem.blocks[i].each_s for i in range(*run)) for run in runs]
        reduce = [0.0 if e else r for r, e in zip(reduce, each, strict=True)]
        message = [0.0, *(problem.boundary_s[s - 1] for s in starts)]
        return [forward, backward, inputs, weights, gather, reduce, message, each]


def even_starts(problem: StageProblem) -> Starts:
    """Cuts into stages of about equally many blocks, at least one each."""
    n, stages = len(problem.blocks), problem.num_stages
    return tuple(s * n // stages for s in range(1, stages))
