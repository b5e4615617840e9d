"""Constants of prices that belong to no device: what a call, an overlap or a kernel costs.

A figure that a device or a link has is in its description (:mod:`autopar.cluster.presets`). These
hold for all; each is a property of a kind of operation or of a named kernel, never of who measured
it. ``[fitted]``: on published training runs of all GPU types together, rounded by hand
(``tests/bench/fit_constants.py`` fits again); ``[published]``: from the source named;
``[general]``: typical for the class.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceConstants:
    """See the module's text.

    Attributes:
        collective_call_s: Seconds that a collective on GPUs costs beside its transfer: its kernel
            is started and the ranks wait for each other.
        slowdown: Share that compute loses while a collective runs beside it, in [0, 1]: the
            library takes multiprocessors and memory bandwidth.
        host_blend: How sharply the longer of device and host decides, at least 1: device time ``d``
            and host time ``h`` of a pass take ``(d^p + h^p)^(1/p)``, since either waits for the
            other where a pass begins, ends or synchronises.
        compiled_host_share: Host time of a compiled program's kernel, in eager operators.
        pipelined_share: Share of a collective's time that shows where it is cut into pieces that
            run beside pieces of the matmul before or after it (asynchronous tensor parallelism).
        flash_1_share: Rate of FlashAttention 1 in that of version 2.
        flash_triton_share: Rate of its Triton form in that of version 2.
        rowwise_share: Rate of row-wise scaled 8-bit matmuls in that of tensor-wise scaled ones.
    """

    collective_call_s: float = 13e-6  # [fitted]
    slowdown: float = 0.44  # [fitted]
    host_blend: float = 3.0  # [fitted]
    compiled_host_share: float = 0.2  # [general]
    pipelined_share: float = 0.6  # [fitted]
    flash_1_share: float = 0.46  # [fitted; published: version 2 is 1.7 to 3 times as fast]
    flash_triton_share: float = 0.86  # [fitted]
    rowwise_share: float = 0.49  # [fitted]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ConfigError(f"{field.name} is {value}, must be at least 0")
        for name in ("pipelined_share", "flash_1_share", "flash_triton_share", "rowwise_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be in (0, 1]")
        if self.host_blend < 1:
            raise ConfigError(f"host_blend is {self.host_blend}, must be at least 1")
        if self.slowdown > 1:
            raise ConfigError(f"slowdown is {self.slowdown}, must be in [0, 1]")


CONSTANTS = PriceConstants()
