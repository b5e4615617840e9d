"""A record's hardware as a cluster: data-sheet figures by GPU name, and what the record states.

Memory size, memory bandwidth and adapter bandwidth of a record win over the preset's; what neither
says is the GPU type's usual machine, and the cluster lists it among its assumptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cluster.presets import ETHERNET_EFFICIENCY, PRESETS, RDMA_EFFICIENCY
from autopar.cluster.topology import Cluster, Link, LinkKind, Machine
from autopar.units import GB, GIB, MICRO_S
from autopar.validation.errors import SkipRecord

# First words of a GPU's name -> presets by memory in GB; "" for any.
GPUS: Mapping[str, Mapping[int, str]] = {
    "A100": {40: "a100-40gb", 80: "a100-80gb"},
    "H100": {80: "h100-sxm", 96: "h100-96gb"},
    "H800": {80: "h100-sxm"},
    "H200": {141: "h200"},
    "V100": {16: "v100-16gb", 32: "v100-32gb"},
    "A10G": {24: "a10g"},
    "L4": {24: "l4"},
    "T4": {16: "t4"},
}
_ETHERNET_WORDS = ("ethernet", "aws", "tcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a record says of its machines; None where it is silent."""

    gpu: str
    num_gpus: int
    per_node: int | None = None
    memory_gb: float | None = None
    memory_gb_per_s: float | None = None
    intra_gb_per_s: float | None = None
    inter_gb_per_s: float | None = None
    network: str = ""


def cluster_of(stated: Stated) -> Cluster:
    """The cluster that a run used.

    Raises:
        SkipRecord: The GPU is not known.
    """
    preset = PRESETS[_preset_name(stated)]
    device, assumptions = preset.device, []
    if stated.memory_gb_per_s is not None:
        device = replace(device, memory_bandwidth_bytes_per_s=stated.memory_gb_per_s * GB)
    if stated.memory_gb is not None:
        # the driver reports a little less than the GiB that are named GB
        usual = round(device.memory_bytes / GIB)
        if abs(stated.memory_gb - usual) > 2:
            share = device.memory_bytes / (usual * GIB)
            memory_bytes = int(stated.memory_gb * GIB * min(1.0, share))
            if memory_bytes <= device.reserved_bytes:
                raise SkipRecord(f"hardware.mem_gb is {stated.memory_gb}, less than a driver keeps")
            device = replace(device, memory_bytes=memory_bytes)
    per_node = stated.per_node
    if per_node is None:
        per_node = preset.machine_size
        assumptions.append(f"{per_node} {stated.gpu} in a machine")
    intra = preset.intra
    intra_gb = stated.intra_gb_per_s or _CUT_NVLINK_GB.get(_first_word(stated.gpu))
    if intra_gb is not None and intra.kind is LinkKind.NVLINK:
        scale = intra_gb / _NVLINK_GB.get(preset.device.name, intra_gb)
        intra = replace(intra, bandwidth_bytes_per_s=intra.bandwidth_bytes_per_s * scale)
    inter = _inter(stated, preset.inter)
    if stated.inter_gb_per_s is None:
        assumptions.append(f"between machines: {preset.inter.source}")
    full, rest = divmod(stated.num_gpus, per_node)
    sizes = [per_node] * full + ([rest] if rest else [])
    machines = tuple(
        Machine(device=device, num_devices=size, intra=intra, inter=inter) for size in sizes
    )
    return Cluster(machines=machines, assumptions=tuple(assumptions))


# Data-sheet GB/s per direction behind the presets' links, to scale a record's own figure.
_NVLINK_GB: Mapping[str, float] = {
    "a100-40gb": 300, "a100-80gb": 300, "h100-sxm": 450, "h100-96gb": 450, "h200": 450,
    "v100-16gb": 150, "v100-32gb": 150,
}  # fmt: skip


# GPUs that are sold with fewer links than the preset that they are otherwise like. [data sheet]
_CUT_NVLINK_GB: Mapping[str, float] = {"H800": 200}
_NVLINK_CARDS = ("A100", "H100", "H800", "H200", "V100")
_OTHER_FORMS = re.compile(r"PCI|\bNVL\b")


def _first_word(gpu: str) -> str:
    return gpu.split("-")[0].split(" ")[0].upper()


def _inter(stated: Stated, usual: Link) -> Link:
    if stated.inter_gb_per_s is None:
        return usual
    words = stated.network.lower()
    is_ethernet = any(w in words for w in _ETHERNET_WORDS)
    efficiency = ETHERNET_EFFICIENCY if is_ethernet else RDMA_EFFICIENCY
    return Link(
        kind=LinkKind.ETHERNET if is_ethernet else LinkKind.INFINIBAND,
        latency_s=(25.0 if is_ethernet else 8.0) * MICRO_S,
        bandwidth_bytes_per_s=efficiency * stated.inter_gb_per_s * GB,
        source=f"{stated.network or 'stated'}: {stated.inter_gb_per_s} GB/s, x {efficiency}",
    )


def _preset_name(stated: Stated) -> str:
    first = _first_word(stated.gpu)
    sizes = GPUS.get(first)
    if sizes is not None and _OTHER_FORMS.search(stated.gpu.upper()) and first in _NVLINK_CARDS:
        raise SkipRecord(f"hardware.gpu is {stated.gpu!r}; of {first} only the SXM form is known")
    if sizes is None:
        raise SkipRecord(f"hardware.gpu is {stated.gpu!r}; known are {', '.join(GPUS)}")
    named = [size for size in sizes if f"{size}GB" in stated.gpu.upper()]
    if not named and stated.memory_gb is not None:
        named = [size for size in sizes if abs(size - stated.memory_gb) < 1]
    if not named and len(sizes) > 1:
        raise SkipRecord(
            f"hardware.gpu is {stated.gpu!r} without a memory size; known are "
            + ", ".join(f"{first}-{size}GB" for size in sizes)
        )
    return sizes[named[0] if named else next(iter(sizes))]
