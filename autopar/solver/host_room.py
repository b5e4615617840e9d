"""Whether what a plan keeps in host memory is no more than the hosts have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.errors import Shortfall
from autopar.plan.types import MeshShape
from autopar.solver.exact import StageFigures
from autopar.units import format_bytes
from cost_models.local import is_cpu


@dataclass(frozen=True, slots=True)
class HostShortage:
    """A machine whose host has too little memory.

    Attributes:
        machine: Its number.
        needed_bytes: What its devices keep there at once.
        available_bytes: What it has.
    """

    machine: int
    needed_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        """The machine and both numbers."""
        return (
            f"needs {format_bytes(self.needed_bytes)} of the host memory of machine "
            f"{self.machine}, which has {format_bytes(self.available_bytes)}"
        )

    def shortfall(self, shape: object) -> Shortfall:
        """The same as a limit that was not met, with the way out."""
        return Shortfall(
            what=f"host memory of machine {self.machine} with {shape}",
            needed=self.needed_bytes,
            available=self.available_bytes,
            unit="bytes",
            remedy="give host_memory in the cluster file if the host has more, or leave offload "
            "out",
        )


def host_shortage(
    stages: Sequence[StageFigures], mesh: MeshShape, cluster: Cluster
) -> HostShortage | None:
    """The machine that lacks most; None if all have enough or their memory is not known.

    CPUs have no other memory than their host's; it is counted as that of a device.

    Args:
        stages: Figures of each stage.
        mesh: Ranks of each axis.
        cluster: Their machines.
    """
    if is_cpu(cluster) or not any(m.host_memory_bytes for m in cluster.machines):
        return None
    kept = [s.num_in_flight * s.host_bytes + s.host_state_bytes for s in stages]
    width = mesh.dp * mesh.tp
    found: list[HostShortage] = []
    first = 0
    for index, machine in enumerate(cluster.machines):
        ranks = range(first, min(first + machine.num_devices, mesh.num_ranks))
        first += machine.num_devices
        needed = sum(kept[s] for rank in ranks for s in mesh.stages_of(rank // width))
        if machine.host_memory_bytes and needed > machine.host_memory_bytes:
            found.append(HostShortage(index, needed, machine.host_memory_bytes))
    return max(found, key=lambda s: s.needed_bytes - s.available_bytes, default=None)
