"""Good single pipelines for every count vector of devices.

For a period ``P`` (no stage may take longer per micro-batch) and stages taken from the last one
backwards, the state is (number of stages, devices used by class), its value the fewest blocks left:
with the same devices and stages more blocks done is never worse, since a run of fewer blocks is
neither slower nor larger. A stage takes as many blocks as fit into ``P`` and its memory with as
many micro-batches alive as there are stages behind it. Periods form a geometric grid; the sequence
of kinds that finishes is then cut anew at its own least period.

What is kept per vector are the pipelines that no other beats in period, first micro-batch and
once-per-step work together.

Classes with many devices are counted in units, so that no class has more than
:data:`MAX_UNITS` of them; a stage has whole units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopar.solver.mixed_problem import (
    MixedProblem,
    PipelineChoice,
    StageChoice,
    message_s,
)
from autopar.solver.mixed_runs import RunPrices, run_prices

MAX_UNITS = 24
PERIOD_RATIO = 1.1  # of the grid; what is found is cut again at its own least period
BISECTIONS = 40
PRECISION = 1e-4  # of a least period
MAX_VARIANTS = 3  # of the first stage, where several kinds finish with the same devices
FEW_MICROBATCHES = 4  # of the whole batch: pipelines may then have more stages than micro-batches
NO_CAP = 1 << 30
MAX_PER_VECTOR = 6  # pipelines kept for a vector and a size of micro-batches

Vector = tuple[int, ...]


def never() -> bool:
    """No clock guards the search."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A pipeline whose number of micro-batches is open.

    Attributes:
        samples: Of its micro-batches.
        devices: By class.
        stages: In forward order.
        fill_s: Seconds of the first micro-batch, all the way and back.
        period_s: Seconds of each other one.
        step_s: Once per step, of its slowest stage.
        exchange_s: About what adding up gradients with another pipeline takes its slowest stage.
        most: Most micro-batches for which its stages fit: with fewer than stages, fewer are alive.
    """

    samples: int
    devices: Vector
    stages: tuple[StageChoice, ...]
    fill_s: float
    period_s: float
    step_s: float
    exchange_s: float
    most: int = 1 << 30

    def time_s(self, count: int, *, shares: bool) -> float:
        """Estimated seconds of a step with ``count`` micro-batches."""
        rest = self.step_s + (self.exchange_s if shares else 0.0)
        return self.fill_s + (count - 1) * self.period_s + rest

    def most_microbatches(self, step_s: float, *, shares: bool) -> int:
        """The most that it can take in ``step_s``."""
        room = step_s - self.time_s(1, shares=shares)
        if room < 0:
            return 0
        count = 1 + int(room / self.period_s + 1e-9) if self.period_s > 0 else self.most
        return min(count, self.most)

    def choice(self, count: int) -> PipelineChoice:
        """With a number of micro-batches."""
        return PipelineChoice(stages=self.stages, num_microbatches=count)


@dataclass(frozen=True, slots=True)
class _Link:
    """How a state was reached: the stage put in front, and the state behind it."""

    kind: int
    behind: _Link | None

    def kinds(self) -> Iterator[int]:
        """Kinds in forward order."""
        yield self.kind
        if self.behind is not None:
            yield from self.behind.kinds()


@dataclass(slots=True)
class PipelineSearch:
    """Makes templates, and keeps the prices that they share.

    Attributes:
        problem: The problem.
        prices: Run prices by kind.
        num_states: Work done so far.
    """

    problem: MixedProblem
    prices: tuple[RunPrices, ...] = field(init=False)
    num_states: int = 0
    units: Vector = field(init=False)
    _typical: dict[tuple[int, int, float], float] = field(default_factory=dict)
    _stages: dict[StageChoice, tuple[float, float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prices = run_prices(self.problem)
        self.units = tuple(
            unit_of(cls.num_devices, cls.machine_size) for cls in self.problem.classes
        )

    def templates(
        self, available: Vector | None = None, *, is_late: Callable[[], bool] = never
    ) -> tuple[Template, ...]:
        """All templates within the available devices, by class.

        Args:
            available: Devices of each class; all there are if left out.
            is_late: Whether to stop with those found so far, if any.
        """
        most = available or tuple(c.num_devices for c in self.problem.classes)
        found: list[Template] = []
        for samples in sorted({kind.samples for kind in self.problem.kinds}):
            for cap in self._caps(samples):
                if found and is_late():
                    return tuple(found)
                sequences: dict[tuple[int, ...], float] = {}
                for period_s in self._periods(samples, most):
                    for kinds in self._finishing(samples, period_s, most, cap):
                        sequences.setdefault(kinds, period_s)
                made = [self.cut(k, most=cap, near_s=p) for k, p in sequences.items()]
                found += _not_beaten([t for t in made if t is not None])
        return tuple(found)

    def _caps(self, samples: int) -> list[int]:
        """Most micro-batches alive: any number, and if the whole batch is a few, each of them."""
        count = self.problem.batch // samples
        few = range(1, count + 1) if count <= FEW_MICROBATCHES else ()
        return [*few, NO_CAP]

    def _usable(self, samples: int, most: Vector) -> list[int]:
        """Kinds of a size, on whole units or on all devices of a class."""
        usable = []
        for index, kind in enumerate(self.problem.kinds):
            c = kind.device_class
            is_whole = kind.num_devices % self.units[c] == 0
            if kind.samples == samples and is_whole and kind.num_devices <= most[c]:
                usable.append(index)
        return usable

    def _periods(self, samples: int, most: Vector) -> list[float]:
        """Periods from what all devices together could reach to what the slowest kind does."""
        usable = self._usable(samples, most)
        if not usable:
            return []
        n = self.problem.num_blocks
        whole = {}
        for index in usable:
            blocks = self.problem.kinds[index].blocks
            whole[index] = sum(min(o.total_s for o in b.options) for b in blocks)
        rate = [0.0] * len(self.problem.classes)
        for index, seconds in whole.items():
            kind = self.problem.kinds[index]
            c = kind.device_class
            rate[c] = max(rate[c], 1.0 / (seconds * kind.num_devices))
        low = 1.0 / sum(r * m for r, m in zip(rate, most, strict=True))
        high = max(
            sum(max(o.total_s for o in b.options) for b in self.problem.kinds[index].blocks)
            for index in usable
        )
        low = max(low, max(whole.values()) / n / len(usable) / 64)
        periods = [low]
        while periods[-1] < high:
            periods.append(periods[-1] * PERIOD_RATIO)
        return periods

    def _finishing(
        self, samples: int, period_s: float, most: Vector, cap: int
    ) -> list[tuple[int, ...]]:
        """Sequences of kinds that run all blocks with no stage longer than ``period_s``."""
        usable = self._usable(samples, most)
        zero = (0,) * len(most)
        layer: dict[Vector, tuple[int, _Link | None]] = {zero: (self.problem.num_blocks, None)}
        best: dict[Vector, int] = {}
        done: list[tuple[Vector, tuple[int, ...]]] = []
        for flight in range(1, min(self.problem.max_stages, self.problem.num_blocks) + 1):
            fresh: dict[Vector, tuple[int, _Link | None]] = {}
            ended: dict[Vector, list[_Link]] = {}
            for vector, (high, link) in sorted(layer.items(), key=lambda item: item[0]):
                for index in usable:
                    kind = self.problem.kinds[index]
                    c = kind.device_class
                    count = vector[c] + kind.num_devices
                    if count > most[c]:
                        continue
                    at = (*vector[:c], count, *vector[c + 1 :])
                    self.num_states += 1
                    low = self.longest_run(index, high, min(flight, cap), period_s)
                    if low >= high or (low and low >= best.get(at, high)):
                        continue
                    if any(
                        all(a <= b for a, b in zip(v, at, strict=True)) for v, _ in done if v != at
                    ):
                        continue  # fewer devices do all of it already, with no more stages
                    best[at] = low
                    fresh[at] = (low, _Link(index, link))
                    if low == 0:  # several kinds may finish: which is best is seen later
                        ended.setdefault(at, []).append(_Link(index, link))
            for vector, links in sorted(ended.items(), key=lambda item: item[0]):
                fresh.pop(vector, None)
                done += [(vector, tuple(last.kinds())) for last in links[:MAX_VARIANTS]]
            layer = fresh
            if not layer:
                break
        return [kinds for _, kinds in done]

    def longest_run(self, index: int, high: int, flight: int, period_s: float) -> int:
        """The first block of the longest run that ends at ``high`` and takes no longer."""
        fits = self.prices[index].fits
        if not fits(high - 1, high, flight, period_s):
            return high
        # a run of typical blocks of the same number is a good guess, then by halves
        low, known = 0, high - 1
        if fits(0, high, flight, period_s):
            return 0
        step = 1
        while known - step > low and fits(known - step, high, flight, period_s):
            known -= step
            step *= 2
        low = max(low, known - step)
        while known - low > 1:
            middle = (low + known) // 2
            if fits(middle, high, flight, period_s):
                known = middle
            else:
                low = middle
        return known

    def cut(
        self, kinds: Sequence[int], *, most: int = NO_CAP, near_s: float = 0.0
    ) -> Template | None:
        """The cuts of least period for a sequence of kinds; None if it does not fit.

        Args:
            kinds: In forward order.
            most: Most micro-batches that go through it.
            near_s: A period that is possible, and not much above the least; 0 if none is known.
        """
        cuts = self._least_cuts(kinds, most, near_s)
        return None if cuts is None else self.template(kinds, cuts, most=most)

    def _least_cuts(self, kinds: Sequence[int], most: int, near_s: float) -> list[int] | None:
        low_s = 0.0
        if near_s and self._cuts_at(kinds, near_s, most) is not None:
            high_s = near_s
            if self._cuts_at(kinds, near_s / PERIOD_RATIO, most) is None:
                low_s = near_s / PERIOD_RATIO
        else:
            high_s = 2 * sum(
                max(o.total_s for o in b.options)
                for k in kinds
                for b in self.problem.kinds[k].blocks
            )
        best = self._cuts_at(kinds, high_s, most)
        if best is None:
            return None
        for _ in range(BISECTIONS):
            if high_s - low_s <= high_s * PRECISION:
                break
            middle_s = (low_s + high_s) / 2
            found = self._cuts_at(kinds, middle_s, most)
            if found is None:
                low_s = middle_s
            else:
                high_s, best = middle_s, found
        return best

    def _cuts_at(self, kinds: Sequence[int], period_s: float, most: int) -> list[int] | None:
        """First blocks of the stages; every stage but the first is as long as it can be."""
        at, starts = self.problem.num_blocks, []
        for flight, index in enumerate(reversed(kinds), 1):
            in_front = len(kinds) - flight
            if at <= in_front:
                return None
            low = max(self.longest_run(index, at, min(flight, most), period_s), in_front)
            if low >= at:
                return None
            at = low
            starts.append(at)
        return starts[::-1] if at == 0 else None

    def template(
        self, kinds: Sequence[int], starts: Sequence[int], *, most: int = NO_CAP
    ) -> Template | None:
        """A sequence with given cuts, its cheapest options and its figures."""
        depth, problem = len(kinds), self.problem
        ends = [*starts[1:], problem.num_blocks]
        stages = []
        for s, (index, low, high) in enumerate(zip(kinds, starts, ends, strict=True)):
            options = self.prices[index].options(low, high, min(depth - s, most))
            if options is None:
                return None
            stages.append(StageChoice(kind=index, low=low, high=high, options=options))
        return self.priced(tuple(stages), most=most)

    def priced(self, stages: tuple[StageChoice, ...], *, most: int = NO_CAP) -> Template:
        """Estimates of a pipeline that takes ``most`` micro-batches at most."""
        problem = self.problem
        seconds, once, exchange = [], [], []
        for stage in stages:
            took = self.stage_s(stage)
            seconds.append(took[0])
            once.append(took[1])
            exchange.append(took[2])
        hops = [self.hop_s(a.kind, b.kind, a.high - 1) for a, b in pairwise(stages)]
        period_s = max(
            (sum(seconds[i : j + 1]) + 2 * sum(hops[i:j])) / (j - i + 1)
            for i in range(len(stages))
            for j in range(i, len(stages))
        )
        devices = [0] * len(problem.classes)
        for stage in stages:
            kind = problem.kinds[stage.kind]
            devices[kind.device_class] += kind.num_devices
        return Template(
            samples=problem.kinds[stages[0].kind].samples,
            devices=tuple(devices),
            stages=stages,
            fill_s=sum(seconds) + 2 * sum(hops),
            period_s=period_s,
            step_s=max(once),
            exchange_s=max(exchange),
            most=most,
        )

    def stage_s(self, stage: StageChoice) -> tuple[float, float, float]:
        """Seconds of a micro-batch, once per step, and of adding up gradients; many share them."""
        found = self._stages.get(stage)
        if found is None:
            kind = self.problem.kinds[stage.kind]
            blocks = kind.blocks[stage.low : stage.high]
            pairs = zip(blocks, stage.options, strict=True)
            shard = sum(self.problem.gradient_bytes[stage.low : stage.high]) / kind.num_devices
            found = self._stages[stage] = (
                sum(b.options[o].total_s for b, o in pairs),
                sum(b.step_s for b in blocks),
                self._between_s("all_reduce", shard, stage.kind, None),
            )
        return found

    def hop_s(self, kind: int, after: int, boundary: int) -> float:
        """Seconds of a message between typical devices of two kinds of stages, one way."""
        kinds = self.problem.kinds
        amount = max(kinds[kind].boundary_bytes[boundary], kinds[after].boundary_bytes[boundary])
        return self._between_s("p2p", amount, kind, after)

    def _between_s(self, what: str, amount_bytes: float, kind: int, after: int | None) -> float:
        """Seconds between typical devices: of two machines if there are two."""
        problem = self.problem
        one = problem.kinds[kind].device_class
        other = -1 if after is None else problem.kinds[after].device_class
        key = (one, other, amount_bytes)  # -1 occurs with reductions only
        if key not in self._typical:
            ends = self._typical_ends(one, other)
            if what == "p2p":
                self._typical[key] = message_s(problem, amount_bytes, ends[:1], ends[1:])
            else:
                self._typical[key] = problem.model.collective_time_s(what, amount_bytes, ends)
        return self._typical[key]

    def _typical_ends(self, one: int, other: int) -> tuple[int, int]:
        """A rank of each class, on two machines where there are two."""
        problem = self.problem
        first = problem.classes[one].machines
        if other < 0:  # any class, the own one last
            others = [c for c in range(len(problem.classes)) if c != one]
            other = others[0] if others else one
        second = problem.classes[other].machines
        a, b = problem.first_ranks[first[0]], problem.first_ranks[second[-1]]
        if a == b:
            b = a + min(1, problem.classes[one].machine_size - 1)
        return a, b


def unit_of(num_devices: int, machine_size: int) -> int:
    """Devices that are counted together: 1 in small classes, else whole machines.

    >>> unit_of(16, 8), unit_of(128, 8), unit_of(512, 8)
    (1, 8, 24)
    """
    if num_devices <= MAX_UNITS:
        return 1
    machines = num_devices // machine_size
    return machine_size * max(1, -(-machines // MAX_UNITS))


def _not_beaten(found: Sequence[Template]) -> list[Template]:
    """Those that no other beats in every respect, a few for each vector."""
    rows: dict[Vector, list[Template]] = {}
    for item in sorted(found, key=lambda t: (t.period_s, t.fill_s, len(t.stages))):
        kept = rows.setdefault(item.devices, [])
        is_beaten = any(
            other.fill_s + other.step_s <= item.fill_s + item.step_s
            and other.exchange_s <= item.exchange_s
            for other in kept
        )
        if not is_beaten and len(kept) < MAX_PER_VECTOR:
            kept.append(item)
    return [item for vector in sorted(rows) for item in rows[vector]]
