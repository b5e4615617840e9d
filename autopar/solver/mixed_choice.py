"""Which pipelines stand side by side, and how the batch is shared among them.

For a step of ``T`` seconds a template takes at most so many samples; pipelines whose devices are
there side by side take the sum. Whether the batch can be done in ``T`` is therefore a knapsack over
count vectors, solved exactly by dynamic programming over the number of pipelines, and ``T`` is
found by bisection. The shares of the chosen pipelines, integers ``m_i`` with ``sum_i m_i b_i = B``,
are an integer program (CP-SAT)::

    minimise max_i [fill_i + (m_i - 1) period_i + once_i]

The best few choices, one for each number of pipelines, are simulated; that decides.

For cost the same knapsack is asked over a grid of times: the price of a choice is the price of its
devices for as long as the step lasts, and a slower step on fewer devices may be cheaper.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model

from autopar.solver.mixed_bound import cost_bound, device_seconds, time_bound_s
from autopar.solver.mixed_cuts import better_cuts, better_orders, swaps
from autopar.solver.mixed_pipelines import PipelineSearch, Template, Vector, never
from autopar.solver.mixed_problem import (
    MixedFigures,
    MixedProblem,
    PipelineChoice,
    device_counts_of,
    evaluate,
)
from autopar.solver.objective import SECONDS_PER_HOUR, Objective

BISECTIONS = 16
SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2)  # of the least time: other choices that are about as good
TIME_RATIO = 1.03  # grid of times when cost counts
MAX_TIMES = 400
PER_NUMBER = 4  # choices that are kept for each number of pipelines and slack
NUM_SIMULATED = 40
MAX_ACTIONS = 40_000  # forwards of all simulated choices together: a limit of work
NUM_POLISHED = 6  # choices whose cuts and orders are worked on further
SHARES_STEPS = 1 << 24
SHARES_WORK = 1.0  # deterministic seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A choice with its figures.

    Attributes:
        pipelines: The choice.
        figures: Simulated.
        cost: Price of a step; None where prices are not known.
    """

    pipelines: tuple[PipelineChoice, ...]
    figures: MixedFigures
    cost: float | None

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.figures.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedAnswer:
    """What was found.

    Attributes:
        best: The best choice.
        others: Those that lost, best first.
        bound_s: Lower bound of the time of every choice.
        cost_bound: The same of its price; None where prices are not known.
        is_cut_short: Whether a clock ended the search.
    """

    best: Simulated
    others: tuple[Simulated, ...]
    bound_s: float
    cost_bound: float | None
    is_cut_short: bool = False


def choose(
    problem: MixedProblem,
    objective: Objective = Objective.TIME,
    *,
    cost_limit: float | None = None,
    hints: Sequence[tuple[PipelineChoice, ...]] = (),
    num_polished: int = NUM_POLISHED,
    is_late: Callable[[], bool] = never,
) -> MixedAnswer | None:
    """The best choice that was found, or None if nothing fits.

    Args:
        problem: The problem.
        objective: What to minimise; for cost every class needs its ``cost_per_hour``.
        cost_limit: The most that a step may cost.
        hints: Choices that are simulated beside those found.
        num_polished: Choices whose cuts and orders are worked on further.
        is_late: Whether to end with the best so far; a first choice is waited for.
    """
    is_cut_short = False

    def stops() -> bool:
        nonlocal is_cut_short
        is_cut_short |= is_late()
        return is_cut_short

    search = PipelineSearch(problem)
    templates = search.templates(is_late=stops)
    wanted: dict[tuple[PipelineChoice, ...], None] = dict.fromkeys(hints)
    if templates:
        ways = _Ways(problem, templates)
        found = ways.fastest() if objective is Objective.TIME else ways.by_price(cost_limit)
        for group in found:
            made = shared(problem, group)
            if made is not None:
                wanted[made] = None
    simulated = _all_simulated(problem, list(wanted), stops)
    if not simulated:
        return None

    def rank(item: Simulated) -> tuple[float, ...]:
        key = _key(item, objective, cost_limit)
        return (*key, sum(device_counts_of(problem, item.pipelines)), len(item.pipelines))

    simulated.sort(key=rank)
    for item in _unlike(simulated)[:num_polished]:
        if stops():
            break
        turned = better_orders(search, item.pipelines)
        finer = {better_cuts(search, c) for c in {item.pipelines, turned}} | {turned}
        finer |= set(swaps(search, item.pipelines))
        finer.discard(item.pipelines)
        simulated += _all_simulated(problem, sorted(finer, key=str), stops)
    simulated.sort(key=rank)
    bound_s = time_bound_s(problem)
    has_costs = all(c.cost_per_hour is not None for c in problem.classes)
    return MixedAnswer(
        best=simulated[0],
        others=tuple(simulated[1:]),
        bound_s=min(bound_s, simulated[0].step_s),
        cost_bound=cost_bound(problem) if has_costs else None,
        is_cut_short=is_cut_short,
    )


