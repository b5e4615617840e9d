"""Machines, the links inside and between them, and which link a group of ranks is bound by.

Two levels: devices of one machine talk over its ``intra`` link, devices of two machines over their
``inter`` links. A :class:`Link` is alpha-beta: a message of ``x`` bytes takes ``latency_s + x /
bandwidth_bytes_per_s``. The bandwidth is what *one device* can send (and, at the same time,
receive) while every other device of its machine does the same: an adapter that eight devices share
is listed with an eighth of its bandwidth.

Ranks are numbered machine by machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, groupby

from autopar.cluster.device import Device, DeviceKind
from autopar.errors import ConfigError


class LinkKind(StrEnum):
    """Technology of a link."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    INFINIBAND = "infiniband"
    ETHERNET = "ethernet"
    LOOPBACK = "loopback"
    OTHER = "other"


# A ring over many machines loses the use of several adapters at once: rails meet on shared switches
# and the slowest path holds back all. Beyond LEAF_MACHINES the adapters that one ring drives are
# divided by 1 + (machines - LEAF_MACHINES) / RAIL_MACHINES, down to one. [fitted on published runs
# with sharded parameters: 16 machines of 8 lose little, at 48 to 280 a ring gets one adapter]
LEAF_MACHINES = 8
RAIL_MACHINES = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection as one device sees it.

    Attributes:
        kind: Technology.
        latency_s: Seconds per message whatever its size (alpha), software included.
        bandwidth_bytes_per_s: Reached by large messages, per device and direction.
        source: Where the figures come from.
        wires: Wires of a device that the bandwidth is the sum of, where devices are wired to each
            other; 0 where a switch gives any two the whole of it.
    """

    kind: LinkKind
    latency_s: float
    bandwidth_bytes_per_s: float
    source: str = ""
    wires: int = 0

    def __post_init__(self) -> None:
        if self.wires < 0:
            raise ConfigError(f"{self.kind} link: wires is {self.wires}, must be at least 0")
        if self.latency_s < 0 or not self.bandwidth_bytes_per_s > 0:
            raise ConfigError(
                f"{self.kind} link: latency_s is {self.latency_s} and bandwidth_bytes_per_s is "
                f"{self.bandwidth_bytes_per_s}; the first must be at least 0, the second above 0"
            )

    def time_s(self, payload_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency_s + payload_bytes / self.bandwidth_bytes_per_s

    def with_share(self, share: float) -> Link:
        """This link between processes that have a share of a core each."""
        if share == 1.0:
            return self
        return replace(
            self,
            latency_s=self.latency_s / share,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * share,
        )

    def in_group(self, size: int) -> Link:
        """This link as a group of ``size`` devices of one machine sees it.

        Without a switch a group has ``size (size - 1) / 2`` wires of its own; it reaches the whole
        bandwidth with as many as one device has: two devices one wire, four all six of an NVLink
        cube mesh.
        """
        own = size * (size - 1) // 2
        if not self.wires or own >= self.wires or size < 2:
            return self
        share = own / self.wires
        return replace(self, bandwidth_bytes_per_s=share * self.bandwidth_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Some equal devices in one box.

    Attributes:
        device: The model of all its devices.
        num_devices: How many.
        intra: Between two of them.
        inter: To other machines, as one device sees it.
        site: Where it stands, if machines stand in several places.
        host_memory_bytes: Memory of the host that its devices may fill together; 0 where it is not
            known, and nothing is refused for it.
        num_cores: Cores that its devices share, where they are processes and figures are those of
            processes that are all at work; 0 where each device is one of its own.
        num_working: Devices that figures are for, beside which the others wait; all if 0.
    """

    device: Device
    num_devices: int
    intra: Link
    inter: Link
    site: str = ""
    host_memory_bytes: int = 0
    num_cores: int = 0
    num_working: int = 0

    def __post_init__(self) -> None:
        if self.host_memory_bytes < 0:
            raise ConfigError(
                f"machine of {self.device.name!r}: host_memory_bytes is "
                f"{self.host_memory_bytes}, must be at least 0"
            )
        if self.num_devices < 1:
            raise ConfigError(
                f"machine of {self.device.name!r}: has {self.num_devices} devices, needs at least 1"
            )

    @property
    def num_at_work(self) -> int:
        """Devices that work at the same time."""
        return self.num_working or self.num_devices

    def at_work(self, count: int) -> Machine:
        """This machine while only ``count`` of its devices work: shared cores are theirs alone."""
        if self.device.kind is not DeviceKind.CPU or count == self.num_at_work:
            return self
        gain = _core_share(count, self.num_cores) / _core_share(self.num_at_work, self.num_cores)
        return replace(
            self,
            device=self.device.with_share(gain),
            intra=self.intra.with_share(gain),
            num_working=0 if count == self.num_devices else count,
        )

    def with_ranks(self, count: int) -> Machine:
        """This machine of as many devices as cores, with ``count`` processes as its devices."""
        cores = self.num_devices
        device = replace(
            self.device, memory_bytes=max(1, cores * self.device.memory_bytes // count)
        )
        share = _core_share(count, cores)
        return replace(
            self,
            device=device.with_share(share),
            intra=self.intra.with_share(share),
            num_devices=count,
            num_cores=cores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinks:
    """What a group of ranks is connected by.

    Attributes:
        size: Ranks.
        num_machines: Machines that they are on.
        per_machine: The fewest of them on one machine.
        intra: The slowest link inside the machines; None if each has one rank.
        inter: The slowest link between the machines, per device; None on one machine.
        num_sites: Sites that the machines stand at.
    """

    size: int
    num_machines: int
    per_machine: int
    intra: Link | None
    inter: Link | None
    num_sites: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines, in rank order.

    Attributes:
        machines: At least one.
        assumptions: What was taken for granted about it, in sentences for the report.
        between_sites: Between machines of two sites, as one device sees it while all others send
            too; needed where there are several sites.
    """

    machines: tuple[Machine, ...]
    assumptions: tuple[str, ...] = ()
    between_sites: Link | None = None

    def __post_init__(self) -> None:
        if not self.machines:
            raise ConfigError("Cluster: has 0 machines, needs at least 1")
        sites = list(dict.fromkeys(m.site for m in self.machines))
        if len(sites) > 1 and self.between_sites is None:
            raise ConfigError(
                f"Cluster: machines at {sites[0]!r} and at {sites[1]!r} are not connected; give "
                "the link between_sites, or leave the sites out"
            )

    @property
    def num_devices(self) -> int:
        """Devices of all machines."""
        return sum(m.num_devices for m in self.machines)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of every rank."""
        return tuple(m.device for m in self.machines for _ in range(m.num_devices))

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are the same model."""
        return len({m.device for m in self.machines}) == 1

    @property
    def memory_bytes(self) -> int:
        """Usable bytes of the smallest device."""
        return min(m.device.usable_bytes for m in self.machines)

    def machine_of(self, rank: int) -> int:
        """Index of the machine that ``rank`` is on."""
        first = 0
        for index, machine in enumerate(self.machines):
            first += machine.num_devices
            if 0 <= rank < first:
                return index
        raise ConfigError(f"cluster {self}: has no rank {rank}, its ranks are 0 to {first - 1}")

    def device_of(self, rank: int) -> Device:
        """The device of ``rank``."""
        return self.machines[self.machine_of(rank)].device

    def slowest_device(self, ranks: Sequence[int], dtype: str = "bfloat16") -> Device:
        """The device of ``ranks`` that computes slowest in ``dtype``."""
        ends = list(accumulate(m.num_devices for m in self.machines))
        used = {bisect_right(ends, r) if 0 <= r < ends[-1] else self.machine_of(r) for r in ranks}
        return min(
            (self.machines[index].device for index in sorted(used)),
            key=lambda d: (d.peak_flops_for(dtype), d.memory_bandwidth_bytes_per_s, d.name),
        )

    def links_for(self, ranks: Sequence[int]) -> GroupLinks:
        """The links that a group uses, level by level.

        Raises:
            ConfigError: A rank is not in the cluster, or the group is empty.
        """
        if not ranks:
            raise ConfigError(f"cluster {self}: a group needs at least 1 rank, got 0")
        counts: dict[int, int] = {}
        for rank in dict.fromkeys(ranks):
            index = self.machine_of(rank)
            counts[index] = counts.get(index, 0) + 1
        used = [self.machines[i] for i in counts]
        inside = [self.machines[i].intra.in_group(n) for i, n in counts.items() if n > 1]
        outside = [m.inter for m in used]
        num_sites = len({m.site for m in used})
        if num_sites > 1 and self.between_sites is not None:
            outside.append(self.between_sites)
        return GroupLinks(
            size=sum(counts.values()),
            num_machines=len(counts),
            per_machine=min(counts.values()),
            intra=_slowest(inside) if inside else None,
            inter=_slowest(outside) if len(used) > 1 else None,
            num_sites=num_sites,
        )

    def link_for(self, ranks: Sequence[int]) -> Link:
        """The link that bounds a ring over ``ranks`` while its sister groups do the same.

        A group with ``k`` ranks on each machine drives ``k`` devices' shares of the adapters (the
        library runs k rings), so between machines it sees ``k`` times one device's bandwidth (less
        over many machines), but never more than the link inside. The latency is the mean over the
        hops of the ring, most of which stay inside a machine. A group of one gets its machine's
        inner link, which it does not use.
        """
        links = self.links_for(ranks)
        if links.inter is None:
            return links.intra or self.machines[self.machine_of(ranks[0])].intra
        beyond = max(0, links.num_machines - LEAF_MACHINES)
        adapters = max(1.0, links.per_machine / (1.0 + beyond / RAIL_MACHINES))
        bandwidth = adapters * links.inter.bandwidth_bytes_per_s
        latency_s = links.inter.latency_s
        if links.intra is not None:
            bandwidth = min(bandwidth, links.intra.bandwidth_bytes_per_s)
            hops_inside = links.size - links.num_machines
            latency_s += hops_inside / links.size * (links.intra.latency_s - latency_s)
        return replace(links.inter, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)

    def at_work(self, count: int) -> Cluster:
        """This cluster while its first ``count`` devices work and the others wait.

        Processes on shared cores have them to themselves then; devices of their own are as fast as
        before. Memory is shared out among all.
        """
        machines, left = [], count
        for machine in self.machines:
            machines.append(machine.at_work(max(1, min(left, machine.num_devices))))
            left -= machine.num_devices
        return replace(self, machines=tuple(machines))

    def with_memory_limit(self, limit_bytes: int) -> Cluster:
        """This cluster with exactly ``limit_bytes`` usable on every device.

        Raises:
            ConfigError: The limit is below 1 byte, or above what an accelerator has. (The memory
                of CPU processes is shared and can't be checked here.)
        """
        if limit_bytes < 1:
            raise ConfigError(f"memory_limit is {limit_bytes} bytes, must be at least 1")
        for machine in self.machines:
            device = machine.device
            if device.kind == "cuda" and limit_bytes > device.memory_bytes:
                raise ConfigError(
                    f"memory_limit is {limit_bytes:,} bytes, {device.name!r} has "
                    f"{device.memory_bytes:,}; lower the limit or leave it out"
                )
        machines = tuple(
            replace(m, device=replace(m.device, memory_bytes=limit_bytes, reserved_bytes=0))
            for m in self.machines
        )
        return replace(self, machines=machines)

    def with_costs(self, cost_per_hour: float | Mapping[str, float]) -> Cluster:
        """This cluster with prices of its devices.

        Args:
            cost_per_hour: Of one device: of all alike, or by the name of the device. A machine at
                another speed costs what its device costs.

        Raises:
            ConfigError: A name is no device of the cluster, or a price is negative.
        """
        names = sorted({m.device.name.partition("@")[0] for m in self.machines})
        if not isinstance(cost_per_hour, Mapping):
            cost_per_hour = dict.fromkeys(names, cost_per_hour)
        for name in cost_per_hour:
            if name not in names:
                raise ConfigError(
                    f"cost_per_hour: {name!r} is no device of {self}; it has {', '.join(names)}"
                )

        def priced(device: Device) -> Device:
            cost = cost_per_hour.get(device.name.partition("@")[0], device.cost_per_hour)
            return replace(device, cost_per_hour=cost)

        machines = tuple(replace(m, device=priced(m.device)) for m in self.machines)
        return replace(self, machines=machines)

    def without_machines(self, lost: Collection[int]) -> Cluster:
        """This cluster without some of its machines.

        Args:
            lost: Their indices.

        Raises:
            ConfigError: An index is out of range, or no machine is left.
        """
        for index in lost:
            if not 0 <= index < len(self.machines):
                raise ConfigError(
                    f"cluster {self}: has no machine {index}, its machines are 0 to "
                    f"{len(self.machines) - 1}"
                )
        left = tuple(m for i, m in enumerate(self.machines) if i not in lost)
        return replace(self, machines=left)

    def with_speed(self, machine: int, factor: float) -> Cluster:
        """This cluster with one machine at another speed.

        Args:
            machine: Its index.
            factor: 0.5 takes twice as long.

        Raises:
            ConfigError: There is no such machine, or the factor is not above 0.
        """
        if not 0 <= machine < len(self.machines):
            raise ConfigError(
                f"cluster {self}: has no machine {machine}, its machines are 0 to "
                f"{len(self.machines) - 1}"
            )
        slow = replace(
            self.machines[machine], device=self.machines[machine].device.at_speed(factor)
        )
        before, after = self.machines[:machine], self.machines[machine + 1 :]
        return replace(self, machines=(*before, slow, *after))

    def __str__(self) -> str:
        """Canonical text, such as ``4x8:h100-sxm`` or ``8:a100-80gb + 4:l4``.

        Equal consecutive machines are joined. A memory limit is not part of it.
        """
        parts = []
        for (name, size), run in groupby((m.device.name, m.num_devices) for m in self.machines):
            count = sum(1 for _ in run)
            parts.append(f"{size}:{name}" if count == 1 else f"{count}x{size}:{name}")
        return " + ".join(parts)


def _core_share(count: int, num_cores: int) -> float:
    """What each of ``count`` busy processes has of a core; 1 where cores are not shared."""
    return min(1.0, num_cores / count) if num_cores else 1.0


def _slowest(links: Sequence[Link]) -> Link:
    """The link with the least bandwidth, given the largest latency of all."""
    slow = min(links, key=lambda link: link.bandwidth_bytes_per_s)
    return replace(slow, latency_s=max(link.latency_s for link in links))
