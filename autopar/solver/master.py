"""The search over shapes: by bound, with an estimate for those opened and a judge for the best.

A *shape* stands for many plans. The space that is searched can say, at growing effort, how fast no
plan of a shape can be; it can open a shape (find a good plan and estimate it), improve what it
found, and judge a plan in the event simulator. The master decides the order:

1. Shapes are taken in the order of their bounds; a bound is sharpened before its shape is opened.
   When no bound left is better than the best estimate, opening ends. A shape whose outlook is worse
   than what is known is set aside: what bounds leave open is seldom there to be found. Of those set
   aside the ones that come near are opened in the end. Shapes that people would set up by hand go
   through this first, so that a limit of work never cuts them off.
2. The best are improved, and the best few judged. Beside that the least bound is sharpened,
   whichever it is, until a limit of work.
3. Whatever keeps the model's own gap above a percent is improved, and judged if it may win.
4. The fastest that fits wins; if none fits, opening goes on. So it does where something that is
   not judged has a bound, and an outlook or an estimate, below the best judged time: an estimate
   that did not come true has kept it out.

``bound_s`` is the least bound over all shapes of the space: opened, set aside, not reached, or
opened without finding anything that fits. No plan of the space is faster in the event simulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import Generic, Protocol, TypeVar

MAX_OPENED = 400  # work limit: shapes that get splits and cuts
MIN_OPENED = 4  # so that there are runners-up, and an estimate that flatters is found out
NUM_IMPROVED = 4  # best candidates that are improved before they are judged
MAX_IMPROVED = 8  # and with those that keep the model's gap open
NUM_JUDGED = 3
MAX_JUDGED = 6
NUM_BY_HAND = 1  # best of the shapes set up by hand that are judged whatever their estimate
LEFT_OUT = 1.03  # what was left out beside a time is slower than it by at least so much
# Of the best estimate: one other up to here is judged, so that what came near is exact.
RIVAL = 1.03
NEAR = 1.01  # more of them up to here: hardly any estimate is too high
MODEL_GAP = 0.01
CLOSABLE_GAP = 0.05  # better splits and menus lift a bound of estimates by less than this
SLACK = 1e-9
MAX_REOPENED = 2  # times that opening goes on because what ended it did not come true
MAX_SHARPENED = 96.0  # work limit of bounds beyond the early efforts, in units of the space
HOPE = 1.04  # a shape is opened if its outlook is not above the best estimate by more than this


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
    def early_efforts(self) -> int:
        """Levels of effort that a shape's bound gets before the shape is opened."""
        ...

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

    def spent(self, shape: S_contra) -> float:
        """Work on a shape's bound beyond the early efforts so far, in units of about a round."""
        ...

    def outlook_s(self, shape: S_contra, best_s: float) -> float:
        """Seconds of the plan that is likely to be found; a guess, infinite if none seems to fit.

        Args:
            shape: The shape.
            best_s: Best time so far; an outlook above it may be any time above it, an infinite one
                says that nothing fits, or nothing within ``LEFT_OUT`` of it.
        """
        ...

    def open(self, shape: S_contra, best_s: float) -> C | None:
        """A good plan of a shape, None if none was found that fits and comes near the best.

        Args:
            shape: The shape.
            best_s: Best time so far: an estimate, or what was judged where that is more. What is
                slower by more than ``LEFT_OUT`` need not be found.
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

    def is_plain(self, shape: S_contra) -> bool:
        """Whether a shape is worked out at once: one device, or the batch over all of them."""
        ...

    def is_late(self) -> bool:
        """Whether a wall-clock guard has run out."""
        ...

    def beside(self, work: Callable[[], None]) -> Callable[[], None]:
        """Begin something while the search goes on; what is returned waits for its end.

        Args:
            work: It asks for bounds beyond the early efforts, of shapes whose bounds had the early
                ones, and for nothing else.
        """
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
    is_misfit: bool = False
    is_by_hand: bool = False
    real_s: float = inf


@dataclass(slots=True, order=True)
class _Waiting(Generic[S]):
    """A shape that is not opened: the least bound comes first, then what was taken first."""

    bound_s: float
    index: int
    effort: int = field(compare=False)
    shape: S = field(compare=False)
    outlook_s: float = field(default=0.0, compare=False)
    known_s: float = field(default=inf, compare=False)


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
    _heap: list[_Waiting[S]] = field(default_factory=list)
    _aside: list[_Waiting[S]] = field(default_factory=list)
    _opened: list[_Opened[S, C]] = field(default_factory=list)
    _empty: list[_Waiting[S]] = field(default_factory=list)
    _candidates: list[C] = field(default_factory=list)  # of the verdicts
    _num_shapes: int = 0
    _sharpened: float = 0.0
    _is_cut_short: bool = False  # bounds might be sharper but for the clock
    _num_reopened: int = 0

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
            self._improve_and_judge()
            known_s = self._known_s()
            if isfinite(known_s) and not self._is_flattered(known_s):
                break
            self._take_back(known_s)
            if self.stopped_by or not (isfinite(known_s) or self._heap):
                self._judge(everything=True)
                break
            num_before = len(self._opened)
            self._open_more()
            is_same = len(self._opened) == num_before
            if isfinite(known_s) and is_same and not self._may_win(known_s):
                break
        if self.stopped_by == "time":
            self._judge_plain()
        return self._winner()

    def _winner(self) -> V | None:
        """The fastest that fits; among equals the one that is preferred."""

        def key(at: int) -> tuple[float, int, int, int, str]:
            time_s = float(f"{self.verdicts[at].step_s:.6e}")
            return time_s, *self.space.preference(self._candidates[at])[1:]

        fitting = [at for at, verdict in enumerate(self.verdicts) if verdict.fits]
        return self.verdicts[min(fitting, key=key)] if fitting else None

    def _known_s(self) -> float:
        """Seconds that shapes are to beat, as far as they are real; infinite if nothing fits."""
        fitting = (o for o in self._opened if o.is_judged and not o.is_misfit)
        return min(map(self._time_s, fitting), default=inf)

    def _is_flattered(self, known_s: float) -> bool:
        """Whether an estimate that did not come true may have kept others from being tried."""
        self._num_reopened += 1
        if self._num_reopened > MAX_REOPENED:
            return False
        best_s = min(o.candidate.estimate_s for o in self._opened)
        hope = HOPE if known_s > HOPE * best_s else 1.0  # else what comes near was opened
        aside = (w for w in self._aside if w.outlook_s < hope * known_s * (1 - SLACK))
        waiting = [*self._heap, *aside, *(w for w in self._empty if self._is_back(w, known_s))]
        return self._may_win(known_s) or any(w.bound_s < known_s * (1 - SLACK) for w in waiting)

    def _may_win(self, known_s: float) -> bool:
        """Whether something that is not judged has a better estimate than what is known."""
        return any(o.candidate.estimate_s < known_s * (1 - SLACK) for o in self._unjudged())

    @property
    def bound_s(self) -> float:
        """The least bound over all shapes."""
        waiting = [w.bound_s for w in (*self._heap, *self._aside, *self._empty)]
        return min([*(o.bound_s for o in self._opened), *waiting], default=0.0)

    @property
    def model_gap(self) -> float:
        """Share of the best estimate that its lower bound over all shapes leaves open."""
        best_s = min((o.candidate.estimate_s for o in self._opened), default=0.0)
        return max(0.0, 1 - self._least_floor(best_s)[0] / best_s) if best_s > 0 else 0.0

    # -- opening -------------------------------------------------------------------------------
    def _add(self, shapes: Iterable[S]) -> None:
        for shape in shapes:
            bound_s = self.space.bound_s(shape, 0, inf)
            self._num_shapes += 1
            if isfinite(bound_s):
                heapq.heappush(self._heap, _Waiting(bound_s, self._num_shapes, 0, shape))

    def _open_more(self) -> None:
        """Open shapes, best bound first, until none left can be better than the best of them."""
        best_s, num_fresh = self._best_s(), 0
        while True:
            is_enough = num_fresh + len(self._unjudged()) >= MIN_OPENED
            near = self._nearest(best_s, must=not is_enough)
            reach_s = best_s * (1 + SLACK)
            may_beat = bool(self._heap) and self._heap[0].bound_s <= reach_s
            if not may_beat and near is None and (is_enough or not self._heap):
                break
            if self._must_stop():
                break
            if not may_beat and near is not None:
                self._aside.remove(near)
            else:
                near = self._taken(best_s)
            found = None if near is None else self._open(near, best_s)
            if found is not None:
                num_fresh += 1
                best_s = min(best_s, found.estimate_s)

    def _nearest(self, best_s: float, *, must: bool) -> _Waiting[S] | None:
        """What was set aside and is to be opened next; None if nothing comes near."""
        rows = self._aside
        if not must:
            reach_s = best_s * (1 + SLACK)  # what is as fast may be simpler
            rows = [w for w in rows if w.outlook_s <= HOPE * best_s and w.bound_s <= reach_s]
        return min(rows, key=lambda w: (w.outlook_s, w.index), default=None)

    def _taken(self, best_s: float) -> _Waiting[S] | None:
        """The shape with the least bound, if it is to be opened; else it is dealt with."""
        first = heapq.heappop(self._heap)
        if first.effort + 1 < self.space.early_efforts:
            sharper_s = self.space.bound_s(first.shape, first.effort + 1, best_s)
            first.bound_s, first.effort = max(first.bound_s, sharper_s), first.effort + 1
            if isfinite(first.bound_s):
                heapq.heappush(self._heap, first)
            return None
        if isfinite(best_s):  # else there is nothing to compare with
            first.outlook_s = self.space.outlook_s(first.shape, best_s)
            if not isfinite(first.outlook_s):
                self._leave_out(first, best_s)
                return None
            if first.outlook_s > best_s * (1 + SLACK):
                self._aside.append(first)
                return None
        return first

    def _open(self, waiting: _Waiting[S], best_s: float) -> C | None:
        self.num_opened += 1
        found = self.space.open(waiting.shape, best_s)
        if found is None:
            self._leave_out(waiting, best_s)
            return None
        self._opened.append(_Opened(waiting.shape, waiting.bound_s, waiting.effort, found))
        return found

    def _leave_out(self, waiting: _Waiting[S], known_s: float) -> None:
        waiting.known_s = known_s
        self._empty.append(waiting)

    def _take_back(self, known_s: float) -> None:
        """What was left out beside an estimate that did not come true is to be opened again.

        Args:
            known_s: What shapes are to beat: what was left out beside that stays where it is.
        """
        back = [w for w in self._empty if self._is_back(w, known_s)]
        self._empty = [w for w in self._empty if not self._is_back(w, known_s)]
        if not isfinite(known_s):
            back, self._aside = [*back, *self._aside], []
        for waiting in back:
            heapq.heappush(self._heap, waiting)

    @staticmethod
    def _is_back(waiting: _Waiting[S], known_s: float) -> bool:
        """Whether what was left out beside an estimate may be better than what is real."""
        return isfinite(waiting.known_s) and LEFT_OUT * waiting.known_s < known_s

    def _must_stop(self) -> bool:
        if self.num_opened >= MAX_OPENED:
            self.stopped_by = self.stopped_by or "work"
        elif self.space.is_late():
            self.stopped_by = "time"
        else:
            return False
        return True

    def _best_s(self) -> float:
        """The best estimate of what is not known to be a misfit; its time where it was judged."""
        rows = (o for o in self._opened if not o.is_misfit)
        return min((self._time_s(o) for o in rows), default=inf)

    @staticmethod
    def _time_s(row: _Opened[S, C]) -> float:
        """An estimate, unless it is known to flatter."""
        estimate_s = row.candidate.estimate_s
        return max(row.real_s, estimate_s) if row.is_judged else estimate_s

    def _unjudged(self) -> list[_Opened[S, C]]:
        return [o for o in self._opened if not o.is_judged]

    # -- improving -----------------------------------------------------------------------------
    def _sharpen(self, best_s: float, *, goes_early: bool) -> None:
        """Lift the least bound with more effort, again and again, while the work lasts.

        Nothing but the least one matters, so that it gets all effort until another one is.

        Args:
            best_s: A bound from here on need not be sharper.
            goes_early: Whether it goes on where the least one has not had the early efforts.
        """
        early, last = self.space.early_efforts, self.space.efforts - 1
        rows: list[_Opened[S, C] | _Waiting[S]]
        rows = [*self._opened, *self._heap, *self._aside, *self._empty]
        rows = [row for row in rows if row.bound_s < best_s]
        while rows and isfinite(best_s) and self._sharpened < MAX_SHARPENED:
            least = min(rows, key=lambda row: row.bound_s)
            if least.effort == last or least.bound_s >= best_s:
                break
            if self.space.is_late():
                self._is_cut_short = True
                break
            if least.effort + 1 < early and not goes_early:
                break
            least.effort += 1
            before = self.space.spent(least.shape)
            sharper_s = self.space.bound_s(least.shape, least.effort, best_s)
            least.bound_s = max(least.bound_s, sharper_s)
            self._sharpened += self.space.spent(least.shape) - before

    def _improve_and_judge(self) -> None:
        """The best are improved and judged, while bounds are sharpened; then what is weak."""
        best_s = self._best_s()
        sharpened = self.space.beside(partial(self._sharpen, best_s, goes_early=False))
        self._improve_best()
        self._judge()
        sharpened()
        self._sharpen(best_s, goes_early=True)
        if self._is_cut_short:
            self.stopped_by = "time"
        heapq.heapify(self._heap)
        self._judge_better(self._improve_weak())
        self._judge_by_hand()

    def _improve_best(self) -> None:
        for _ in range(NUM_IMPROVED):
            rows = sorted(self._unjudged(), key=lambda o: self.space.preference(o.candidate))
            todo = [o for o in rows[:NUM_IMPROVED] if not o.is_improved]
            if not todo or self._is_late():
                break
            self._improve_one(todo[0])

    def _improve_weak(self) -> list[_Opened[S, C]]:
        """What keeps the model's gap open is improved, or opened; those that were."""
        found: list[_Opened[S, C]] = []
        for _ in range(MAX_IMPROVED):
            weak = self._weakest()
            if weak is None or self._is_late():
                break
            if isinstance(weak, _Opened):
                if not self._improve_one(weak):
                    continue
            else:
                self._aside.remove(weak)
                if self._open(weak, self._best_s()) is None:
                    break
                weak = self._opened[-1]
            found.append(weak)
        return found

    def _improve_one(self, row: _Opened[S, C]) -> bool:
        """Improve a row; whether it is another plan now."""
        before = row.candidate
        row.candidate = self.space.improve(before)
        row.is_improved, row.is_modelled = True, False
        return row.candidate is not before

    def _weakest(self) -> _Opened[S, C] | _Waiting[S] | None:
        """What keeps the model's gap open, if something can still be done about it."""
        best_s = min((o.candidate.estimate_s for o in self._opened), default=0.0)
        floor_s, weak = self._least_floor(best_s)
        if weak is None or best_s <= 0 or not MODEL_GAP < 1 - floor_s / best_s <= CLOSABLE_GAP:
            return None
        if isinstance(weak, _Waiting):
            return weak if weak in self._aside else None
        return None if weak.is_improved else weak

    def _least_floor(self, best_s: float) -> tuple[float, _Opened[S, C] | _Waiting[S] | None]:
        """The least lower bound of estimates, and whose it is.

        What was left out does not count: its estimate is known to be no better, or nothing fits.
        """
        rows: list[_Opened[S, C] | _Waiting[S]] = [*self._opened, *self._heap, *self._aside]
        floors = [row.bound_s for row in rows]
        while rows:
            floor_s, at = min((floor_s, at) for at, floor_s in enumerate(floors))
            row = rows[at]
            if floor_s >= best_s or isinstance(row, _Waiting):
                return floor_s, row
            floors[at] = self._floor_s(row)
            if floors[at] <= floor_s:
                return floor_s, row
        return best_s, None

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
            may_win = row.bound_s < self._least_judged_s()  # a bound of what the judge would find
            if not row.is_judged and may_win and not self._is_late():
                self._judge_one(row)

    def _judge_better(self, rows: Iterable[_Opened[S, C]]) -> None:
        """Judge rows that were improved, where their estimates are below what was judged."""
        for row in sorted(rows, key=lambda o: self.space.preference(o.candidate)):
            may_win = row.candidate.estimate_s < self._least_judged_s()
            if may_win and not self._is_late():
                self._judge_one(row)

    def _judge_plain(self) -> None:
        """Judge what the clock kept from being tried though it takes next to no time to try."""
        waiting = sorted(w for w in (*self._heap, *self._aside) if self.space.is_plain(w.shape))
        for row in waiting:
            for effort in range(row.effort + 1, self.space.early_efforts):
                if row.bound_s < self._least_judged_s():
                    sharper_s = self.space.bound_s(row.shape, effort, self._least_judged_s())
                    row.bound_s, row.effort = max(row.bound_s, sharper_s), effort
            if row.bound_s < self._least_judged_s():
                (self._heap if row in self._heap else self._aside).remove(row)
                self._open(row, self._least_judged_s())
        plain = [o for o in self._unjudged() if self.space.is_plain(o.shape)]
        for found in sorted(plain, key=lambda o: self.space.preference(o.candidate)):
            if found.bound_s < self._least_judged_s():
                self._judge_one(found)

    def _least_judged_s(self) -> float:
        """The best time of what was judged and fits."""
        return min((v.step_s for v in self.verdicts if v.fits), default=inf)

    def _judge_one(self, row: _Opened[S, C]) -> None:
        verdict = self.space.judge(row.candidate)
        row.is_judged, row.is_misfit = True, not verdict.fits
        row.real_s = verdict.step_s if verdict.fits else inf
        self.verdicts.append(verdict)
        self._candidates.append(row.candidate)

    def _judge(self, *, everything: bool = False) -> None:
        rows = sorted(self._unjudged(), key=lambda o: self.space.preference(o.candidate))
        before = sum(v.fits for v in self.verdicts)
        best_s = self._best_s()
        for num_judged, row in enumerate(rows):
            num_fitting = sum(v.fits for v in self.verdicts)
            reach_s = (RIVAL if num_fitting == 1 else NEAR) * best_s
            if num_fitting:  # where estimates flatter, all below what is real may be faster
                reach_s = max(reach_s, self._known_s())
            if num_fitting - before >= NUM_JUDGED or (
                num_fitting and row.candidate.estimate_s > reach_s
            ):
                break
            if num_judged >= MAX_JUDGED and (num_fitting or not everything):
                break
            if num_fitting and self._is_late():
                break
            self._judge_one(row)
