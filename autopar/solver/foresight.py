"""What a search will ask native solvers for, started before it does.

What is started is a guess of what the next steps need: it changes when something is found, never
what. A guess that turns out wrong costs time on cores that were idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from autopar.errors import InfeasibleError
from autopar.solver.assemble import Outcome
from autopar.solver.at_work import Rankers
from autopar.solver.lanes import Ahead
from autopar.solver.own_splits import are_alike
from autopar.solver.ranked import Ranked
from autopar.solver.splits_problem import SplitsSolution


@dataclass(slots=True, eq=False)
class Foresight:
    """Of one search."""

    rankers: Rankers
    _own: list[tuple[Ranked, Ahead[SplitsSolution]]] = field(
        default_factory=list
    )  # whose own splits are on their way
    _finer: Ranked | None = None  # whose finer menus are
    _best_s: float = inf

    def improving(self, rows: Iterable[Ranked]) -> None:
        """These are likely to be improved: with exact menus, and with splits of their own."""
        if self.rankers.lanes.is_open:
            for ranked in rows:
                table, ranker = ranked.table, self.rankers.of(ranked.shape)
                ranker.tables.expect(table.sizes, table.problem, table.options)
                self._own.append((ranked, self._own_splits(ranked)))

    def go_on(self) -> None:
        """Own splits that have been found meanwhile get their menus started."""
        for row in [row for row in self._own if row[1].is_done]:
            self._own.remove(row)
            self._expect_table(*row)

    def _own_splits(self, ranked: Ranked) -> Ahead[SplitsSolution]:
        key, ranker = (ranked.shape.sizes, ranked.zero_level), self.rankers.of(ranked.shape)
        body = ranker.bodies.body(ranked.shape.sizes)
        return ranker.own.expect(key, body, is_alike=self._is_alike(ranked))

    def _is_alike(self, ranked: Ranked) -> bool:
        sizes, level, ranker = ranked.shape.sizes, ranked.zero_level, self.rankers.of(ranked.shape)
        shared = ranker.parameters(sizes, level, ranker.bodies.body(sizes))
        return are_alike(ranker.analysis.problem(sizes, level), shared)

    def _expect_table(self, ranked: Ranked, own: Ahead[SplitsSolution]) -> None:
        sizes, ranker = ranked.shape.sizes, self.rankers.of(ranked.shape)
        body = ranker.bodies.body(sizes)
        problem = ranker.analysis.problem(sizes, ranked.zero_level)
        where = (body.sizes, body.problem) if self._is_alike(ranked) else (sizes, problem)
        try:
            options = own.result().options
        except InfeasibleError:
            return  # whoever asks for these splits is told
        ranker.tables.expect(*where, options)

    def judging(self, ranked: Ranked) -> None:
        """The best estimate is judged first, and wins as a rule."""
        if self._finer is None:
            self._expect_finer(ranked)

    def judged(self, outcome: Outcome) -> None:
        """What the winner makes again is chosen from finer menus."""
        if outcome.fits and outcome.step_s < self._best_s:
            self._best_s = outcome.step_s
            self._expect_finer(outcome.ranked)

    def _expect_finer(self, ranked: Ranked) -> None:
        before, self._finer = self._finer, ranked
        if before is not None and before.table.options != ranked.table.options:
            self.rankers.of(before.shape).tables.drop_finer(before.table)
        if set(ranked.recompute_words) != {"none"}:
            self.rankers.of(ranked.shape).tables.expect_finer(ranked.table)
