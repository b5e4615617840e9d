"""Prices of a cluster that is a little better: what a link or a device would be worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from autopar.cluster.device import Device
from autopar.cluster.topology import Cluster, Link, Machine
from autopar.ir.graph import Arg, Meta
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel, HostCosts


class Part(StrEnum):
    """What of a cluster gets better."""

    INSIDE = "links inside a machine"
    BETWEEN = "links between machines"
    SITES = "links between sites"
    DEVICES = "arithmetic and memory bandwidth of the devices"


def better_cluster(cluster: Cluster, part: Part, factor: float) -> Cluster:
    """The cluster with one part ``factor`` times as fast; latencies stay."""
    if part is Part.SITES:
        between = cluster.between_sites
        return replace(cluster, between_sites=None if between is None else _faster(between, factor))
    machines = tuple(_better(machine, part, factor) for machine in cluster.machines)
    return replace(cluster, machines=machines)


def better_prices(
    model: CostModel, cluster: Cluster, part: Part, factor: float
) -> CostModel | None:
    """Prices of that cluster; None if they can't be told from these prices.

    Prices that come from a cluster's figures are those of the better cluster. Measured ones know
    no cluster: their collectives keep the latency and shrink the rest; devices can't be told.

    Args:
        model: Prices of the cluster as it is.
        cluster: The cluster as it is.
        part: What gets better.
        factor: How much faster, such as 1.1.
    """
    if type(model) is AnalyticCostModel:
        faster = better_cluster(cluster, part, factor)
        slowest = faster.slowest_device(range(faster.num_devices))
        return AnalyticCostModel(faster, slowest, model.constants)
    if part is Part.DEVICES:
        return None
    if isinstance(model, HostCosts):
        return FasterHostLinks(model, FasterLinks(model, cluster, part, factor))
    return FasterLinks(model, cluster, part, factor)


@dataclass(frozen=True, slots=True)
class FasterLinks:
    """A price list whose collectives move bytes faster (a :class:`~cost_models.base.CostModel`).

    Attributes:
        model: The prices as they are.
        cluster: Tells which groups cross machines.
        part: Which links are faster.
        factor: How much.
    """

    model: CostModel
    cluster: Cluster
    part: Part
    factor: float

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return f"{self.model.source}; {self.part.value} {self.factor:g} times as fast"

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        """Seconds of one operator: unchanged."""
        return self.model.op_time_s(op, args, operands, results)

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of one collective: the latency stays, the rest shrinks."""
        time_s = self.model.collective_time_s(kind, payload_bytes, ranks)
        links = self.cluster.links_for(ranks)
        used = Part.INSIDE if links.inter is None else Part.BETWEEN
        if (Part.SITES if links.num_sites > 1 else used) is not self.part:
            return time_s
        latency_s = min(time_s, self.model.collective_time_s(kind, 0.0, ranks))
        return latency_s + (time_s - latency_s) / self.factor


@dataclass(frozen=True, slots=True)
class FasterHostLinks:
    """:class:`FasterLinks` of prices that also know what surrounds the programs.

    Attributes:
        host: The prices as they are, for what no link changes.
        links: The same with faster links.
    """

    host: HostCosts
    links: FasterLinks

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return self.links.source

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        """Seconds of one operator: unchanged."""
        return self.links.op_time_s(op, args, operands, results)

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of one collective: the latency stays, the rest shrinks."""
        return self.links.collective_time_s(kind, payload_bytes, ranks)

    def in_bursts(self) -> FasterLinks:
        """The same for collectives that are issued together."""
        return replace(self.links, model=self.host.in_bursts())

    def optimizer_time_s(self, name: str, num_tensors: int, num_bytes: float) -> float | None:
        """Seconds of an optimizer's step: unchanged."""
        return self.host.optimizer_time_s(name, num_tensors, num_bytes)

    def accumulate_time_s(self, num_tensors: int, num_bytes: float) -> float:
        """Seconds of adding a micro-batch's gradients: unchanged."""
        return self.host.accumulate_time_s(num_tensors, num_bytes)

    def waiting_s(self, num_ranks: int, num_waits: int, compute_s: float) -> float:
        """Seconds of waiting for the slowest rank: unchanged."""
        return self.host.waiting_s(num_ranks, num_waits, compute_s)

    def call_time_s(self, num_parameters: int) -> float:
        """Seconds of one call beyond its programs: unchanged."""
        return self.host.call_time_s(num_parameters)

    def shared_step_s(self, makespan_s: float, busy_s: Sequence[float], comm_s: float) -> float:
        """Seconds of a step whose ranks share cores."""
        return self.host.shared_step_s(makespan_s, busy_s, comm_s)


def _better(machine: Machine, part: Part, factor: float) -> Machine:
    if part is Part.INSIDE:
        return replace(machine, intra=_faster(machine.intra, factor))
    if part is Part.BETWEEN:
        return replace(machine, inter=_faster(machine.inter, factor))
    return replace(machine, device=_faster_device(machine.device, factor))


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)


def _faster_device(device: Device, factor: float) -> Device:
    return replace(
        device,
        peak_flops=tuple((dtype, factor * rate) for dtype, rate in device.peak_flops),
        memory_bandwidth_bytes_per_s=factor * device.memory_bandwidth_bytes_per_s,
    )
