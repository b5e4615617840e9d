"""The best splits for just one mesh and ZeRO level, beside those that meshes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from autopar.solver.analysis import Analysis
from autopar.solver.bodies import Bodies, Body
from autopar.solver.lanes import Ahead
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import SplitsProblem, SplitsSolution

Key = tuple[tuple[int, int, int], int]
"""Sizes of mb, dp, tp of a mesh, and a level."""


@dataclass(slots=True)
class OwnSplits:
    """Splits by mesh and level, each solved once.

    Attributes:
        analysis: Model and cluster.
        bodies: Whose splits are those to start from.
        num_solves: Mixed-integer programs solved for single meshes.
        num_columns: Columns of the largest.
    """

    analysis: Analysis
    bodies: Bodies
    num_solves: int = 0
    num_columns: int = 0
    _known: dict[Key, SplitsSolution] = field(default_factory=dict)
    _begun: dict[Key, Ahead[SplitsSolution]] = field(default_factory=dict)

    def expect(self, key: Key, body: Body, *, is_alike: bool) -> Ahead[SplitsSolution]:
        """Start what is going to be asked for, as :meth:`solved` does."""
        if key not in self._begun:
            problem = self.analysis.problem(*key)
            start = self.bodies.solved(body).options if is_alike else None
            work = partial(solve_splits, problem, start=start)
            self._begun[key] = self.bodies.lanes.ahead(work)
        return self._begun[key]

    def solved(self, key: Key, body: Body, *, is_alike: bool) -> SplitsSolution:
        """The best splits of a mesh at a level.

        Args:
            key: The mesh and the level.
            body: Its body.
            is_alike: Whether its splits are a choice for the mesh too.
        """
        if key not in self._known:
            self.num_solves += 1
            found = self.expect(key, body, is_alike=is_alike).result()
            self.num_columns = max(self.num_columns, found.num_columns)
            self._known[key] = found
        return self._known[key]


def are_alike(one: SplitsProblem, other: SplitsProblem) -> bool:
    """Whether a choice for one problem is one for the other."""
    menus = zip(one.variables, other.variables, strict=True)
    return all([o.choice for o in a.options] == [o.choice for o in b.options] for a, b in menus)
