"""How a point is measured: groups of runs, ranks that agree, a budget.

Tasks are gone through in order, the most informative ones first. Under a process group all ranks go
through the same ones: rank 0 decides whether the next is measured and how often, and the point is
the mean over the ranks that take part. Short runs are timed in groups, since a clock has its own
cost; on accelerators by events of the device. A point is the median of its groups; where more ranks
are busy than there are cores it is the mean of their middle half, since a rank is then either
running or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, quantiles

import torch
import torch.distributed as dist

from cost_models.profile import Key, Point, PointKind

Run = Callable[[], object]
Progress = Callable[[str, float], None]
"""Called with what is being measured and the share that is done, 0 to 1."""

MIN_REPEATS, MAX_REPEATS = 3, 25
POINT_S = 0.15  # seconds that one point may take, warm-up not counted
GROUP_S = 2e-3  # least seconds of a group of runs
SHARED_GROUP_S = 0.05  # the same where ranks take turns on a core: several turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One measurement to be made.

    Attributes:
        kind: As in :class:`~cost_models.profile.Point`.
        prepare: Makes the operands and gives what is to be timed; None on a rank that looks on.
        dtype: As in a point.
        sizes: Likewise.
        name: Likewise.
        busy: Likewise; ranks from here on look on.
        runs: What one run is worth: a ping-pong is two messages.
        least: Times that it is measured at least.
    """

    kind: PointKind
    prepare: Callable[[], Run | None]
    dtype: str = "float32"
    sizes: tuple[int, ...] = ()
    name: str = ""
    busy: int = 1
    runs: int = 1
    least: int = MIN_REPEATS

    @property
    def key(self) -> Key:
        """What is measured."""
        return (self.kind, self.name, self.dtype, self.sizes, self.busy)

    def __str__(self) -> str:
        """For the progress bar."""
        sizes = "x".join(map(str, self.sizes))
        words = (self.kind.value, self.name, self.dtype, sizes, f"{self.busy} busy")
        return " ".join(word for word in words if word)


@dataclass(slots=True, kw_only=True)
class Meter:
    """How this process measures.

    Attributes:
        device: Where.
        rank: This rank.
        size: Ranks of the job.
        per_node: Ranks of a node.
        num_cores: Cores (of a node) or accelerators.
        clock: Seconds, for the budget and for CPUs.
        point_s: Seconds that one point may take.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    per_node: int = 1
    num_cores: int = 1
    clock: Callable[[], float] = time.perf_counter
    point_s: float = POINT_S
    _events: list[torch.cuda.Event] = field(default_factory=list)

    def seconds(self, run: Run, count: int = 1) -> float:
        """Seconds of ``count`` runs one after another."""
        if self.device.type == "cuda":
            if not self._events:
                self._events = [_event(), _event()]
            first, last = self._events
            first.record()
            for _ in range(count):
                run()
            last.record()
            last.synchronize()
            return max(float(first.elapsed_time(last)) * 1e-3, 1e-9)
        started_s = self.clock()
        for _ in range(count):
            run()
        return max(self.clock() - started_s, 1e-9)

    def agree(self, value: int) -> int:
        """The value of rank 0."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(box, src=0)
        return int(box[0])

    def mean(self, values: Sequence[float], *, has_part: bool) -> tuple[float, ...]:
        """Means of each value over the ranks that have a part."""
        if self.size == 1:
            return tuple(values)
        row = [value if has_part else 0.0 for value in values] + [float(has_part)]
        box = torch.tensor(row, dtype=torch.float64)
        dist.all_reduce(box)
        return tuple(float(total) / float(box[-1]) for total in box[:-1])

    def measure(self, task: Task) -> Point:
        """Make one measurement; every rank must call it."""
        has_part = self.rank % self.per_node < task.busy
        run = task.prepare() if has_part else None
        has_part = run is not None
        once_s = 0.0
        self.meet()
        if run is not None:
            run()
            once_s = self.seconds(run)
        takes_turns = self.takes_turns(task.busy)
        group_s = SHARED_GROUP_S if takes_turns else GROUP_S
        once_s = max(once_s, 1e-9)
        inner = self.agree(max(1, min(10_000, int(group_s / once_s))))
        most = max(task.least, min(MAX_REPEATS, int(self.point_s / (inner * once_s))))
        repeats = self.agree(most)
        self.meet()
        times = [1.0]
        if run is not None:
            times = [self.seconds(run, inner) / inner / task.runs for _ in range(repeats)]
        middle = mean(times[i] for i in middle_half(times)) if takes_turns else median(times)
        low, _, high = quantiles(times, n=4) if len(times) > 1 else (middle, middle, middle)
        time_s, spread_s = self.mean((middle, (high - low) / 2), has_part=has_part)
        return Point(
            task.kind,
            task.dtype,
            task.sizes,
            max(time_s, 1e-9),
            name=task.name,
            busy=task.busy,
            spread_s=max(0.0, spread_s),
            repeats=repeats,
        )

    def takes_turns(self, busy: int) -> bool:
        """Whether so many busy ranks of a node share cores."""
        return busy > self.num_cores and self.device.type == "cpu"

    def meet(self) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            dist.barrier()


def middle_half(seconds: Sequence[float]) -> tuple[int, ...]:
    """Which runs took neither the least nor the most time: about half of them.

    >>> middle_half([5.0, 1.0, 3.0, 9.0, 4.0])
    (2, 4, 0)
    """
    order = sorted(range(len(seconds)), key=lambda run: seconds[run])
    quarter = len(order) // 4
    return tuple(order[quarter : len(order) - quarter])


def measure_tasks(
    tasks: Iterable[Task],
    meter: Meter,
    *,
    budget_s: float,
    known: frozenset[Key] = frozenset(),
    least: int = 1,
    keep: Callable[[Point], None] = lambda _: None,
    progress: Progress = lambda _what, _share: None,
) -> bool:
    """Make measurements until there are no more or the time is up.

    Args:
        tasks: What to measure, the same on every rank.
        meter: How.
        budget_s: Seconds after which no further point is started.
        known: What need not be measured again.
        least: Points that are measured in any case, so that there is something to fit.
        keep: Given every point at once.
        progress: Told about every point.

    Returns:
        Whether all were measured.
    """
    started_s = meter.clock()
    todo = list(tasks)
    for index, task in enumerate(todo):
        is_late = index >= least and meter.clock() - started_s > budget_s
        word = meter.agree(0 if task.key in known else 2 if is_late else 1)
        if word == 2:
            progress("out of time", 1.0)
            return False
        progress(str(task), index / len(todo))
        if word == 1:
            keep(meter.measure(task))
    progress("done", 1.0)
    return True


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
