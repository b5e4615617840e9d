"""Fills a profile: this machine, as each of the ranks that run on it sees it.

The modules ``measure*`` are the only ones here that import torch.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from autopar.cluster.topology import Cluster
from autopar.errors import ConfigError
from autopar.host_memory import keep_freed_memory
from cost_models.local import gpu_cluster, host_cores, host_memory_bytes
from cost_models.measure_comm import Collectives
from cost_models.measure_compute import (
    busy_tasks,
    compute_tasks,
    first_tasks,
    optimizer_tasks,
)
from cost_models.measure_meter import Meter, Progress, Task, measure_tasks
from cost_models.profile import Point, Profile

Keep = Callable[[Profile], None]
"""Given the profile so far after every point."""


def measure_local_device(
    budget_s: float = 30.0,
    progress: Progress | None = None,
    *,
    num_threads: int = 1,
    known: Profile | None = None,
    keep: Keep | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Profile of this machine, as one rank sees it.

    Under an initialised process group of several ranks, what they take from each other and
    collectives are measured as well; then every rank must call it, and the result of rank 0
    counts.

    Args:
        budget_s: Seconds after which no further point is started, above 0. What everything is
            fitted to is measured in any case.
        progress: Told about every point.
        num_threads: Threads that one rank computes with, if it is a CPU.
        known: A profile of this machine to be completed: its points are not measured again.
        keep: Given the profile so far after every point.
        clock: Seconds, for the budget and for CPUs.

    Raises:
        ConfigError: ``budget_s`` or ``num_threads`` is out of range.
    """
    if budget_s <= 0 or num_threads < 1:
        raise ConfigError(
            f"measure_local_device: budget_s is {budget_s} and num_threads {num_threads}; "
            "the first must be above 0, the second at least 1"
        )
    meter = local_meter(num_threads=num_threads, clock=clock)
    found = [known or describe_machine(num_threads)]

    def note(point: Point) -> None:
        found[0] = found[0].with_points([point])
        if keep is not None:
            keep(replace(found[0], is_complete=False))

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    started_s = clock()
    try:
        collectives = Collectives(meter) if meter.size > 1 else None
        keys = frozenset(p.key for p in found[0].points)
        least = list(first_tasks(meter.device))
        is_complete = measure_tasks(
            [*least, *_other_tasks(meter, collectives)],
            meter,
            budget_s=budget_s,
            known=keys,
            least=len(least),
            keep=note,
            progress=progress or (lambda _what, _share: None),
        )
        is_late = meter.agree(clock() - started_s > budget_s)
        if collectives is not None and not is_late:
            collectives.measure_interference(keys, note)
            collectives.measure_lockstep(keys, note)
    finally:
        torch.set_num_threads(before)
    return replace(
        found[0],
        is_complete=is_complete and not is_late,
        num_ranks=max(found[0].num_ranks, meter.size),
        ranks_per_node=max(found[0].ranks_per_node, meter.per_node),
    )


def _other_tasks(meter: Meter, collectives: Collectives | None) -> Iterator[Task]:
    """What is measured while time is left, what tells most first."""
    device = meter.device
    if meter.size > 1:
        yield from busy_tasks(device, meter.per_node)
    yield from optimizer_tasks(device, meter.per_node)
    if collectives is not None:
        yield from collectives.tasks()
    yield from compute_tasks(device)


def local_meter(*, num_threads: int = 1, clock: Callable[[], float] = time.perf_counter) -> Meter:
    """How this process measures: its device and its place in the job, if there is one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        keep_freed_memory()  # as where a plan runs
    num_cores = max(1, host_cores() // num_threads)
    if device.type == "cuda":
        num_cores = torch.cuda.device_count()
    if not (dist.is_available() and dist.is_initialized()):
        return Meter(device=device, num_cores=num_cores, clock=clock)
    size = dist.get_world_size()
    return Meter(
        device=device,
        rank=dist.get_rank(),
        size=size,
        per_node=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        num_cores=num_cores,
        clock=clock,
    )


def describe_machine(num_threads: int = 1) -> Profile:
    """A profile of this machine without points."""
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Profile(
            machine=f"{properties.name}, {torch.cuda.device_count()} devices",
            date=date,
            device="cuda",
            num_threads=num_threads,
            num_cores=torch.cuda.device_count(),
            memory_bytes=properties.total_memory,
            versions={**versions, "cuda": str(torch.version.cuda)},
        )
    return Profile(
        machine=f"{_processor()}, {host_cores()} cores",
        date=date,
        device="cpu",
        num_threads=num_threads,
        num_cores=max(1, host_cores() // num_threads),
        memory_bytes=host_memory_bytes(),
        versions=versions,
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


def _processor() -> str:
    """Name of the processor, as the system gives it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"
