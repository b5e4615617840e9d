"""How a search went."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SearchStats:
    """How the search went; not part of the plan.

    Attributes:
        seconds: Wall-clock seconds by phase.
        num_shapes: Shapes of the declared space.
        num_ranked: Shapes that got splits and cuts.
        num_split_solves: Mixed-integer programs.
        num_stage_solves: Cut problems.
        num_columns: Columns of the largest mixed-integer program.
        stopped_by: ``""``, ``"work"`` or ``"time"``.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    num_shapes: int = 0
    num_ranked: int = 0
    num_split_solves: int = 0
    num_stage_solves: int = 0
    num_columns: int = 0
    stopped_by: str = ""

    def add(self, other: SearchStats) -> None:
        """Count what another search did as well."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        for name in ("num_shapes", "num_ranked", "num_split_solves", "num_stage_solves"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.num_columns = max(self.num_columns, other.num_columns)
        self.stopped_by = self.stopped_by or other.stopped_by
