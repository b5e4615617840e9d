"""What runs on a lane, and the two clocks that say when it ends.

Where nothing slows anything (:class:`FixedClock`), a task's end is known when it is issued. With
interference or shared links (:class:`RateClock`) a task goes at a rate that changes whenever
something else on its device or link starts or ends; between two such moments it is constant, so
that ends are exact.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from autopar.plan.actions import Action
from cost_models.lanes import Interference, Lane, SharedLink


@dataclass(slots=True, eq=False)
class Task:
    """Something on a lane.

    Attributes:
        rank: Pipeline rank; of a message, its sender.
        lane: Tasks of one rank and lane run one after another.
        medium: Which lane of the device it keeps busy.
        action: What it is part of.
        seconds: What it takes alone.
        label: Which part.
        overlaps: Whether its action goes on beside it.
        peer: Receiver of a message.
        position: Of the action in its rank's list.
        start_s: When it began; None while it queues.
        end_s: When it ends; None while that is not known.
        waiters: Ranks that go on when it ends; None if there are none.
        rate: Seconds of work per second; 0.0 until it is first set.
        left_s: Work left at ``since_s``.
        since_s: When ``rate`` was last set.
        version: Grows with each change of rate: older predictions of the end are void.
    """

    rank: int
    lane: str
    medium: Lane
    action: Action
    seconds: float
    label: str = ""
    overlaps: bool = False
    peer: int | None = None
    position: int = 0
    start_s: float | None = None
    end_s: float | None = None
    waiters: list[int] | None = None
    rate: float = 0.0
    left_s: float = 0.0
    since_s: float = 0.0
    version: int = 0


class FixedClock:
    """Lanes on which every task takes its own seconds; ends are known at once."""

    def __init__(self) -> None:
        self._free_s: dict[tuple[int, str], float] = {}

    def issue(self, task: Task, now_s: float) -> None:
        """Put a task into its lane; ``now_s`` never decreases for one lane."""
        lane = (task.rank, task.lane)
        free_s = self._free_s.get(lane, 0.0)
        task.start_s = free_s if free_s > now_s else now_s
        self._free_s[lane] = task.end_s = task.start_s + task.seconds

    def next_end(self) -> Task | None:
        """No end is ever waited for."""
        return None


class RateClock:
    """Lanes on which tasks slow each other.

    Args:
        interference: Between lanes of one device.
        links: Shared by several ranks.
    """

    def __init__(self, interference: Interference | None, links: Iterable[SharedLink]) -> None:
        self._factors = dict(interference.factors) if interference is not None else {}
        self._links = tuple(links)
        self._links_of: dict[tuple[int, Lane], list[int]] = {}
        for number, link in enumerate(self._links):
            for rank in link.ranks:
                self._links_of.setdefault((rank, link.lane), []).append(number)
        self._queues: dict[tuple[int, str], deque[Task]] = {}
        # insertion-ordered sets of what runs on each device and on each link
        self._on_device: dict[int, dict[Task, None]] = {}
        self._on_link: dict[int, dict[Task, None]] = {}
        self._busy: dict[tuple[int, Lane], int] = {}
        self._stale: dict[Task, None] = {}
        self._heap: list[tuple[float, int, int, Task]] = []
        self._counter = count()
        self._now_s = 0.0

    def issue(self, task: Task, now_s: float) -> None:
        """Put a task into its lane at the present moment, which ``now_s`` is never after."""
        queue = self._queues.setdefault((task.rank, task.lane), deque())
        queue.append(task)
        if len(queue) == 1:
            self._start(task)

    def next_end(self) -> Task | None:
        """The next task to end, ended: its lane's next one has started. None if nothing runs."""
        while True:
            while self._heap and self._heap[0][2] != self._heap[0][3].version:
                heapq.heappop(self._heap)
            # all that happens at one moment is taken together before rates are set anew
            if self._stale and not (self._heap and self._heap[0][0] <= self._now_s):
                self._settle()
                continue
            if not self._heap:
                return None
            self._now_s, _, _, task = heapq.heappop(self._heap)
            self._end(task)
            return task

    def _start(self, task: Task) -> None:
        task.start_s = task.since_s = self._now_s
        task.left_s = task.seconds
        self._stale[task] = None
        for device in self._devices(task):
            self._on_device.setdefault(device, {})[task] = None
            self._count(device, task.medium, 1)
        for number in self._links_of.get((task.rank, task.medium), ()):
            self._on_link.setdefault(number, {})[task] = None
            self._stale.update(self._on_link[number])

    def _end(self, task: Task) -> None:
        task.end_s = self._now_s
        task.version += 1
        self._stale.pop(task, None)
        for device in self._devices(task):
            del self._on_device[device][task]
            self._count(device, task.medium, -1)
        for number in self._links_of.get((task.rank, task.medium), ()):
            del self._on_link[number][task]
            self._stale.update(self._on_link[number])
        queue = self._queues[task.rank, task.lane]
        queue.popleft()
        if queue:
            self._start(queue[0])

    def _count(self, device: int, lane: Lane, change: int) -> None:
        before = self._busy.get((device, lane), 0)
        self._busy[device, lane] = before + change
        if self._factors and (before == 0 or before + change == 0):
            self._stale.update(self._on_device[device])

    def _settle(self) -> None:
        """Set the rates of all tasks around which something began or ended."""
        for task in self._stale:
            rate = self._rate(task)
            if rate != task.rate:
                task.left_s -= (self._now_s - task.since_s) * task.rate
                task.rate, task.since_s = rate, self._now_s
                task.version += 1
                end_s = self._now_s + max(0.0, task.left_s) / rate
                heapq.heappush(self._heap, (end_s, next(self._counter), task.version, task))
        self._stale = {}

    def _rate(self, task: Task) -> float:
        rate = 1.0
        for number in self._links_of.get((task.rank, task.medium), ()):
            rate = min(rate, self._links[number].full_speed / len(self._on_link[number]))
        if not self._factors:
            return rate
        worst = 1.0
        for device in self._devices(task):
            factor = 1.0
            for (slowed, busy), each in self._factors.items():
                if slowed is task.medium and busy is not slowed and self._busy.get((device, busy)):
                    factor *= each
            worst = max(worst, factor)
        return rate / worst

    @staticmethod
    def _devices(task: Task) -> tuple[int, ...]:
        if task.peer is None or task.peer == task.rank:
            return (task.rank,)
        return (task.rank, task.peer)
