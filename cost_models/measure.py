"""Micro-benchmarks that fill a profile. The only module here that imports torch.

Each point is the median of a few runs after a warm-up run; a budget of seconds is kept by leaving
out the remaining points, the most informative ones come first.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from statistics import median

import torch
import torch.distributed as dist

from autopar.cluster.topology import Cluster
from autopar.errors import ConfigError
from autopar.units import KIB, MIB
from cost_models.local import gpu_cluster, host_cores, host_memory_bytes
from cost_models.profile import Point, PointKind, Profile

Progress = Callable[[str, float], None]
"""Called with what is being measured and the share that is done, 0 to 1."""

MATMUL_SIZES = (256, 512, 128, 1024, 64)
MATMUL_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
STREAM_BYTES = (4 * MIB, 512 * KIB, 32 * MIB)
COLLECTIVE_BYTES = (1 * KIB, 1 * MIB, 8 * MIB)
MIN_REPEATS, MAX_REPEATS, COLLECTIVE_REPEATS = 3, 25, 9
POINT_S = 0.4  # seconds that one point may take, warm-up not counted


def measure_local_device(
    budget_s: float = 30.0, progress: Progress | None = None, *, num_threads: int = 1
) -> Profile:
    """Profile of this machine's CPU, as one rank sees it.

    Under an initialised process group of several ranks, collectives are measured as well; then
    every rank must call it, and each returns its own figures.

    Args:
        budget_s: Seconds after which no further point is started, above 0.
        progress: Told about every point.
        num_threads: Threads that one rank computes with.

    Raises:
        ConfigError: ``budget_s`` or ``num_threads`` is out of range.
    """
    if budget_s <= 0 or num_threads < 1:
        raise ConfigError(
            f"measure_local_device: budget_s is {budget_s} and num_threads {num_threads}; "
            "the first must be above 0, the second at least 1"
        )
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        points = _measure(budget_s, progress)
    finally:
        torch.set_num_threads(before)
    return Profile(
        machine=f"{_processor()}, {host_cores()} cores",
        date=datetime.now(UTC).date().isoformat(),
        device="cpu",
        num_threads=num_threads,
        num_cores=max(1, host_cores() // num_threads),
        memory_bytes=host_memory_bytes(),
        versions={"torch": str(torch.__version__), "python": platform.python_version()},
        points=points,
    )


def local_gpu_cluster() -> Cluster | None:
    """The GPUs of this machine; None if torch sees none. Their kinds must be equal."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return gpu_cluster(
        properties.name,
        num_devices=torch.cuda.device_count(),
        memory_bytes=properties.total_memory,
    )


def _measure(budget_s: float, progress: Progress | None) -> tuple[Point, ...]:
    tasks = list(_tasks())
    has_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    points = list(_collective_points(dist.get_world_size())) if has_group else []
    started_s = time.perf_counter()
    for index, (kind, dtype, sizes, run) in enumerate(tasks):
        if points and time.perf_counter() - started_s > budget_s:
            break
        if progress is not None:
            progress(f"{kind} {dtype} {'x'.join(map(str, sizes))}".strip(), index / len(tasks))
        points.append(Point(kind, dtype, sizes, _median_s(run)))
    if progress is not None:
        progress("done", 1.0)
    return tuple(points)


def _tasks() -> Iterator[tuple[PointKind, str, tuple[int, ...], Callable[[], object]]]:
    small = torch.ones(4)
    yield PointKind.LAUNCH, "float32", (), lambda: small + 1.0
    for size in MATMUL_SIZES:
        for dtype in MATMUL_DTYPES:
            square = torch.ones(size, size, dtype=dtype)
            name = str(dtype).removeprefix("torch.")
            yield PointKind.MATMUL, name, (1, size, size, size), _bind(torch.mm, square)
        if size == MATMUL_SIZES[0]:
            # after the most telling matmuls, before the rest of them
            for moved_bytes in STREAM_BYTES:
                flat = torch.ones(moved_bytes // 8)  # 4 bytes read and 4 written per element
                yield PointKind.STREAM, "float32", (moved_bytes,), _bind(torch.add, flat)


def _bind(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor
) -> Callable[[], object]:
    if function is torch.add:
        return lambda: x + 1.0
    return lambda: function(x, x)


def _collective_points(size: int) -> Iterator[Point]:
    """Points of a running process group; every rank goes through the same ones."""
    for payload_bytes in COLLECTIVE_BYTES:
        whole = torch.ones(payload_bytes // 4)
        share = torch.ones(max(1, whole.numel() // size))
        gathered = torch.empty(share.numel() * size)
        runs: dict[PointKind, Callable[[], object]] = {
            PointKind.ALL_REDUCE: _collective(dist.all_reduce, whole),
            PointKind.ALL_GATHER: _collective(
                dist.all_gather, list(gathered.view(size, -1)), share
            ),
            PointKind.ALL_TO_ALL: _collective(dist.all_to_all_single, gathered.clone(), gathered),
            PointKind.BROADCAST: _collective(dist.broadcast, whole, 0),
        }
        for kind, run in runs.items():
            dist.barrier()
            times = []
            run()
            for _ in range(COLLECTIVE_REPEATS):  # the same number on all ranks
                started_s = time.perf_counter()
                run()
                times.append(time.perf_counter() - started_s)
            yield Point(kind, "float32", (payload_bytes, size), median(times))


def _collective(function: Callable[..., object], *args: object) -> Callable[[], object]:
    return lambda: function(*args)


def _median_s(run: Callable[[], object]) -> float:
    """Median seconds of one run; short ones are timed in groups, the clock has its own cost."""
    run()
    started_s = time.perf_counter()
    run()
    once_s = max(time.perf_counter() - started_s, 1e-9)
    inner = max(1, min(1000, int(1e-3 / once_s)))
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(POINT_S / (inner * once_s))))
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - started_s) / inner)
    return max(median(times), 1e-9)


def _processor() -> str:
    """Name of the processor, as the system gives it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"
