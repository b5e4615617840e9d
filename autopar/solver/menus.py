"""Exact menus of blocks, each found once: several side by side, or before they are asked for.

Tables of other splits, of other sizes of menus and of other ZeRO levels hold blocks that are equal
down to the byte. A finer menu begins with the same corners as the one that it refines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

from autopar.solver.lanes import NOW, SURE, Ahead, Lanes, collected
from autopar.solver.recompute import MenuPoint, menu_corners, recompute_menu
from autopar.solver.recompute_problem import RecomputeProblem
from cost_models.offload import FREE_COPIES

Points: TypeAlias = tuple[MenuPoint, ...]


@dataclass(slots=True, eq=False)
class Menus:
    """Menus by block and size.

    Attributes:
        lanes: Threads that menus are found on.
    """

    lanes: Lanes
    _known: dict[tuple[RecomputeProblem, int], Points] = field(default_factory=dict)
    _corners: dict[RecomputeProblem, Points] = field(default_factory=dict)
    _begun: dict[tuple[RecomputeProblem, int], Ahead[tuple[Points, Points]]] = field(
        default_factory=dict
    )

    def expect(self, problems: Iterable[RecomputeProblem], size: int, order: float = SURE) -> None:
        """Start menus that will be asked for, the largest blocks first."""
        for block in sorted(map(_essence, problems), key=lambda p: -len(p.ops)):
            key = (block, size)
            if key not in self._known and key not in self._begun:
                work = partial(_found, block, size, self._corners.get(block))
                self._begun[key] = self.lanes.ahead(work, order)

    def of(self, problems: Iterable[RecomputeProblem], size: int) -> list[Points]:
        """Menus of some blocks, found side by side where they are not known."""
        blocks = list(map(_essence, problems))
        self.expect(blocks, size, NOW)
        keys = [(block, size) for block in blocks]
        waiting = [key for key in dict.fromkeys(keys) if key not in self._known]
        for key, found in zip(waiting, collected([self._begun[k] for k in waiting]), strict=True):
            self._corners[key[0]], self._known[key] = found
            del self._begun[key]
        return [self._known[key] for key in keys]

    def drop(self, problems: Iterable[RecomputeProblem], size: int) -> None:
        """Menus that are not wanted any more are not begun; they may be asked for again."""
        for block in map(_essence, problems):
            if (block, size) in self._begun:
                self._begun[block, size].drop()


def _essence(problem: RecomputeProblem) -> RecomputeProblem:
    """A block without what its menu does not depend on."""
    if problem.units:
        return problem
    return replace(problem, copy=FREE_COPIES, beside_s=(0.0, 0.0))


def _found(problem: RecomputeProblem, size: int, corners: Points | None) -> tuple[Points, Points]:
    """Corners and menu of a block."""
    if corners is None:
        corners = menu_corners(problem)
    return corners, recompute_menu(problem, size=size, corners=corners)
