"""What prediction asks of a price list, and the price list that :mod:`cost_models` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autopar.cluster.topology import Cluster
from autopar.validation.blocks import Collective
from autopar.validation.family import KernelFamily
from cost_models.analytic import AnalyticCostModel
from cost_models.compute import work_time_s
from cost_models.flops import Work


class Prices(Protocol):
    """Seconds of kernels and collectives on one cluster for one family."""

    def work_s(self, work: Work) -> float:
        """Seconds of one kernel."""
        ...

    def collective_s(self, item: Collective, ranks: Sequence[int]) -> float:
        """Seconds of one collective among ``ranks``; of a message for ``"p2p"``."""
        ...

    def beside_s(self, compute_s: float, comm_s: float) -> float:
        """Seconds until both are done if they run at the same time."""
        ...


class ClusterPrices:
    """The cost models' prices (a :class:`Prices`)."""

    def __init__(self, cluster: Cluster, family: KernelFamily) -> None:
        """Prices on ``cluster`` for kernels of ``family``."""
        self.model = AnalyticCostModel(cluster)
        self.family = family

    def work_s(self, work: Work) -> float:
        """Seconds of one kernel."""
        return work_time_s(work, self.model.device)

    def collective_s(self, item: Collective, ranks: Sequence[int]) -> float:
        """Seconds of one collective."""
        return self.model.collective_time_s(item.kind, item.payload_bytes, ranks)

    def beside_s(self, compute_s: float, comm_s: float) -> float:
        """The longer of both."""
        return max(compute_s, comm_s)
