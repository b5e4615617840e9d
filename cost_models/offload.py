"""State and saved values in host memory: what copies take, and what stays on the device.

A copy takes a start-up, that of a kernel, and its bytes over the link to the host. Copies of saved
values run beside operators (:mod:`cost_models.copy_lane`).

The optimizer's state comes to the device chunk by chunk after the last gradient is reduced, is
updated with its parameters, and goes back. These copies are priced one after another and beside
nothing: three streams that hide each other would take about as long as the slowest of them.

Source: the idea is that of Ren et al., "ZeRO-Offload", USENIX ATC 2021, without the update on the
host.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster.device import DeviceKind
from autopar.cluster.topology import Cluster
from autopar.errors import ConstraintError


@dataclass(frozen=True, slots=True)
class CopyPrice:
    """Seconds of a copy between a device and its host: ``start_s + bytes * s_per_byte``."""

    s_per_byte: float = 0.0
    start_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Seconds of one copy."""
        return self.start_s + num_bytes * self.s_per_byte


FREE_COPIES = CopyPrice()
CHUNK_BYTES = 1 << 26  # of state on the device at once, or that of the largest parameter


def offload_fault(cluster: Cluster) -> str:
    """Why copies of a cluster's devices to host memory can't be priced; "" if they can."""
    for machine in cluster.machines:
        device = machine.device
        if device.kind is not DeviceKind.CPU and not device.host_link_bytes_per_s:
            return (
                f"device {device.name!r} has no bandwidth to its host; give "
                "host_link_bytes_per_s in a cluster file, or leave offload out"
            )
    return ""


def offload_s_per_byte(cluster: Cluster) -> float:
    """Seconds per byte of state that is brought and taken back, on the slowest device.

    Raises:
        ConstraintError: A device has no figure for its link to the host.
    """
    return 2 * copy_price(cluster, "optimizer").s_per_byte


def copy_price(cluster: Cluster, what: str) -> CopyPrice:
    """What a copy to host memory or back takes on the slowest device.

    On CPUs, which have nothing to gain, a copy reads and writes the one memory that there is.

    Args:
        cluster: The devices.
        what: What is copied, as in the constraint ``offload``.

    Raises:
        ConstraintError: A device has no figure for its link to the host.
    """
    fault = offload_fault(cluster)
    if fault:
        raise ConstraintError(f"constraint offload={what!r}: {fault}")
    devices = [machine.device for machine in cluster.machines]
    slowest = min(
        d.memory_bandwidth_bytes_per_s / 2 if d.kind is DeviceKind.CPU else d.host_link_bytes_per_s
        for d in devices
    )
    return CopyPrice(1 / slowest, max(d.launch_overhead_s for d in devices))


def resident_bytes(state_bytes: int, largest_bytes: int, *, is_cpu: bool = False) -> int:
    """Bytes that optimizer state in host memory takes of a device's memory.

    Args:
        state_bytes: Of all its parameters.
        largest_bytes: Of the parameter with most.
        is_cpu: Whether the host's memory is that of the device.
    """
    chunk_bytes = min(state_bytes, max(CHUNK_BYTES, largest_bytes))
    return chunk_bytes + (state_bytes if is_cpu else 0)
