"""Named devices with the machine and network they usually come in.

Every figure carries its origin: ``[data sheet]`` is NVIDIA's product sheet (dense rates),
``[published]`` a measurement that others published, ``[general]`` a figure that is typical for the
class and fitted to no single source. A user overrides any of them with a cluster file.

Link bandwidths are what collectives reach, so data-sheet figures are multiplied by an efficiency:

* NVLink 0.85 ``[fitted]``: nccl-tests reach about 0.8 on NVSwitch machines without in-network
  reduction, Calculon's A100 system description has 0.65.
* InfiniBand and RDMA 0.66 ``[fitted]``: 0.9 in Calculon's system description, which is for large
  messages and one group at a time.
* Plain Ethernet and EFA shares 0.33 ``[fitted]``: TCP without zero-copy.
* PCIe without peer-to-peer: a tenth to a fifth of the sheet's rate ``[fitted]``.
* PCIe between a device and its host's pinned memory: 0.8 of the sheet's rate ``[general]``.

``[fitted]``: on published training runs, rounded by hand. ``tests/bench/fit_constants.py`` says how
well these figures hold, fits its own from them, and predicts each source by a fit without it. A
figure that no run of a GPU type bears on is ``[general]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autopar.cluster.device import Device, DeviceKind, EfficiencyCurve, rates
from autopar.cluster.topology import Link, LinkKind, Machine
from autopar.units import GB, GIB, MICRO_S, TERA

NVLINK_EFFICIENCY = 0.85  # [fitted]
RDMA_EFFICIENCY = 0.66  # [fitted]
ETHERNET_EFFICIENCY = 0.33  # [fitted]
HOST_LINK_EFFICIENCY = 0.8  # [general]
PCIE_GB_PER_S = {3: 15.75, 4: 31.5, 5: 63.0}  # of 16 lanes each way, by generation [data sheet]

# [general] A context takes 0.5 GiB, NCCL and cuBLAS workspaces about as much.
CONTEXT_BYTES = 1 * GIB
# [general] Share that the caching allocator loses to fragmentation.
FRAGMENTATION_FRACTION = 0.04

KERNEL_OVERHEAD_S = 1.5 * MICRO_S  # [general] gap between two kernels whose launches are queued
# CPU figures: medians on one core of a 2.6 GHz AMD EPYC (Zen 4) with torch 2.13, one thread.
CPU_SOURCE = "default CPU figures [measured on one core of an AMD EPYC 9004, torch 2.13, gloo]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A device with its usual surroundings.

    Attributes:
        device: The device.
        machine_size: Devices in a machine; a larger count is spread over several machines.
        intra: Between devices of a machine.
        inter: Between machines, as one device sees it.
    """

    device: Device
    machine_size: int
    intra: Link
    inter: Link

    def machine(self, num_devices: int) -> Machine:
        """A machine with ``num_devices`` of the device."""
        return Machine(
            device=self.device, num_devices=num_devices, intra=self.intra, inter=self.inter
        )


@dataclass(frozen=True, slots=True)
class _Host:
    """Microseconds per eager operator and milliseconds per step."""

    operator_us: float
    step_ms: float


def _gpu(
    name: str,
    peaks: Mapping[str, float],
    *,
    memory_gib: float,
    bandwidth_gb_per_s: float,
    curve: EfficiencyCurve,
    host: _Host,
    pcie: int,
    source: str,
) -> Device:
    memory_bytes = int(memory_gib * GIB)
    return Device(
        name=name,
        kind=DeviceKind.CUDA,
        peak_flops=rates({dtype: rate * TERA for dtype, rate in peaks.items()}),
        memory_bytes=memory_bytes,
        reserved_bytes=CONTEXT_BYTES + int(FRAGMENTATION_FRACTION * memory_bytes),
        memory_bandwidth_bytes_per_s=bandwidth_gb_per_s * GB,
        launch_overhead_s=KERNEL_OVERHEAD_S,
        host_operator_s=host.operator_us * MICRO_S,
        host_step_s=host.step_ms * 1e-3,
        host_link_bytes_per_s=HOST_LINK_EFFICIENCY * PCIE_GB_PER_S[pcie] * GB,
        curve=curve,
        source=source,
    )


