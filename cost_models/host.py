"""What the host adds to a step: it issues operators one by one, and the device may wait for it.

An eager step issues every operator of forward and backward from the host, some microseconds each
(Python, dispatch, autograd). The queue hides that while kernels are longer; a step of short
kernels takes as long as the host. Source: ours; the seconds per operator are a property of the
machine (:attr:`~autopar.cluster.device.Device.host_operator_s`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.cluster.device import Device
from autopar.errors import ConfigError
from cost_models.kernels import Backend

# Share of an eager operator's host time that a compiled program's kernel costs: a generated
# wrapper starts it, no autograd and no dispatch. [general]
HOST_SHARE: Mapping[Backend, float] = MappingProxyType({Backend.EAGER: 1.0, Backend.COMPILED: 0.2})


def issued_s(num_operators: float, device: Device, backend: Backend = Backend.EAGER) -> float:
    """Seconds that the host needs to issue so many operators (or kernels, if compiled)."""
    if num_operators < 0:
        raise ConfigError(f"num_operators is {num_operators}, must be at least 0")
    return num_operators * device.host_operator_s * HOST_SHARE[backend]


def with_host_s(
    device_s: float, num_operators: float, device: Device, backend: Backend = Backend.EAGER
) -> float:
    """Seconds of a program: the longer of its kernels and of the host that issues them.

    >>> from autopar.cluster.device import DeviceKind
    >>> slow_host = Device(name="d", kind=DeviceKind.CUDA, peak_flops=(("float32", 1.0),),
    ...                    memory_bytes=1, memory_bandwidth_bytes_per_s=1.0, launch_overhead_s=0.0,
    ...                    host_operator_s=2e-5, source="made up")
    >>> with_host_s(1e-3, 100, slow_host)
    0.002
    """
    return max(device_s, issued_s(num_operators, device, backend))
