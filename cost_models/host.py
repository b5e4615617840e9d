"""What the host adds to a step: it issues operators one by one, and the device may wait for it.

An eager step issues every operator of forward and backward from the host, some microseconds each
(Python, dispatch, autograd). The queue hides that while kernels are longer; a pass of short kernels
takes as long as the host. Once per step the host also does what nothing hides: it fetches a batch,
reads the gradients' norm, scales the loss, logs. Source: ours; both figures are properties of the
machine (:attr:`~autopar.cluster.device.Device.host_operator_s`, ``host_step_s``).
"""

from __future__ import annotations

from autopar.cluster.device import Device
from autopar.errors import ConfigError
from cost_models.constants import CONSTANTS, PriceConstants
from cost_models.kernels import Backend


def issued_s(
    num_operators: float,
    device: Device,
    backend: Backend = Backend.EAGER,
    constants: PriceConstants = CONSTANTS,
) -> float:
    """Seconds that the host needs to issue so many operators, collectives among them.

    Args:
        num_operators: At least 0.
        device: Whose host.
        backend: A compiled program issues kernels without dispatch and autograd.
        constants: Of the prices.
    """
    if num_operators < 0:
        raise ConfigError(f"num_operators is {num_operators}, must be at least 0")
    share = constants.compiled_host_share if backend is Backend.COMPILED else 1.0
    return num_operators * share * device.host_operator_s


def with_host_s(
    device_s: float,
    num_operators: float,
    device: Device,
    backend: Backend = Backend.EAGER,
    constants: PriceConstants = CONSTANTS,
) -> float:
    """Seconds of a pass: the longer of its kernels and of the host that issues them.

    >>> from autopar.cluster.device import DeviceKind
    >>> slow_host = Device(name="d", kind=DeviceKind.CUDA, peak_flops=(("float32", 1.0),),
    ...                    memory_bytes=1, memory_bandwidth_bytes_per_s=1.0, launch_overhead_s=0.0,
    ...                    host_operator_s=2e-5, source="made up")
    >>> with_host_s(1e-3, 100, slow_host)
    0.002
    """
    return max(device_s, issued_s(num_operators, device, backend, constants))
