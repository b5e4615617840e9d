"""One accelerator model: peak rates, memory, and what share of the peak real kernels reach.

Rates are dense (without sparsity). ``float32`` is the rate of plain float32 arithmetic, which is
torch's default for matmuls; TF32 has a key of its own that nothing uses unless a user's cluster
file puts it under ``float32``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite

from autopar.errors import ConfigError

MIN_TILE = 16  # edge of a tensor-core fragment


class DeviceKind(StrEnum):
    """What torch calls the device type."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyCurve:
    """Share of the data-sheet peak that a kernel of a given size reaches.

    A matmul of ``b x (m, k) @ (k, n)`` is cut into output tiles. Without ``num_units`` it reaches
    ``matmul_fraction * tiles / (tiles + half_tiles) * k / (k + half_k)`` of the peak: few tiles
    leave multiprocessors idle, a short ``k`` does not hide the start of each tile. Where k is
    beyond ``split_k`` the tiles are cut along k as well. Sizes below a tile take a smaller one:
    the next power of two, at least ``MIN_TILE``. With ``num_units`` the tiles are dealt to so many
    multiprocessors in waves (:mod:`cost_models.compute`), and ``half_tiles`` and ``split_k`` play
    no part.

    Attributes:
        matmul_fraction: Of large matmuls, in (0, 1].
        attention_fraction: Of fused attention, forward, heads of 128, long sequences, in (0, 1].
        attention_backward_fraction: The same of its backward.
        conv_fraction: Of large convolutions, in (0, 1].
        memory_fraction: Of the memory bandwidth, for streaming kernels, in (0, 1].
        tile: Edge of an output tile, in elements.
        half_tiles: Tiles at which half of the fraction is reached.
        half_k: Inner size at which half of the fraction is reached.
        split_k: Inner size that one tile works on at most.
        num_units: Multiprocessors; 0 where waves don't matter.
        wave_share: How much of a last wave that is not full is lost, from 0 (the kernel next in
            line fills it) to 1.
        alignment: Sizes are worked on as the next multiple of it (vector loads).
    """

    matmul_fraction: float = 0.72
    attention_fraction: float = 0.45
    attention_backward_fraction: float = 0.4
    conv_fraction: float = 0.5
    memory_fraction: float = 0.85
    tile: int = 128
    half_tiles: float = 40.0
    half_k: float = 64.0
    split_k: int = 4096
    num_units: int = 0
    wave_share: float = 0.0
    alignment: int = 1

    def __post_init__(self) -> None:
        for name in (
            "matmul_fraction", "attention_fraction", "attention_backward_fraction",
            "conv_fraction", "memory_fraction",
        ):  # fmt: skip
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"EfficiencyCurve: {name} is {value}, not in (0, 1]")
        if self.tile < 1 or self.split_k < 1 or self.half_tiles < 0 or self.half_k < 0:
            raise ConfigError(
                f"EfficiencyCurve: tile {self.tile} and split_k {self.split_k} must be at least 1, "
                f"half_tiles {self.half_tiles} and half_k {self.half_k} at least 0"
            )
        if self.num_units < 0 or self.alignment < 1 or not 0.0 <= self.wave_share <= 1.0:
            raise ConfigError(
                f"EfficiencyCurve: num_units {self.num_units} must be at least 0, alignment "
                f"{self.alignment} at least 1, wave_share {self.wave_share} in [0, 1]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU process.

    Attributes:
        name: Such as ``"h100-sxm"``.
        kind: Device type.
        peak_flops: Dense FLOP/s by dtype name, sorted by name. A dtype that is missing runs at the
            rate of float32 (hardware without bfloat16 emulates it).
        memory_bytes: What the driver reports as the total.
        reserved_bytes: Part of it that a plan may not use: context, libraries, fragmentation.
        memory_bandwidth_bytes_per_s: Data-sheet bandwidth of the device's memory.
        launch_overhead_s: Seconds that each kernel costs whatever its size.
        host_operator_s: Seconds that the host needs to issue one operator of an eager training
            step, forward or backward; a step whose kernels are shorter waits for the host.
        host_step_s: Seconds per training step of host work that nothing hides.
        host_link_bytes_per_s: Bandwidth of copies between the device and its host's memory, each
            way; 0 where it is not known, or where the device has no memory of its own.
        curve: Share of the peaks that kernels reach.
        source: Where the figures come from.
        cost_per_hour: Price of one such device for an hour, in a currency of the user's; None where
            nobody gave one. Presets have none.
    """

    name: str
    kind: DeviceKind
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    launch_overhead_s: float
    source: str
    reserved_bytes: int = 0
    host_operator_s: float = 0.0
    host_step_s: float = 0.0
    host_link_bytes_per_s: float = 0.0
    curve: EfficiencyCurve = EfficiencyCurve()
    cost_per_hour: float | None = None

    def __post_init__(self) -> None:
        if "float32" not in dict(self.peak_flops):
            raise ConfigError(
                f"device {self.name!r}: peak_flops lists {[d for d, _ in self.peak_flops]}, "
                "float32 must be among them"
            )
        numbers = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            **{f"peak_flops[{dtype!r}]": rate for dtype, rate in self.peak_flops},
        }
        for name, value in numbers.items():
            if not value > 0:
                raise ConfigError(f"device {self.name!r}: {name} is {value}, must be above 0")
        for name in (
            "launch_overhead_s", "host_operator_s", "host_step_s", "host_link_bytes_per_s"
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"device {self.name!r}: {name} is {getattr(self, name)}, must be at least 0"
                )
        cost = self.cost_per_hour
        if cost is not None and not (isfinite(cost) and cost >= 0):
            raise ConfigError(
                f"device {self.name!r}: cost_per_hour is {cost}, must be a number of at least 0"
            )
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ConfigError(
                f"device {self.name!r}: reserved_bytes is {self.reserved_bytes}, "
                f"must be at least 0 and below memory_bytes ({self.memory_bytes})"
            )

    @property
    def usable_bytes(self) -> int:
        """Bytes that a plan may fill."""
        return self.memory_bytes - self.reserved_bytes

    def with_share(self, share: float) -> Device:
        """This device as a process that has a share of a core."""
        if share == 1.0:
            return self
        return replace(
            self,
            peak_flops=tuple((dtype, rate * share) for dtype, rate in self.peak_flops),
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s * share,
            launch_overhead_s=self.launch_overhead_s / share,
        )

    def at_speed(self, factor: float) -> Device:
        """This device if it computes ``factor`` times as fast, under a name of its own.

        Args:
            factor: 0.5 takes twice as long for everything but messages.

        Raises:
            ConfigError: The factor is not above 0, or no number.
        """
        if not (isfinite(factor) and factor > 0):
            raise ConfigError(
                f"device {self.name!r}: speed is {factor:g}, must be a number above 0; leave a "
                "machine that does not work out of the cluster"
            )
        if factor == 1:
            return self
        name, _, before = self.name.partition("@")
        return replace(
            self,
            name=f"{name}@{factor * float(before or 1):g}",
            peak_flops=tuple((dtype, rate * factor) for dtype, rate in self.peak_flops),
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s * factor,
            launch_overhead_s=self.launch_overhead_s / factor,
            host_operator_s=self.host_operator_s / factor,
            source=f"{self.source}; at {factor:g} of its speed",
        )

    def peak_flops_for(self, dtype: str) -> float:
        """Dense FLOP/s of arithmetic in ``dtype``; that of float32 if the device lacks it."""
        rate = fallback = 0.0
        for name, value in self.peak_flops:
            if name == dtype:
                rate = value
            if name == "float32":
                fallback = value
        return rate or fallback


def rates(table: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """``table`` in the form of :attr:`Device.peak_flops`.

    >>> rates({"float32": 2.0, "bfloat16": 8.0})
    (('bfloat16', 8.0), ('float32', 2.0))
    """
    return tuple(sorted(table.items()))
