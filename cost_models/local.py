"""The cluster that this machine is: from its profile, or from stated defaults.

One CPU rank computes with one thread, so a machine of eight cores has eight devices. Without a
profile the figures are those of the preset ``"cpu"``, and the assumptions say so.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from math import prod
from statistics import median

from autopar.cluster.device import Device, DeviceKind, EfficiencyCurve, rates
from autopar.cluster.presets import PRESETS, Preset
from autopar.cluster.topology import Cluster, Link, LinkKind, Machine
from cost_models.profile import PointKind, Profile

DEFAULT_NOTE = (
    "this machine was not profiled: one CPU rank is taken to do 0.1 TFLOP/s in float32, to move "
    "20 GB/s, and to talk over gloo at 0.2 ms and 1.5 GB/s; `autopar profile` measures it"
)
# A matmul that takes less than so many launches says little about the peak.
MIN_LAUNCHES = 10

# NVIDIA's names as the driver gives them, by pattern, in order.
_GPU_NAMES = (
    (r"H200", "h200"),
    (r"H100(?!.*PCIe)", "h100-sxm"),
    (r"A100.*40\s*GB", "a100-40gb"),
    (r"A100.*80\s*GB", "a100-80gb"),
    (r"V100.*16\s*GB", "v100-16gb"),
    (r"V100.*32\s*GB", "v100-32gb"),
    (r"\bL4\b", "l4"),
    (r"\bA10G\b", "a10g"),
    (r"\bT4\b", "t4"),
)


def local_cluster(profile: Profile | None = None) -> Cluster:
    """This machine as a cluster of CPU ranks, one for each core.

    Args:
        profile: What was measured on it; default figures if left out.
    """
    preset = PRESETS["cpu"]
    num_cores = profile.num_cores if profile else host_cores()
    total_bytes = (profile.memory_bytes if profile else 0) or host_memory_bytes()
    device = device_from_profile(profile) if profile else preset.device
    if total_bytes:
        device = replace(device, memory_bytes=max(1, total_bytes // max(1, num_cores)))
    note = DEFAULT_NOTE if profile is None else device.source
    return Cluster(
        machines=(
            Machine(
                device=device,
                num_devices=max(1, num_cores),
                intra=link_from_profile(profile) if profile else preset.intra,
                inter=preset.inter,
            ),
        ),
        assumptions=(note, f"CPU ranks share {total_bytes:,} bytes of memory"),
    )


def device_from_profile(profile: Profile) -> Device:
    """A CPU device with the measured rates.

    The peak of each dtype is the best rate of its matmuls, launch overhead taken off, short ones
    left out; memory bandwidth is the median over the sizes measured (small ones stay in the
    caches). What was not measured is as in the preset.
    """
    preset = PRESETS["cpu"].device
    launches = [p.time_s for p in profile.of_kind(PointKind.LAUNCH)]
    launch_s = median(launches) if launches else preset.launch_overhead_s
    peaks: dict[str, float] = {}
    for point in profile.of_kind(PointKind.MATMUL):
        if point.time_s < MIN_LAUNCHES * launch_s:
            continue
        rate = 2.0 * prod(point.sizes) / (point.time_s - launch_s)
        peaks[point.dtype] = max(peaks.get(point.dtype, 0.0), rate)
    streams = [p.sizes[0] / p.time_s for p in profile.of_kind(PointKind.STREAM)]
    bandwidth = median(streams) if streams else preset.memory_bandwidth_bytes_per_s
    return replace(
        preset,
        peak_flops=rates({**dict(preset.peak_flops), **peaks}),
        memory_bandwidth_bytes_per_s=bandwidth,
        launch_overhead_s=launch_s,
        curve=EfficiencyCurve(
            matmul_fraction=1.0,  # the peak is what matmuls reached
            attention_fraction=preset.curve.attention_fraction,
            conv_fraction=preset.curve.conv_fraction,
            memory_fraction=1.0,
            tile=1,
            half_tiles=0,
            half_k=0,
        ),
        source=f"profile of {profile.machine} on {profile.date}, torch "
        f"{profile.versions.get('torch', 'unknown')}",
    )


def link_from_profile(profile: Profile) -> Link:
    """The loopback link, fitted to measured all-reduces; the preset's if there are none.

    Least squares for alpha and 1/B of the ring's ``2 (n - 1) alpha + 2 (n - 1) / n payload / B``,
    each point weighted by 1/time, so that small payloads count as much as large ones.
    """
    preset = PRESETS["cpu"].intra
    rows = []
    for point in profile.of_kind(PointKind.ALL_REDUCE):
        payload_bytes, size = point.sizes
        if size > 1:
            steps = 2 * (size - 1)
            rows.append((steps / point.time_s, steps / size * payload_bytes / point.time_s))
    if len(rows) < 2:
        return preset
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:  # all payloads alike: alpha and B can't be told apart
        return preset
    latency_s = (a1 * bb - b1 * ab) / determinant
    per_byte_s = (b1 * aa - a1 * ab) / determinant
    if latency_s <= 0 or per_byte_s <= 0:
        return preset
    return Link(
        kind=LinkKind.LOOPBACK,
        latency_s=latency_s,
        bandwidth_bytes_per_s=1.0 / per_byte_s,
        source=f"gloo all-reduces in the profile of {profile.machine} on {profile.date}",
    )


def gpu_preset(name: str) -> Preset | None:
    """The preset of a GPU by the name that its driver gives; None if there is none.

    >>> gpu_preset("NVIDIA A100-SXM4-80GB").device.name
    'a100-80gb'
    """
    for pattern, key in _GPU_NAMES:
        if re.search(pattern, name):
            return PRESETS[key]
    return None


def gpu_cluster(name: str, *, num_devices: int, memory_bytes: int) -> Cluster:
    """A machine of GPUs that the driver calls ``name``.

    An unknown GPU gets the rates of an A100 with its own memory, and an assumption that says so.
    """
    preset = gpu_preset(name)
    if preset is not None:
        notes: tuple[str, ...] = (f"{name}: {preset.device.source}",)
        device = preset.device
    else:
        preset = PRESETS["a100-80gb"]
        notes = (f"{name} is not known: rates of an A100 are assumed; describe it in a file",)
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"
        reserved = int(memory_bytes * preset.device.reserved_bytes / preset.device.memory_bytes)
        device = replace(
            preset.device, name=slug, memory_bytes=memory_bytes, reserved_bytes=reserved
        )
    machine = replace(preset.machine(num_devices), device=device)
    return Cluster(machines=(machine,), assumptions=notes)


def host_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Memory of this machine; 0 if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def is_cpu(cluster: Cluster) -> bool:
    """Whether every device is a CPU rank."""
    return all(m.device.kind is DeviceKind.CPU for m in cluster.machines)
