"""Rankers by number of ranks that work: where they share cores, idle ones cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.solver.candidates import Shape
from autopar.solver.lanes import Lanes
from autopar.solver.ranking import Ranker
from autopar.solver.search_stats import SearchStats
from autopar.solver.work import Work


@dataclass(slots=True, eq=False)
class Rankers:
    """One ranker for all shapes, or one for each number of ranks that has prices of its own.

    Attributes:
        whole: That of shapes with all ranks.
    """

    whole: Ranker
    _others: dict[int, Ranker] = field(default_factory=dict)

    def of(self, shape: Shape) -> Ranker:
        """Who prices a shape."""
        num_ranks = shape.mesh.num_ranks
        if num_ranks not in self._others:
            self._others[num_ranks] = self._made(num_ranks)
        return self._others[num_ranks]

    def _made(self, num_ranks: int) -> Ranker:
        analysis = self.whole.analysis.at_work(num_ranks)
        if analysis is self.whole.analysis:
            return self.whole
        Work.of(analysis, self.whole.lanes)
        return Ranker(analysis, self.whole.limit_bytes)

    @property
    def lanes(self) -> Lanes:
        """Threads beside the search, shared by all."""
        return self.whole.lanes

    def count(self, stats: SearchStats) -> None:
        """What native solvers were asked for, so far."""
        each = tuple(self)
        stats.num_split_solves = sum(r.own.num_solves + r.bodies.num_solves for r in each)
        stats.num_columns = max(max(r.own.num_columns, r.bodies.num_columns) for r in each)
        stats.num_stage_solves = sum(r.num_stage_solves + r.problems.num_solves for r in each)

    def __iter__(self) -> Iterator[Ranker]:
        """Those that there are, each once."""
        yield self.whole
        yield from (ranker for ranker in self._others.values() if ranker is not self.whole)
