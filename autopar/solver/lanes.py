"""Work of native solvers beside the search's own: on threads, since solvers release the lock.

A search is one thread that asks solvers again and again. What it will ask for is often known before
it does: that is *started ahead* and answered by the time it is wanted. What is asked for together
is solved side by side. While MathOpt and the linear solvers run, the search's own Python goes on.

What is handed over must be a pure function of what never changes: it fills no cache and counts
nothing. Then an answer is the same whether it was found ahead, beside others or in place, and plans
do not depend on the number of cores. What nobody asks for is not counted anywhere.

    with lanes.open():                      # threads exist inside only; may be nested
        later = lanes.ahead(partial(solve_splits, problem))
        ...                                 # the search goes on
        found = later.result()              # waits if it runs, solves in place if it was not begun
        menus = lanes.together([partial(recompute_menu, p) for p in problems])

On one core, and outside of :meth:`Lanes.open`, everything is done in place when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_THREADS = 3  # beside the search: what each of them does in Python holds up the others

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


@dataclass(slots=True, eq=False)
class Lanes:
    """Threads beside a search, as many as there are cores left.

    Attributes:
        num_threads: Beside the caller's; with none everything is done in place.
    """

    num_threads: int = field(default_factory=lambda: min(MOST_THREADS, usable_cores() - 1))
    _pool: ThreadPoolExecutor | None = None

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
            pool.shutdown(cancel_futures=True)

    def ahead(self, work: Callable[[], T]) -> Ahead[T]:
        """Start something that is asked for later; what was started first is begun first.

        Args:
            work: A pure function, most of whose seconds are a native solver's.
        """
        return Ahead(work, None if self._pool is None else self._pool.submit(work))

    def together(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Do several things at once, the first ones first; the caller takes its share of them.

        Args:
            works: As of :meth:`ahead`; the longest had better come first.
        """
        return collected([self.ahead(work) for work in works])


def collected(started: Sequence[Ahead[T]]) -> list[T]:
    """Results of what was started, where the caller does what nobody has begun."""
    for one in started:
        if not one.is_begun:
            one.result()
    return [one.result() for one in started]
