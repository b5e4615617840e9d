"""Most bytes that torch's CPU allocator holds at once while something runs.

The CPU allocator keeps no statistics, but the profiler records each of its allocations and frees.
What lived before it began is counted apart, storage by storage. What other threads free (a sent
message, when it has arrived) is not recorded: it counts until its memory is given out again.
"""

from __future__ import annotations

import gc
import json
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable
from pathlib import Path

import torch


def peak_allocated_bytes(run: Callable[[], object]) -> int:
    """The most that ``run`` has allocated and not freed at once; what it frees of before is not
    taken off."""
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    if not changes:
        raise RuntimeError("the profiler recorded no allocation")
    return _peak(changes)


def _peak(changes: Iterable[tuple[float, int, int]]) -> int:
    """Peak of the running sum; frees of what was allocated before are left out."""
    held: dict[int, int] = {}
    begins: list[int] = []  # of what is held, sorted
    total = peak = 0
    for _, address, size in sorted(changes, key=lambda c: c[0]):
        first = bisect_left(begins, address)
        last = first + (first < len(begins) and begins[first] == address)
        if size > 0:
            if first and begins[first - 1] + held[begins[first - 1]] > address:
                first -= 1
            last = bisect_left(begins, address + size)
        total -= sum(map(held.pop, begins[first:last]))
        begins[first:last] = [address] if size > 0 else []
        if size > 0:
            held[address] = size
            total += size
        peak = max(peak, total)
    return peak


def storage_bytes(tensors: Iterable[object]) -> int:
    """Bytes of the storages behind tensors, each once; of a distributed tensor, this rank's."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.detach().untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