def _key(item: Simulated, objective: Objective, limit: float | None) -> tuple[float, ...]:
    cost = 0.0 if item.cost is None else item.cost
    over = 0.0 if limit is None or cost <= limit * (1 + 1e-9) else cost
    rounded = float(f"{item.step_s:.9e}")  # sums in another order differ in the last digits
    if objective is Objective.COST:
        return (over, float(f"{cost:.9e}"), rounded)
    return (over, rounded, cost)


def _unlike(simulated: Sequence[Simulated]) -> list[Simulated]:
    """The first of those with the same devices, micro-batches and numbers of stages."""
    found: dict[object, Simulated] = {}
    for item in simulated:
        key = tuple(
            (p.num_microbatches, tuple(sorted(stage.kind for stage in p.stages)))
            for p in item.pipelines
        )
        found.setdefault(key, item)
    return list(found.values())


def _all_simulated(
    problem: MixedProblem,
    choices: Sequence[tuple[PipelineChoice, ...]],
    is_late: Callable[[], bool],
) -> list[Simulated]:
    """The first few choices that can be placed, as many as the work limits allow."""
    found: list[Simulated] = []
    work = 0
    for choice in choices:
        if len(found) >= NUM_SIMULATED or (found and (work > MAX_ACTIONS or is_late())):
            break
        made = evaluated(problem, choice)
        work += sum(p.num_microbatches * len(p.stages) for p in choice if len(p.stages) > 1)
        if made is not None:
            found.append(made)
    return found


def evaluated(problem: MixedProblem, pipelines: tuple[PipelineChoice, ...]) -> Simulated | None:
    """A choice with its figures; None if it can't be placed or kept."""
    figures = evaluate(problem, pipelines)
    if figures is None:
        return None
    return Simulated(
        pipelines=pipelines,
        figures=figures,
        cost=price_of(problem, device_counts_of(problem, pipelines), figures.step_s),
    )


def price_of(problem: MixedProblem, devices: Vector, step_s: float) -> float | None:
    """Price of devices for a step; None if one in use has no price."""
    total = 0.0
    for cls, count in zip(problem.classes, devices, strict=True):
        if count and cls.cost_per_hour is None:
            return None
        total += count * (cls.cost_per_hour or 0.0)
    return total * step_s / SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class _Group:
    """Templates side by side; a chain of pairs."""

    samples: int
    template: int
    rest: _Group | None

    def members(self) -> Iterator[int]:
        yield self.template
        if self.rest is not None:
            yield from self.rest.members()