def _nvlink(gb_per_s: float, source: str, wires: int = 0) -> Link:
    return Link(
        wires=wires,
        kind=LinkKind.NVLINK,
        latency_s=1.5 * MICRO_S,  # [general] one step of an NCCL ring
        bandwidth_bytes_per_s=NVLINK_EFFICIENCY * gb_per_s * GB,
        source=f"{source}, x {NVLINK_EFFICIENCY} [fitted]",
    )


def _infiniband(gb_per_s: float, source: str) -> Link:
    return Link(
        kind=LinkKind.INFINIBAND,
        latency_s=8.0 * MICRO_S,  # [general] one step between machines
        bandwidth_bytes_per_s=RDMA_EFFICIENCY * gb_per_s * GB,
        source=f"{source}, x {RDMA_EFFICIENCY} [fitted]",
    )


def _ethernet(gb_per_s: float, source: str) -> Link:
    return Link(
        kind=LinkKind.ETHERNET,
        latency_s=25.0 * MICRO_S,  # [general] TCP or EFA
        bandwidth_bytes_per_s=ETHERNET_EFFICIENCY * gb_per_s * GB,
        source=f"{source}, x {ETHERNET_EFFICIENCY} [fitted]",
    )


def _pcie(gb_per_s: float, source: str) -> Link:
    return Link(
        kind=LinkKind.PCIE,
        latency_s=8.0 * MICRO_S,  # [general] staged through host memory
        bandwidth_bytes_per_s=gb_per_s * GB,
        source=source,
    )


# Multiprocessors: A100 108, H100 and H200 132, V100 80, L4 58, A10G 80, T4 40 [data sheet]. The
# matmul fraction is bound by the maximum achievable rate where that is published (A100 271.2 of
# 312, H100 794.5 of 989: ml-engineering); below it, and for the other fractions, [fitted] means
# fitted on published training runs of that GPU type and rounded; tests/bench/fit_constants.py fits
# again.
_TENSOR_CORES = EfficiencyCurve(half_k=16.0, wave_share=0.1, alignment=8)  # [fitted] on all
_A100_CURVE = replace(
    _TENSOR_CORES,
    num_units=108,
    matmul_fraction=0.77,  # [fitted]
    attention_fraction=0.55,  # [fitted]
    attention_backward_fraction=0.32,  # [fitted]
    memory_fraction=0.73,  # [fitted]
)
_HOPPER_CURVE = replace(
    _TENSOR_CORES,
    num_units=132,
    matmul_fraction=0.735,  # [fitted]
    attention_fraction=0.35,  # [fitted]
    attention_backward_fraction=0.21,  # [fitted]
    memory_fraction=0.95,  # [fitted]
)
# The same chip with a power limit of 500 W and slower memory.
_HOPPER_500W_CURVE = replace(
    _HOPPER_CURVE,
    matmul_fraction=0.64,  # [fitted]
    attention_fraction=0.26,  # [fitted]
    attention_backward_fraction=0.155,  # [fitted]
    memory_fraction=0.93,  # [fitted]
)
_A100_HOST = _Host(operator_us=51, step_ms=9.4)  # [fitted] on runs of small models
_HOPPER_HOST = _Host(operator_us=15, step_ms=8)  # [general], [fitted]
_V100_HOST = _Host(operator_us=15, step_ms=1)  # [general]
_L4_HOST = _Host(operator_us=20, step_ms=50)  # [general]
_A10G_HOST = _Host(operator_us=20, step_ms=50)  # [general]
_T4_HOST = _Host(operator_us=20, step_ms=144)  # [general], [fitted]

_A100_PEAKS = {
    "float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312,
}  # fmt: skip
_HOPPER_PEAKS = {
    "float64": 34, "float32": 67, "tf32": 494.5, "bfloat16": 989, "float16": 989, "float8": 1979,
}  # fmt: skip
_V100_PEAKS = {"float64": 7.8, "float32": 15.7, "float16": 125}

