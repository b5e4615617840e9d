"""The search over shapes: by bound, with an estimate for those opened and a judge for the best.

A *shape* stands for many plans. The space that is searched can say, at growing effort, how fast no
plan of a shape can be; it can open a shape (find a good plan and estimate it), improve what it
found, and judge a plan in the event simulator. The master decides the order:

1. Shapes are taken in the order of their bounds; a bound is sharpened before its shape is opened.
   When no bound left is better than the best estimate, opening ends. Shapes that people would set
   up by hand go through this first, so that a limit of work never cuts them off.
2. The best are improved, and so is whatever keeps the model's own gap above a percent.
3. The best few are judged. The fastest that fits wins; if none fits, opening goes on.

``bound_s`` is the least bound over all shapes of the space: opened, not opened, or opened without
finding anything that fits. No plan of the space is faster in the event simulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Generic, Protocol, TypeVar

MAX_OPENED = 400  # work limit: shapes that get splits and cuts
MIN_OPENED = 4  # so that there are runners-up, and an estimate that flatters is found out
NUM_IMPROVED = 4  # best candidates that are improved before they are judged
MAX_IMPROVED = 8  # and with those that keep the model's gap open
NUM_JUDGED = 3
MAX_JUDGED = 6
NUM_BY_HAND = 1  # best of the shapes set up by hand that are judged whatever their estimate
NEAR = 1.03  # estimates above the best by more than this are not judged once one fits
MODEL_GAP = 0.01
SLACK = 1e-9
WORTH = 1.06  # a bound is not sharpened by more than this before the last effort


class Candidate(Protocol):
    """A plan of a shape, estimated."""

    @property
    def estimate_s(self) -> float:
        """Simulated seconds of a step, from estimated seconds of stages."""
        ...


class Verdict(Protocol):
    """A candidate that was judged."""

    @property
    def step_s(self) -> float:
        """Seconds of a step in the event simulator."""
        ...

    @property
    def fits(self) -> bool:
        """Whether it fits into memory."""
        ...


S = TypeVar("S")
C = TypeVar("C", bound=Candidate)
V = TypeVar("V", bound=Verdict)
S_contra = TypeVar("S_contra", contravariant=True)
V_co = TypeVar("V_co", bound=Verdict, covariant=True)


class Space(Protocol[S_contra, C, V_co]):
    """What is searched."""

    @property
    def efforts(self) -> int:
        """Levels of effort of :meth:`bound_s`."""
        ...

    def bound_s(self, shape: S_contra, effort: int, enough_s: float) -> float:
        """No plan of the shape is faster in the simulator; infinite if there is none.

        Args:
            shape: The shape.
            effort: From 0 to ``efforts - 1``.
            enough_s: A bound from here on need not be sharper.
        """
        ...

    def open(self, shape: S_contra, best_s: float) -> C | None:
        """A good plan of a shape, None if none was found that fits and may beat the best.

        Args:
            shape: The shape.
            best_s: Best estimate so far.
        """
        ...

    def improve(self, candidate: C) -> C:
        """A better plan of the same shape, or the same."""
        ...

    def model_bound_s(self, candidate: C, enough_s: float) -> float:
        """No plan of the candidate's shape and splits has a better estimate.

        Args:
            candidate: A candidate.
            enough_s: A bound from here on need not be sharper.
        """
        ...

    def judge(self, candidate: C) -> V_co:
        """The plan in the event simulator."""
        ...

    def preference(self, candidate: C) -> tuple[float, int, int, int, str]:
        """Sort key, best first."""
        ...

    def is_late(self) -> bool:
        """Whether a wall-clock guard has run out."""
        ...


@dataclass(slots=True)
class _Opened(Generic[S, C]):
    """A shape that was opened: its bound, and what was found."""

    shape: S
    bound_s: float
    effort: int
    candidate: C
    model_bound_s: float = 0.0
    is_modelled: bool = False
    is_improved: bool = False
    is_judged: bool = False
    is_by_hand: bool = False


@dataclass(slots=True)
class Master(Generic[S, C, V]):
    """One search.

    Args:
        space: What is searched.

    Attributes:
        verdicts: What was judged, in order.
        num_bounds: Bounds by effort.
        num_opened: Shapes that were opened.
        stopped_by: ``""``, ``"work"`` or ``"time"``.
    """

    space: Space[S, C, V]
    verdicts: list[V] = field(default_factory=list)
    num_opened: int = 0
    stopped_by: str = ""
    _heap: list[tuple[float, int, int, S]] = field(default_factory=list)
    _opened: list[_Opened[S, C]] = field(default_factory=list)
    _empty: list[tuple[float, int, S, float]] = field(default_factory=list)
    _num_shapes: int = 0

    def run(self, *groups: Iterable[S]) -> V | None:
        """The best verdict that fits, None if nothing does.

        Args:
            groups: Shapes of the space, each once; a group is gone through before the next is
                asked for its shapes. The first one is what people would set up by hand: its best
                is always judged.
        """
        for number, group in enumerate(groups):
            self._add(group)
            self._open_more()
            if number == 0:
                for row in self._opened:
                    row.is_by_hand = True
        while True:
            self._improve()
            self._judge()
            self._judge_by_hand()
            fitting = [v for v in self.verdicts if v.fits]
            if fitting:
                return min(fitting, key=lambda v: v.step_s)
            self._take_back()
            if not self._heap or self.stopped_by:
                self._judge(everything=True)
                fitting = [v for v in self.verdicts if v.fits]
                return min(fitting, key=lambda v: v.step_s, default=None)
            self._open_more()

    @property
    def bound_s(self) -> float:
        """The least bound over all shapes."""
        waiting = [entry[0] for entry in self._heap]
        empty = [entry[0] for entry in self._empty]
        return min([*(o.bound_s for o in self._opened), *empty, *waiting], default=0.0)

    @property
    def model_gap(self) -> float:
        """Share of the best estimate that its lower bound over all shapes leaves open."""
        best_s = min((o.candidate.estimate_s for o in self._opened), default=0.0)
        if best_s <= 0:
            return 0.0
        waiting = [entry[0] for entry in self._heap]
        floor_s = min([*map(self._floor_s, self._opened), *waiting], default=best_s)
        return max(0.0, 1 - floor_s / best_s)

    # -- opening -------------------------------------------------------------------------------
    def _add(self, shapes: Iterable[S]) -> None:
        for shape in shapes:
            bound_s = self.space.bound_s(shape, 0, inf)
            self._num_shapes += 1
            if isfinite(bound_s):
                heapq.heappush(self._heap, (bound_s, self._num_shapes, 0, shape))

    def _open_more(self) -> None:
        """Open shapes, best bound first, until none left can be better than the best of them."""
        best_s = self._best_s()
        num_fresh = 0
        while self._heap:
            bound_s, index, effort, shape = self._heap[0]
            enough = num_fresh + len(self._unjudged()) >= MIN_OPENED
            if bound_s > best_s * (1 + SLACK) and enough:
                break
            if self._must_stop():
                break
            heapq.heappop(self._heap)
            # before anything is known there is nothing that the last effort could exclude
            if effort + (1 if isfinite(best_s) else 2) < self.space.efforts:
                is_last = effort + 2 == self.space.efforts
                enough_s = best_s if is_last else min(best_s, WORTH * bound_s)
                sharper_s = max(bound_s, self.space.bound_s(shape, effort + 1, enough_s))
                if isfinite(sharper_s):
                    heapq.heappush(self._heap, (sharper_s, index, effort + 1, shape))
                continue
            self.num_opened += 1
            found = self.space.open(shape, best_s)
            if found is None:
                self._empty.append((bound_s, effort, shape, best_s))
                continue
            self._opened.append(_Opened(shape, bound_s, effort, found))
            num_fresh += 1
            best_s = min(best_s, found.estimate_s)

    def _take_back(self) -> None:
        """What was left out beside a plan that turned out not to fit is to be opened again."""
        for bound_s, effort, shape, known_s in self._empty:
            if isfinite(known_s):
                self._num_shapes += 1
                heapq.heappush(self._heap, (bound_s, self._num_shapes, effort, shape))
        self._empty = [entry for entry in self._empty if not isfinite(entry[3])]

    def _must_stop(self) -> bool:
        if self.num_opened >= MAX_OPENED:
            self.stopped_by = self.stopped_by or "work"
        elif self.space.is_late():
            self.stopped_by = "time"
        else:
            return False
        return True

    def _best_s(self) -> float:
        return min((o.candidate.estimate_s for o in self._unjudged()), default=inf)

    def _unjudged(self) -> list[_Opened[S, C]]:
        return [o for o in self._opened if not o.is_judged]

    # -- improving -----------------------------------------------------------------------------
    def _sharpen(self) -> None:
        """Bounds of shapes that were opened before anything was known, as sharp as the others."""
        best_s, last = self._best_s(), self.space.efforts - 1
        for row in self._opened:
            if row.effort < last and row.bound_s < best_s:
                row.bound_s = max(row.bound_s, self.space.bound_s(row.shape, last, best_s))
                row.effort = last
        for at, (bound_s, effort, shape, known_s) in enumerate(self._empty):
            if effort < last and bound_s < best_s:
                sharper_s = max(bound_s, self.space.bound_s(shape, last, best_s))
                self._empty[at] = (sharper_s, last, shape, known_s)

    def _improve(self) -> None:
        self._sharpen()
        for _ in range(NUM_IMPROVED):
            rows = sorted(self._unjudged(), key=lambda o: self.space.preference(o.candidate))
            todo = [o for o in rows[:NUM_IMPROVED] if not o.is_improved]
            if not todo or self._is_late():
                break
            self._improve_one(todo[0])
        for _ in range(MAX_IMPROVED):
            weak = self._weakest()
            if weak is None or self._is_late():
                break
            self._improve_one(weak)

    def _improve_one(self, row: _Opened[S, C]) -> None:
        row.candidate = self.space.improve(row.candidate)
        row.is_improved, row.is_modelled = True, False

    def _weakest(self) -> _Opened[S, C] | None:
        """What keeps the model's gap open and is not improved yet."""
        best_s = min((o.candidate.estimate_s for o in self._opened), default=0.0)
        rows = [o for o in self._opened if self._floor_s(o) < (1 - MODEL_GAP) * best_s]
        rows = [o for o in rows if not o.is_improved]
        return min(rows, key=self._floor_s, default=None)

    def _floor_s(self, row: _Opened[S, C]) -> float:
        """A lower bound of the estimates of a shape that was opened."""
        best_s = min(o.candidate.estimate_s for o in self._opened)
        if row.bound_s >= (1 - MODEL_GAP) * best_s:
            return row.bound_s
        if not row.is_modelled:
            row.model_bound_s = self.space.model_bound_s(row.candidate, best_s)
            row.is_modelled = True
        return max(row.bound_s, min(row.model_bound_s, row.candidate.estimate_s))

    def _is_late(self) -> bool:
        if self.space.is_late():
            self.stopped_by = "time"
            return True
        return False

    # -- judging -------------------------------------------------------------------------------
    def _judge_by_hand(self) -> None:
        """See that the best of what people would set up is among those judged, if it may win."""
        by_hand = sorted(
            (o for o in self._opened if o.is_by_hand),
            key=lambda o: self.space.preference(o.candidate),
        )
        for row in by_hand[:NUM_BY_HAND]:
            best_s = min((v.step_s for v in self.verdicts if v.fits), default=inf)
            may_win = row.bound_s < best_s  # a bound of what the judge would find
            if not row.is_judged and may_win and not self._is_late():
                row.is_judged = True
                self.verdicts.append(self.space.judge(row.candidate))

    def _judge(self, *, everything: bool = False) -> None:
        rows = sorted(self._unjudged(), key=lambda o: self.space.preference(o.candidate))
        best_s = rows[0].candidate.estimate_s if rows else 0.0
        for num_judged, row in enumerate(rows):
            num_fitting = sum(v.fits for v in self.verdicts)
            if num_fitting >= NUM_JUDGED or (
                num_fitting and row.candidate.estimate_s > NEAR * best_s
            ):
                break
            if num_judged >= MAX_JUDGED and (num_fitting or not everything):
                break
            if num_fitting and self._is_late():
                break
            row.is_judged = True
            self.verdicts.append(self.space.judge(row.candidate))