class _Ways:
    """The knapsack over count vectors, for given seconds of a step."""

    def __init__(self, problem: MixedProblem, templates: Sequence[Template]) -> None:
        self.problem, self.all = problem, templates
        self.most = tuple(c.num_devices for c in problem.classes)
        self.speeds = tuple(1.0 / max(sum(row), 1e-12) for row in device_seconds(problem))
        self.whole_speed = self._speed(self.most)
        batch = problem.batch
        able = [t for t in templates if batch // t.samples <= t.most]
        self.alone = sorted(able, key=lambda t: t.time_s(batch // t.samples, shares=False))

    def layers(self, step_s: float) -> list[dict[Vector, _Group]]:
        """Per number of pipelines: devices in use -> the group that takes most samples."""
        found = [self._single(step_s, shares=False)]
        parts = _undominated(self._single(step_s, shares=True))
        batch = self.problem.batch
        density = max((g.samples / self._speed(v) for v, g in parts), default=0.0)

        def is_promising(vector: Vector, group: _Group) -> bool:
            """Whether the devices that are left could do the rest: none has a better density."""
            left = self.whole_speed - self._speed(vector)
            return group.samples + density * left >= batch * (1 - 1e-9)

        layer = {v: g for v, g in parts if is_promising(v, g)}
        for _ in range(1, self.problem.max_pipelines):
            fresh: dict[Vector, _Group] = {}
            for vector, group in layer.items():
                for other, part in parts:
                    if part.template > group.template:
                        continue  # groups are listed in one order only
                    at = tuple(a + b for a, b in zip(vector, other, strict=True))
                    if any(a > b for a, b in zip(at, self.most, strict=True)):
                        continue
                    samples = min(batch, group.samples + part.samples)
                    old = fresh.get(at)
                    if old is None or samples > old.samples:
                        fresh[at] = _Group(samples, part.template, group)
            fresh = {v: g for v, g in fresh.items() if is_promising(v, g)}
            found.append(fresh)
            layer = dict(_undominated(fresh))
            if not layer:
                break
        return found

    def _speed(self, vector: Vector) -> float:
        """Samples per second of devices that never wait."""
        return sum(s * n for s, n in zip(self.speeds, vector, strict=True))

    def _single(self, step_s: float, *, shares: bool) -> dict[Vector, _Group]:
        best: dict[Vector, _Group] = {}
        batch = self.problem.batch
        for index, template in enumerate(self.all):
            count = template.most_microbatches(step_s, shares=shares)
            samples = min(batch, count * template.samples)
            old = best.get(template.devices)
            if samples > 0 and (old is None or samples > old.samples):
                best[template.devices] = _Group(samples, index, None)
        return best

    def _groups(self, step_s: float) -> list[tuple[Vector, tuple[Template, ...]]]:
        """Groups that do the whole batch in ``step_s``, fewest pipelines first."""
        done = []
        for layer in self.layers(step_s):
            for vector, group in sorted(layer.items(), key=lambda item: item[0]):
                if group.samples >= self.problem.batch:
                    done.append((vector, tuple(self.all[i] for i in group.members())))
        return done

    def least_s(self) -> float:
        """The least seconds in which some group does the batch; infinite if none ever does."""
        if self.alone:
            first = self.alone[0]
            high_s = first.time_s(self.problem.batch // first.samples, shares=False) * (1 + 1e-9)
        else:
            high_s = sum(t.time_s(min(t.most, self.problem.batch), shares=True) for t in self.all)
            if not self._groups(high_s):
                return math.inf
        low_s = 0.0
        for _ in range(BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if self._groups(middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return high_s

    def fastest(self) -> list[tuple[Template, ...]]:
        """Groups about as fast as the fastest, for each number of pipelines."""
        least_s = self.least_s()
        if math.isinf(least_s):
            return []
        found: dict[tuple[Template, ...], None] = {}
        for slack in SLACKS:
            seen: Counter[int] = Counter()
            for _, group in self._groups(least_s * slack):
                seen[len(group)] += 1
                if seen[len(group)] <= PER_NUMBER:
                    found[group] = None
        return list(dict.fromkeys([*((t,) for t in self.alone[:PER_NUMBER]), *found]))

    def by_price(self, limit: float | None) -> list[tuple[Template, ...]]:
        """The cheapest groups over a grid of times; with a limit, the fastest within it too."""
        rate = min(price_of(self.problem, t.devices, 1.0) or 0.0 for t in self.all)
        rows: list[tuple[float, float, tuple[Template, ...]]] = []
        best = float("inf")
        step_s = self.least_s()
        for _ in range(MAX_TIMES):
            if math.isinf(step_s) or step_s * rate > best:
                break  # even the cheapest devices cost more for so long
            for vector, group in self._groups(step_s):
                cost = price_of(self.problem, vector, step_s) or 0.0
                best = min(best, cost)
                rows.append((cost, step_s, group))
            step_s *= TIME_RATIO
        rows.sort(key=lambda row: row[:2])
        found = dict.fromkeys(row[2] for row in rows[:NUM_SIMULATED])
        if limit is not None:
            within = sorted((s, c, i) for i, (c, s, _) in enumerate(rows) if c <= limit * 1.02)
            found.update(dict.fromkeys(rows[i][2] for _, _, i in within[:NUM_SIMULATED]))
        return list(found)


def _undominated(layer: dict[Vector, _Group]) -> list[tuple[Vector, _Group]]:
    """Those that no other with fewer devices of every class matches."""
    kept: list[tuple[Vector, _Group]] = []
    for vector, group in sorted(layer.items(), key=lambda item: (sum(item[0]), item[0])):
        if not any(
            other.samples >= group.samples and all(a <= b for a, b in zip(v, vector, strict=True))
            for v, other in kept
        ):
            kept.append((vector, group))
    return kept


def shared(problem: MixedProblem, group: Sequence[Template]) -> tuple[PipelineChoice, ...] | None:
    """The batch shared among pipelines so that the slowest ends soonest; None if it can't be."""
    counts = shares(group, problem.batch)
    if counts is None:
        return None
    made = [t.choice(count) for t, count in zip(group, counts, strict=True)]
    return tuple(sorted(made, key=lambda p: (-p.num_microbatches, str(p.stages))))


def shares(group: Sequence[Template], batch: int) -> tuple[int, ...] | None:
    """Micro-batches of each pipeline, at least 1; None if their sizes can't add up to the batch."""
    if len(group) == 1:
        count, rest = divmod(batch, group[0].samples)
        return None if rest or not count else (count,)
    model = cp_model.CpModel()
    worst_s = max(t.time_s(max(1, batch // t.samples), shares=True) for t in group)
    unit_s = worst_s / SHARES_STEPS
    counts = [
        model.new_int_var(1, max(1, batch // t.samples), f"m{i}") for i, t in enumerate(group)
    ]
    slowest = model.new_int_var(0, 2 * SHARES_STEPS, "slowest")
    model.add(cp_model.LinearExpr.weighted_sum(counts, [t.samples for t in group]) == batch)
    for variable, template in zip(counts, group, strict=True):
        first = round(template.time_s(1, shares=True) / unit_s)
        model.add(slowest >= first + (variable - 1) * round(template.period_s / unit_s))
    model.minimize(slowest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = SHARES_WORK
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return tuple(solver.value(variable) for variable in counts)
