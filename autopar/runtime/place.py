"""Where this process stands: its rank, its device, and who else there is."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a job.

    Attributes:
        rank: Global rank; 0 in a plain process.
        world_size: Processes of the job; 1 in a plain process.
        device: Where this rank computes.
        is_launched: Whether a launcher or the user set up a process group.
    """

    rank: int
    world_size: int
    device: torch.device
    is_launched: bool

    @property
    def is_distributed(self) -> bool:
        """Whether other processes take part."""
        return self.world_size > 1

    @property
    def label(self) -> int | None:
        """The rank for messages; None in a plain process."""
        return self.rank if self.is_launched else None
