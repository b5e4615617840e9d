"""What searches of one model share, on one cluster and on the next."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.solver.analysis import Analysis
from autopar.solver.block_costs import BlockTables
from autopar.solver.bodies import Bodies
from autopar.solver.recompute_blocks import BlockLocalizer


@dataclass(frozen=True, slots=True)
class Work:
    """What does not depend on shapes and limits.

    Attributes:
        bodies: Work of micro-batches.
        tables: Menus of blocks.
    """

    bodies: Bodies
    tables: BlockTables

    @staticmethod
    def of(analysis: Analysis) -> Work:
        """Nothing yet, of a model on a cluster."""
        localizer = BlockLocalizer(analysis)
        return Work(Bodies(analysis, localizer.spares), BlockTables(analysis, localizer))

    def on(self, analysis: Analysis) -> Work:
        """What of it holds on another cluster with equal prices."""
        return Work(self.bodies.on(analysis), self.tables.on(analysis))
