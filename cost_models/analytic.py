"""The cost model that answers from a cluster's figures: roofline and alpha-beta."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cluster.device import Device, DeviceKind
from autopar.cluster.topology import Cluster, GroupLinks, Link
from autopar.ir.graph import Arg, Meta
from cost_models.collectives import Algorithm, collective_kind, collective_time_s
from cost_models.compute import work_time_s
from cost_models.constants import CONSTANTS, PriceConstants
from cost_models.flops import work_of


class AnalyticCostModel:
    """Prices for one cluster (a :class:`~cost_models.base.CostModel`).

    Attributes:
        cluster: The cluster.
        device: The device that operators are priced on.
        constants: What belongs to no device.
    """

    def __init__(
        self,
        cluster: Cluster,
        device: Device | None = None,
        constants: PriceConstants = CONSTANTS,
    ) -> None:
        """Prices for ``cluster``; operators on its slowest device if ``device`` is left out."""
        self.cluster = cluster
        self.constants = constants
        self.device = device or cluster.slowest_device(range(cluster.num_devices))
        self._links: dict[tuple[int, ...], tuple[GroupLinks, Link]] = {}

    @property
    def source(self) -> str:
        """Where the figures come from."""
        return f"roofline and alpha-beta for {self.cluster}; {self.device.source}"

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        """Seconds of one operator on :attr:`device`."""
        return work_time_s(work_of(op, args, operands, results), self.device)

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of one collective among ``ranks``."""
        links, link = self.links(ranks)
        is_cpu = self.device.kind is DeviceKind.CPU
        time_s = collective_time_s(
            collective_kind(kind),
            payload_bytes,
            links=links,
            link=link,
            algorithm=Algorithm.RING if is_cpu else Algorithm.BEST,
        )
        # gloo's call is part of its links' latency
        return time_s if is_cpu or not time_s else time_s + self.constants.collective_call_s

    def prices_like(self, other: object) -> bool:
        """Whether another model's device and constants are these."""
        return isinstance(other, AnalyticCostModel) and (self.device, self.constants) == (
            other.device,
            other.constants,
        )

    def at_work(self, num_ranks: int) -> AnalyticCostModel:
        """The prices while only the first ``num_ranks`` ranks work; itself if they are the same."""
        before, cluster = self.cluster, self.cluster.at_work(num_ranks)
        pairs = zip(before.machines, cluster.machines, strict=True)
        if all((a.device, a.intra) == (b.device, b.intra) for a, b in pairs):
            return self
        is_own = self.device not in before.devices  # prices of a device that was named
        return AnalyticCostModel(cluster, self.device if is_own else None, self.constants)

    def links(self, ranks: Sequence[int]) -> tuple[GroupLinks, Link]:
        """The links of a group by level, and the one that bounds a ring over it."""
        key = tuple(ranks)
        found = self._links.get(key)
        if found is None:
            found = self.cluster.links_for(key), self.cluster.link_for(key)
            self._links[key] = found
        return found
