"""What searches of one model share, on one cluster and on the next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import BlockTables
from autopar.solver.bodies import Bodies
from autopar.solver.lanes import Lanes
from autopar.solver.recompute_blocks import BlockLocalizer

NAME = "bodies and menus"


@dataclass(frozen=True, slots=True)
class Work:
    """What does not depend on shapes and limits.

    Attributes:
        bodies: Work of micro-batches.
        tables: Menus of blocks.
        lanes: Threads that both are found on, while a search has them open.
    """

    bodies: Bodies
    tables: BlockTables
    lanes: Lanes
    _localizer: BlockLocalizer
    _views: dict[str, Work] = field(default_factory=dict)

    @staticmethod
    def of(analysis: Analysis, lanes: Lanes | None = None) -> Work:
        """What is known of a model on a cluster, at first nothing.

        It depends neither on the limit nor on constraints, but for what is made again: searches
        that ask about the same model go on with what earlier ones worked out.

        Args:
            analysis: The model on a cluster.
            lanes: Threads of what is not known yet; its own if left out.
        """
        wish = analysis.constraints.recompute
        known = analysis.shared.get(NAME)
        if not isinstance(known, Work):
            free = analysis.under(replace(analysis.constraints, recompute=None))
            localizer, lanes = BlockLocalizer(free), lanes or Lanes()
            bodies = Bodies(free, localizer.spares, lanes)
            known = Work(bodies, BlockTables(free, localizer, lanes), lanes, localizer)
            analysis.shared[NAME] = known
        if wish is None:
            return known
        view = known._views.get(str(wish))
        if view is None:
            tables = BlockTables(analysis, known._localizer, known.lanes)
            bodies = known.bodies.under(analysis)
            view = Work(bodies, tables, known.lanes, known._localizer)
            known._views[str(wish)] = view
        return view

    def on(self, analysis: Analysis) -> Work:
        """What of it holds on another cluster with equal prices."""
        bodies = self.bodies.on(analysis)
        found = Work(bodies, self.tables.on(analysis), self.lanes, self._localizer)
        for wish, view in self._views.items():
            other = analysis.under(view.bodies.analysis.constraints)
            tables = view.tables.on(other)
            found._views[wish] = Work(bodies.under(other), tables, self.lanes, self._localizer)
        return found
