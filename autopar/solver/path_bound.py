"""A lower bound of a step in a given order, over all cuts and all recomputing.

The order of a step is fixed, so its time is the longest of its paths
(:mod:`autopar.solver.step_paths`), and every path is linear in the seconds of the stages. With
blocks that may be dealt to stages in parts the least step is a linear program::

    minimise T + U   with  T >= sum over a path of its terms' seconds       for paths, (1)
                           f_s, b_s, w_s: sums over n[s, k, o] of options   seconds of a stage
                           sum over s, o of n[s, k, o] = blocks of kind k   (2)
                           sum over a of m[s, k, a] = sum over o of n[s, k, o]   (2a)
                           1 <= sum over k, o of n[s, k, o] <= most         (3)
                           lower_k(pos_s) <= blocks of kind k before s <= upper_k(pos_s)   (4)
                           states + in_flight * saved + transient <= limit  for every rank, (5)
                           U >= seconds of the optimizer                    for every rank

``n[s, k, o]`` is how many blocks of kind k stage s runs with option o; ``m[s, k, a]`` how many of
them have their states in form a, where forms are to be chosen (a stage has one form; here blocks of
it may have several); ``pos_s`` how many blocks come before stage s; (4) are the lower and upper
hull of how many of the first blocks are of a kind: a cut takes neighbours. Paths are added where
they are exceeded: the program's stages are run, and the longest path to the end of every rank
becomes a row, until none is exceeded or the bound says enough. Each value of the program on the way
is a bound.

It knows what the mean of the ranks does not: how long ranks wait for each other in just this order
if their stages are as even as stages can be.

Source: the rows are generated as in Kelley, "The cutting-plane method", 1960, at points between the
best one and the program's answer as in Ben-Ameur and Neto, "Acceleration of cutting-plane and
column generation algorithms", 2007; mixtures of paths are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.plan.types import ScheduleKind
from autopar.solver.path_program import PathProgram
from autopar.solver.pipeline_bound import NO_FLOOR, Floor
from autopar.solver.stages_problem import StageProblem
from autopar.solver.step_paths import Path, Term, paths_of

MAX_ROUNDS = 48
MAX_WORK = 1 << 17
MOST_PATHS = 1  # longest paths that become rows at once, beside their mixture
STRIDE = 0.1  # of the way to an answer
HEAT = 0.025  # of a mean stage's seconds, of mixtures of paths
TOLERANCE = 1e-6  # of the solver: taken off, so that rounding never lifts the bound
SPLITTING = (ScheduleKind.ZERO_BUBBLE, ScheduleKind.ZBV)  # backwards are run in halves

CUTS_EVERY = 8  # rounds after which the best stages are told

Starts: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class PathBound:
    """Lower bounds of one chain in one order.

    Args:
        problem: The chain; its menus may be relaxed ones, that are no real choice.
        warmup: Warm-up depths of the order, where they are not those of its kind.
        floor: What is known beyond the menus.
        knows_halves: Whether the menus tell how a backward divides into its halves; else they
            tell the most that its gradients of weights may take.
        max_work: Work limit: computes and messages of the step, times rounds of adding paths.
        max_rounds: Most of them.
    """

    problem: StageProblem
    warmup: tuple[int, ...] | None = None
    floor: Floor = NO_FLOOR
    knows_halves: bool = True
    max_work: int = MAX_WORK
    max_rounds: int = MAX_ROUNDS

    def least_s(self, enough_s: float = math.inf) -> float:
        """Seconds of a step, at least; infinite if no cut fits.

        Args:
            enough_s: A bound from here on need not be sharper.
        """
        found = 0.0
        for bound_s in self.bounds_s():
            found = max(found, bound_s)
            if found >= enough_s:
                break
        return found

    def bounds_s(self) -> Iterator[float]:
        """Round by round seconds of a step, at least; a later one may be less."""
        return (bound_s for bound_s, _ in self._rounds())

    @property
    def round_work(self) -> int:
        """Work of a round: computes and messages of the step."""
        return 4 * self.problem.num_stages * self.problem.num_microbatches

    def likely_cuts(self) -> tuple[Starts, ...]:
        """Cuts near the best stages that were run on the way to the bound; maybe none.

        They know what ranks wait for each other in the whole step, and what they have memory for;
        blocks are dealt in parts there, and rounded here.
        """
        at: Sequence[float] = ()
        found: dict[Starts, None] = {}
        for number, (_, at) in enumerate(self._rounds(is_quick=False), 1):
            if at and number % CUTS_EVERY == 0:
                found[self._rounded(at)] = None
        if at:
            found[self._rounded(at)] = None
        return tuple(found)

    def _rounded(self, before: Sequence[float]) -> Starts:
        """Whole numbers of blocks before stages 1, 2, ..., so that every stage has one at least."""
        starts: list[int] = []
        n, stages = len(self.problem.blocks), self.problem.num_stages
        for stage, at in enumerate(before, 1):
            least = starts[-1] + 1 if starts else 1
            starts.append(max(least, min(round(at), n - (stages - stage))))
        return tuple(starts)

    def _rounds(self, *, is_quick: bool = True) -> Iterator[tuple[float, Sequence[float]]]:
        """Round by round a bound, and the blocks before each stage but the first in the best run.

        The latter is empty while nothing was run.

        Args:
            is_quick: As of :class:`~autopar.solver.path_program.PathProgram`.
        """
        problem = self.problem
        if len(problem.blocks) < problem.num_stages:
            yield math.inf, ()
            return
        program = PathProgram(problem, self.floor, self.knows_halves, is_quick)
        for path in self._busy():
            program.add(path)
        value_s = program.solve()
        yield (value_s or 0.0) * (1 - TOLERANCE), ()
        rounds = min(self.max_work // self.round_work, self.max_rounds)
        if value_s is None or math.isinf(value_s) or rounds == 0:
            return  # so long a step is bounded by each rank's own work
        paths = paths_of(
            problem.schedule, problem.mesh, problem.num_microbatches, self.warmup,
            reduces_each=self._reduces_each,
        )  # fmt: skip
        center = program.even_seconds()
        heat_s = HEAT * max(center[Term.FORWARD][0], center[Term.BACKWARD][0])
        center_s, longest = paths.longest(center, most=MOST_PATHS)
        for path in (*longest, paths.mixture(center, heat_s)):
            program.add(path)
        n, stages = len(problem.blocks), problem.num_stages
        before = [n * s / stages for s in range(1, stages)]
        for _ in range(rounds):
            value_s = program.solve()
            if value_s is None:
                break
            yield value_s * (1 - TOLERANCE), before
            answer = program.seconds()
            tried = _between(center, answer)
            tried_s, longest = paths.longest(tried, most=MOST_PATHS)
            if tried_s < center_s:
                center, center_s = tried, tried_s
                before = _between([before], [program.before()])[0]
            if program.add_exceeded((*longest, paths.mixture(tried, heat_s))):
                continue
            if not program.add_exceeded(paths.longest(answer)[1]):
                break

    @property
    def _reduces_each(self) -> bool:
        return any(menus[0].num_reduces > 1 for menus in self.problem.menus)

    def _busy(self) -> Iterator[Path]:
        """For every rank what it does itself, in any order, with what must come before and after.

        Its first compute is a forward of its first stage, which needs those of all stages before.
        Where backwards are whole its last one is a backward of that stage, which they all follow.
        """
        problem, count = self.problem, self.problem.num_microbatches
        trains = problem.schedule is not ScheduleKind.FORWARD
        is_whole = trains and problem.schedule not in SPLITTING
        for device in range(problem.pp):
            stages = problem.stages_of(device)
            first = min(stages)
            path: dict[tuple[Term, int], int] = {}
            for s in range(first):
                path[Term.FORWARD, s] = 1
                path[Term.MESSAGE, s + 1] = 2 if is_whole else 1
                if is_whole:
                    path[Term.BACKWARD, s] = 1
            for s in stages:
                path[Term.FORWARD, s] = path[Term.BACKWARD, s] = count
                if s > first or first == 0:  # else it is gathered while it waits
                    path[Term.GATHER, s] = 1
                if trains and (s > first or first == 0 or not is_whole):  # else while others drain
                    path[Term.REDUCE, s] = 1
                if self._reduces_each:
                    path[Term.EACH, s] = count
            yield path


def _between(
    center: Sequence[Sequence[float]], answer: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Seconds a little way from what is known to be good towards an answer of the program."""
    return [
        [(1 - STRIDE) * a + STRIDE * b for a, b in zip(*rows, strict=True)]
        for rows in zip(center, answer, strict=True)
    ]
