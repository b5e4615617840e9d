"""What the host adds to a step: it issues operators one by one, and the device may wait for it.

An eager step issues every operator of forward and backward from the host, some microseconds each
(Python, dispatch, autograd). The queue hides that while kernels are longer; a step of short
kernels takes as long as the host. Source: ours; the seconds per operator are a property of the
machine (:attr:`~autopar.cluster.device.Device.host_operator_s`).
"""

from __future__ import annotations

from autopar.cluster.device import Device
from autopar.errors import ConfigError
from cost_models.constants import CONSTANTS, PriceConstants
from cost_models.kernels import Backend


def issued_s(
    num_operators: float,
    num_collectives: float,
    device: Device,
    backend: Backend = Backend.EAGER,
    constants: PriceConstants = CONSTANTS,
) -> float:
    """Seconds that the host needs to issue so many operators and collectives.

    Args:
        num_operators: Kernels that are no collectives, at least 0.
        num_collectives: At least 0.
        device: Whose host.
        backend: A compiled program issues kernels without dispatch and autograd.
        constants: Of the prices.
    """
    if num_operators < 0 or num_collectives < 0:
        raise ConfigError(
            f"num_operators is {num_operators}, num_collectives {num_collectives}; "
            "both must be at least 0"
        )
    share = constants.compiled_host_share if backend is Backend.COMPILED else 1.0
    issued = num_operators * share + num_collectives * constants.collective_operators
    return issued * device.host_operator_s


def with_host_s(device_s: float, host_s: float) -> float:
    """Seconds of a program: the longer of its kernels and of the host that issues them.

    >>> with_host_s(1e-3, 2e-3)
    0.002
    """
    return max(device_s, host_s)