_DGX_A100_INTRA = _nvlink(300, "NVLink3 300 GB/s per direction [data sheet]")
_DGX_A100_INTER = _infiniband(25, "one HDR 200 Gb/s adapter per GPU, as in a DGX A100 [data sheet]")
_DGX_H100_INTRA = _nvlink(450, "NVLink4 450 GB/s per direction [data sheet]")
_DGX_H100_INTER = _infiniband(50, "one NDR 400 Gb/s adapter per GPU, as in a DGX H100 [data sheet]")


def _v100(name: str, memory_gib: float) -> Preset:
    return Preset(
        device=_gpu(
            name,
            _V100_PEAKS,
            memory_gib=memory_gib,
            bandwidth_gb_per_s=900,
            curve=replace(
                _TENSOR_CORES,
                num_units=80,
                matmul_fraction=0.667,  # [fitted]
                attention_fraction=0.3,  # [general]
                attention_backward_fraction=0.2,  # [general]
                memory_fraction=0.79,  # [fitted]
            ),
            host=_V100_HOST,
            pcie=3,
            source="NVIDIA V100 SXM2 [data sheet]; no bfloat16, it runs at the rate of float32",
        ),
        machine_size=8,
        intra=_nvlink(150, "NVLink2, six wires of 25 GB/s per direction [data sheet]", wires=6),
        inter=_ethernet(3.125, "25 Gb/s per GPU [general]; some clouds give 3 Gb/s"),
    )


def _a100(name: str, memory_gib: float, bandwidth_gb_per_s: float) -> Preset:
    return Preset(
        device=_gpu(
            name,
            _A100_PEAKS,
            memory_gib=memory_gib,
            bandwidth_gb_per_s=bandwidth_gb_per_s,
            curve=_A100_CURVE,
            host=_A100_HOST,
            pcie=4,
            source="NVIDIA A100 SXM4 [data sheet]",
        ),
        machine_size=8,
        intra=_DGX_A100_INTRA,
        inter=_DGX_A100_INTER,
    )


def _hopper(
    name: str,
    memory_gib: float,
    bandwidth_gb_per_s: float,
    source: str,
    curve: EfficiencyCurve = _HOPPER_CURVE,
) -> Preset:
    return Preset(
        device=_gpu(
            name,
            _HOPPER_PEAKS,
            memory_gib=memory_gib,
            bandwidth_gb_per_s=bandwidth_gb_per_s,
            curve=curve,
            host=_HOPPER_HOST,
            pcie=5,
            source=source,
        ),
        machine_size=8,
        intra=_DGX_H100_INTRA,
        inter=_DGX_H100_INTER,
    )


