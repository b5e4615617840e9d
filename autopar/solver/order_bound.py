"""A lower bound of a shape over the orders that it may be run in.

What ranks wait for each other depends on the order. A shape whose order is given has the bound of
that order's paths (:mod:`autopar.solver.path_bound`). A shape that may be run as 1F1B, with deeper
warm-ups or with backwards in halves (:mod:`autopar.solver.schedule_choice`) has the least of what
holds for all orders of whole backwards (:mod:`autopar.solver.pipeline_bound`) and of the paths of
zero bubble.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.plan.types import ScheduleKind
from autopar.solver.path_bound import MAX_WORK, PathBound
from autopar.solver.pipeline_bound import NO_FLOOR, Floor, PipelineBound
from autopar.solver.stages_problem import StageProblem


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
    """

    problem: StageProblem
    is_open: bool
    may_split: bool
    warmup: tuple[int, ...] | None = None
    floor: Floor = NO_FLOOR
    knows_halves: bool = True
    max_work: int = MAX_WORK

    def least_s(self, enough_s: float = math.inf) -> float:
        """Seconds of a step, at least; infinite if no cut fits.

        Args:
            enough_s: A bound from here on need not be sharper.
        """
        quick_s = self.quick().least_s()
        if quick_s >= enough_s or self.problem.pp == 1:
            return quick_s
        if not self.is_open:
            return max(quick_s, self._paths(self.problem).least_s(enough_s))
        if not self.may_split:
            return quick_s
        whole_s = PipelineBound(self.problem, self.floor).least_s()
        if whole_s <= quick_s:
            return quick_s
        halves = replace(self.problem, schedule=ScheduleKind.ZERO_BUBBLE)
        halves_s = self._paths(halves).least_s(min(enough_s, whole_s))
        return max(quick_s, min(whole_s, halves_s))

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
        return PathBound(problem, self.warmup, self.floor, self.knows_halves, self.max_work)
