"""A lower bound of a shape over the orders that it may be run in.

What ranks wait for each other depends on the order. A shape whose order is given has the bound of
that order's paths (:mod:`autopar.solver.path_bound`). A shape that may be run as 1F1B, with deeper
warm-ups or with backwards in halves (:mod:`autopar.solver.schedule_choice`) has the least of what
holds for all orders of whole backwards (:mod:`autopar.solver.pipeline_bound`) and of the paths of
zero bubble.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.plan.types import ScheduleKind
from autopar.solver.path_bound import MAX_ROUNDS, MAX_WORK, PathBound
from autopar.solver.pipeline_bound import NO_FLOOR, Floor, PipelineBound
from autopar.solver.stages_problem import StageProblem

MOST_ROUNDS = 200  # of a bound that is sharpened again and again
LONGEST = 1 << 17  # computes and messages of a step whose paths it looks for
LEAST_WORK = 1 << 11  # of a round, however few computes it has
OF_A_ROUND = 1 << 13  # computes that take as long as solving a round's program
TO_BEGIN = 1 << 16  # computes that take as long as making the program
TO_ASK = 1 << 12  # computes that take as long as asking in vain


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBound:
    """Lower bounds of one chain on one pipeline.

    Attributes:
        problem: The chain, with the shape's own schedule and its micro-batches in flight.
        is_open: Whether the order is one of several that share the cuts.
        may_split: Whether one of them runs the halves of backwards apart.
        warmup: Warm-up depths, where they are not those of the schedule.
        floor: What is known beyond the menus.
        knows_halves: As in :class:`~autopar.solver.path_bound.PathBound`.
        max_work: Work limit, likewise.
        max_rounds: Likewise.
    """

    problem: StageProblem
    is_open: bool
    may_split: bool
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
        for bound_s, _ in self.bounds_s():
            found = max(found, bound_s)
            if found >= enough_s:
                break
        return found

    def bounds_s(self) -> Iterator[tuple[float, int]]:
        """Round by round seconds of a step, at least, and the work of a round that follows."""
        quick_s = self.quick().least_s()
        yield quick_s, 0
        if math.isinf(quick_s) or self.problem.pp == 1:
            return
        if not self.is_open:
            paths, whole_s = self._paths(self.problem), math.inf
        elif self.may_split:
            paths = self._paths(replace(self.problem, schedule=ScheduleKind.ZERO_BUBBLE))
            whole_s = PipelineBound(self.problem, self.floor).least_s()
        else:
            return
        if whole_s <= quick_s:
            return
        for bound_s in paths.bounds_s():
            yield max(quick_s, min(bound_s, whole_s)), paths.round_work
            if bound_s >= whole_s:
                return

    def begun(self) -> Begun:
        """The bound, to be sharpened as far as is asked for."""
        step = PathBound(self.problem).round_work
        max_work = MOST_ROUNDS * step if step <= LONGEST else 0
        return Begun(replace(self, max_work=max_work, max_rounds=MOST_ROUNDS).bounds_s())

    def quick(self) -> PipelineBound:
        """What is known without paths."""
        kind = self.problem.schedule
        return PipelineBound(
            self.problem,
            self.floor,
            splits_backward=self.may_split,
            has_cycles=kind is ScheduleKind.ONE_F_ONE_B
            and not self.is_open
            and self.warmup is None,
        )

    def _paths(self, problem: StageProblem) -> PathBound:
        return PathBound(
            problem, self.warmup, self.floor, self.knows_halves, self.max_work, self.max_rounds
        )


@dataclass(slots=True)
class Begun:
    """A bound that is sharpened again and again, and goes on where it was left.

    Args:
        bounds_s: From :meth:`OrderBound.bounds_s`.

    Attributes:
        best_s: The best bound so far.
        spent: Work so far, in computes and messages of a step that are gone through once.
    """

    bounds_s: Iterator[tuple[float, int]]
    best_s: float = 0.0
    spent: int = 0

    def more_s(self, work: int, enough_s: float) -> float:
        """The best bound after more work.

        Args:
            work: Computes and messages, times rounds; one round at least.
            enough_s: A bound from here on need not be sharper, and won't be.
        """
        self.spent += TO_ASK if self.spent else TO_BEGIN
        for bound_s, round_work in self.bounds_s:
            self.best_s = max(self.best_s, bound_s)
            if self.best_s >= enough_s:
                self.bounds_s = iter(())  # its program is large, and it is done with
                break
            if round_work:
                self.spent += round_work + OF_A_ROUND
                work -= max(round_work, LEAST_WORK)
            if work <= 0:
                break
        return self.best_s
