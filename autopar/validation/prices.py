"""What prediction asks of a price list, and the price list that :mod:`cost_models` is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from autopar.cluster.topology import Cluster
from autopar.validation.blocks import Collective
from autopar.validation.family import KernelFamily
from cost_models.analytic import AnalyticCostModel
from cost_models.compute import work_time_s
from cost_models.constants import CONSTANTS, PriceConstants
from cost_models.flops import Work
from cost_models.host import with_host_s
from cost_models.kernels import FLOAT8, kernel_works
from cost_models.overlap import overlapped_s


class Prices(Protocol):
    """Seconds of kernels and collectives on one cluster for one family."""

    def work_s(self, work: Work) -> float:
        """Seconds of one kernel."""
        ...

    def collective_s(self, item: Collective, ranks: Sequence[int]) -> float:
        """Seconds of one collective among ``ranks``; of a message for ``"p2p"``."""
        ...

    def issued_s(self, device_s: float, num_operators: float) -> float:
        """Seconds of a pass whose kernels take ``device_s``, the host's issuing included."""
        ...

    def beside_s(self, compute_s: float, comm_s: float) -> float:
        """Seconds until both are done if they run at the same time."""
        ...

    def step_s(self) -> float:
        """Seconds per step of host work that nothing hides."""
        ...


class ClusterPrices:
    """The cost models' prices (a :class:`Prices`)."""

    def __init__(
        self, cluster: Cluster, family: KernelFamily, constants: PriceConstants = CONSTANTS
    ) -> None:
        """Prices on ``cluster`` for kernels of ``family``."""
        self.model = AnalyticCostModel(cluster, constants=constants)
        self.family = family
        self.constants = constants

    def work_s(self, work: Work) -> float:
        """Seconds of one kernel."""
        device, kernels = self.model.device, self.family.kernels
        if kernels.float8 is not None and work.dtype != FLOAT8:
            kernels = replace(kernels, float8=None)
        return sum(work_time_s(w, device) for w in kernel_works(work, kernels, self.constants))

    def collective_s(self, item: Collective, ranks: Sequence[int]) -> float:
        """Seconds of one collective."""
        return self.model.collective_time_s(item.kind, item.payload_bytes, ranks)

    def issued_s(self, device_s: float, num_operators: float) -> float:
        """The longer of device and host."""
        backend = self.family.kernels.backend
        return with_host_s(device_s, num_operators, self.model.device, backend, self.constants)

    def beside_s(self, compute_s: float, comm_s: float) -> float:
        """Compute loses a share beside communication."""
        return overlapped_s(compute_s, comm_s, slowdown=self.constants.slowdown)

    def step_s(self) -> float:
        """The device's host time per step."""
        return self.model.device.host_step_s
