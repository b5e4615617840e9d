"""Work of native solvers beside the search's own: on threads, since solvers release the lock.

A search is one thread that asks solvers again and again. What it will ask for is often known before
it does: that is *started ahead* and answered by the time it is wanted. What is asked for together
is solved side by side. While MathOpt and the linear solvers run, the search's own Python goes on.

What is handed over must be a pure function of what never changes: it fills no cache and counts
nothing. Then an answer is the same whether it was found ahead, beside others or in place, and plans
do not depend on the number of cores. What nobody asks for is not counted anywhere. The one
exception is sharpening bounds (:meth:`~autopar.solver.master.Master.run`): it changes bounds and
what it keeps of them, which nobody else looks at before it has been waited for.

    with lanes.open():                      # threads exist inside only; may be nested
        later = lanes.ahead(partial(solve_splits, problem), bound_s)      # least bound first
        ...                                 # the search goes on
        found = later.result()              # waits if it runs, solves in place if it was not begun
        menus = lanes.together([partial(recompute_menu, p) for p in problems])

On one core, and outside of :meth:`Lanes.open`, everything is done in place when it is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

MOST_THREADS = 3  # beside the search: what each of them does in Python holds up the others

NOW = -inf  # order of what is asked for already
SURE = 0.0  # of what will be asked for; what may be comes later, as its bound in seconds says

T = TypeVar("T")


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(slots=True, eq=False)
class Ahead(Generic[T]):
    """What was started, or will be done when it is asked for."""

    _work: Callable[[], T]
    _future: Future[T] | None = None
    _found: list[T] = field(default_factory=list)

    @property
    def is_begun(self) -> bool:
        """Whether it was done, or a thread is at it."""
        if self._found:
            return True
        future = self._future
        return future is not None and not future.cancelled() and (future.running() or future.done())

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` neither waits nor works."""
        return self.is_begun and (self._future is None or self._future.done())

    def result(self) -> T:
        """What the work returns or raises; in place if no thread has begun it."""
        if not self._found:
            future = self._future  # cancelled before where the search that opened threads is over
            is_left = future is None or future.cancel()
            self._found.append(self._work() if future is None or is_left else future.result())
        return self._found[0]

    def drop(self) -> None:
        """Not to be begun before it is asked for, if it was not yet."""
        if self._future is not None:
            self._future.cancel()


@dataclass(frozen=True, slots=True, order=True)
class _Waiting:
    """What no thread has begun: the least order comes first, then what was started first."""

    order: float
    index: int
    run: Callable[[], None] = field(compare=False)
    cancel: Callable[[], bool] = field(compare=False)


@dataclass(slots=True, eq=False)
class Lanes:
    """Threads beside a search, as many as there are cores left.

    Attributes:
        num_threads: Beside the caller's; with none everything is done in place.
    """

    num_threads: int = field(default_factory=lambda: min(MOST_THREADS, usable_cores() - 1))
    _pool: ThreadPoolExecutor | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: list[_Waiting] = field(default_factory=list)
    _num_started: int = 0
    _is_closing: bool = False

    @property
    def is_closing(self) -> bool:
        """Whether nobody waits for what still runs: what takes long should ask, and end."""
        return self._is_closing

    @property
    def is_open(self) -> bool:
        """Whether something that is started now goes on beside the caller."""
        return self._pool is not None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Threads are there inside. At its end what was not begun is left, what runs awaited.

        That is at most one task for each thread, also where the search is broken off.
        """
        if self._pool is not None or self.num_threads < 1:
            yield
            return
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="autopar-solver")
        try:
            yield
        finally:
            pool, self._pool = self._pool, None
            self._is_closing = True
            try:
                pool.shutdown(cancel_futures=True)
            finally:  # also where that is broken off: the next search goes on
                self._is_closing = False
            for row in self._waiting:
                row.cancel()
            self._waiting.clear()

    def ahead(self, work: Callable[[], T], order: float = SURE) -> Ahead[T]:
        """Start something that is asked for later.

        Args:
            work: A pure function, many of whose seconds are a native solver's.
            order: The least is begun first, and among equals what was started first.
        """
        if self._pool is None:
            return Ahead(work)
        future: Future[T] = Future()
        self._num_started += 1
        with self._lock:
            run = partial(_run, work, future)
            heappush(self._waiting, _Waiting(order, self._num_started, run, future.cancel))
        self._pool.submit(self._take)  # one for each that waits, whichever it will be
        return Ahead(work, future)

    def _take(self) -> None:
        """On a thread: what comes first of all that waits."""
        with self._lock:
            first = heappop(self._waiting)
        first.run()

    def together(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Do several things at once, the first ones first; the caller takes its share of them.

        Args:
            works: As of :meth:`ahead`; the longest had better come first.
        """
        return collected([self.ahead(work, NOW) for work in works])


def _run(work: Callable[[], T], future: Future[T]) -> None:
    """Do it, unless who asked for it has done so."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, it reaches the one that asks
            future.set_exception(error)


def collected(started: Sequence[Ahead[T]]) -> list[T]:
    """Results of what was started, where the caller does what nobody has begun."""
    for one in started:
        if not one.is_begun:
            one.result()
    return [one.result() for one in started]