_CPU = Preset(
    device=Device(
        name="cpu",
        kind=DeviceKind.CPU,
        peak_flops=rates({"float64": 0.045 * TERA, "float32": 0.1 * TERA, "bfloat16": 0.2 * TERA}),
        memory_bytes=8 * GIB,  # an assumption: a local cluster divides what the machine has
        memory_bandwidth_bytes_per_s=20 * GB,
        launch_overhead_s=5.0 * MICRO_S,
        curve=EfficiencyCurve(
            matmul_fraction=0.95,
            attention_fraction=0.5,
            conv_fraction=0.6,
            memory_fraction=1.0,
            tile=1,
            half_tiles=0,
            half_k=0,
        ),
        source=CPU_SOURCE,
    ),
    machine_size=1 << 20,  # all CPU ranks share one machine unless a spec says otherwise
    # gloo over loopback, two ranks on two cores: all_reduce of 1 KiB 0.4 ms (two steps), of
    # 32 MiB 22 ms (1.5 GB/s). With more ranks than cores both get worse in proportion.
    intra=Link(
        kind=LinkKind.LOOPBACK,
        latency_s=200.0 * MICRO_S,
        bandwidth_bytes_per_s=1.5 * GB,
        source=CPU_SOURCE,
    ),
    inter=Link(
        kind=LinkKind.ETHERNET,
        latency_s=250.0 * MICRO_S,
        bandwidth_bytes_per_s=1.0 * GB,
        source="gloo over 10 Gb/s Ethernet [general]",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        # Memory is what the driver reports: 80 "GB" of HBM are 80 GiB, ECC takes its part of
        # GDDR6 boards.
        "a100-40gb": _a100("a100-40gb", 39.5, 1555),
        "a100-80gb": _a100("a100-80gb", 79.2, 2039),
        "h100-sxm": _hopper("h100-sxm", 79.2, 3350, "NVIDIA H100 SXM5 [data sheet]"),
        "h100-96gb": _hopper(
            "h100-96gb",
            94.5,
            2400,
            "NVIDIA H100 with 96 GB of HBM2e and 500 W [published: torchtitan's benchmarks]",
            _HOPPER_500W_CURVE,
        ),
        "h200": _hopper("h200", 139.8, 4800, "NVIDIA H200 SXM [data sheet]"),
        "v100-16gb": _v100("v100-16gb", 15.8),
        "v100-32gb": _v100("v100-32gb", 31.7),
        "l4": Preset(
            device=_gpu(
                "l4",
                {"float64": 0.47, "float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121},
                memory_gib=22.2,
                bandwidth_gb_per_s=300,
                # [general] 72 W: the clock drops to about half under sustained matmuls
                curve=replace(
                    _TENSOR_CORES,
                    num_units=58,
                    matmul_fraction=0.5,
                    attention_fraction=0.4,
                    attention_backward_fraction=0.3,
                ),
                host=_L4_HOST,
                pcie=4,
                source="NVIDIA L4 [data sheet], dense = half of the printed sparse rates",
            ),
            machine_size=8,
            intra=_pcie(4.0, "3 to 4.7 GB/s between L4s of one machine [published: Mist]"),
            inter=_ethernet(1.56, "100 Gb/s shared by 8 GPUs [general]"),
        ),
        "a10g": Preset(
            device=_gpu(
                "a10g",
                {"float64": 0.49, "float32": 31.2, "bfloat16": 70, "float16": 70},
                memory_gib=22.1,
                bandwidth_gb_per_s=600,
                curve=replace(
                    _TENSOR_CORES,
                    num_units=80,
                    matmul_fraction=0.76,  # [fitted]
                    attention_fraction=0.45,
                    attention_backward_fraction=0.3,
                    memory_fraction=0.9,  # [fitted]
                ),
                host=_A10G_HOST,
                pcie=4,
                source="NVIDIA A10G [data sheet]; 70 TFLOP/s dense half precision as listed by "
                "llm-analysis, while the A10 (no G) has 125",
            ),
            machine_size=8,
            intra=_pcie(2.35, "PCIe4 x16, 31.5 GB/s [data sheet]; 2.35 GB/s among A10Gs [fitted]"),
            inter=_ethernet(1.56, "100 Gb/s shared by 8 GPUs, as in AWS g5.48xlarge [published]"),
        ),
        "t4": Preset(
            device=_gpu(
                "t4",
                {"float64": 0.25, "float32": 8.1, "float16": 65},
                memory_gib=14.7,
                bandwidth_gb_per_s=320,
                curve=replace(
                    _TENSOR_CORES,
                    num_units=40,
                    matmul_fraction=0.34,  # [fitted]
                    attention_fraction=0.25,
                    attention_backward_fraction=0.2,
                    memory_fraction=0.62,  # [fitted]
                ),
                host=_T4_HOST,
                pcie=3,
                source="NVIDIA T4 [data sheet]; no bfloat16, it runs at the rate of float32",
            ),
            machine_size=4,
            intra=_pcie(3.0, "PCIe3 x16, 15.75 GB/s [data sheet]; 3.0 GB/s among T4s [fitted]"),
            inter=_ethernet(1.56, "50 Gb/s shared by 4 GPUs, as in AWS g4dn.12xlarge [published]"),
        ),
        "cpu": _CPU,
    }
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {"h100": "h100-sxm", "h100-80gb": "h100-sxm", "h200-sxm": "h200"}
)
