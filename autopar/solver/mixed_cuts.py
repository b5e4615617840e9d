"""Cuts and recomputing of one pipeline of given kinds of stages, by CP-SAT.

Dynamic programming (:mod:`autopar.solver.mixed_fill`) moves the cuts first, where runs of blocks
have options that are found greedily. A program that is small enough to be solved chooses them too.
As :mod:`autopar.solver.stages`, but every stage has a menu, a memory and devices of its own.
Variables: ``g[i, s]`` block i lies in stage s or later, so that ``x[i, s] = g[i, s] - g[i, s +
1]``; ``n[s, k, o]`` how many blocks of key k take option o in stage s; ``t_s`` seconds of stage s
per micro-batch; ``P`` the period; ``u`` the largest once-per-step work::

    minimise  sum_s t_s + (M - 1) P + u
    t_s = sum_{k, o} n[s, k, o] time[s, k, o]
    (j - i + 1) P >= sum_{i..j} t + 2 sum_{i <= s < j} c_s
    u >= once-per-step seconds of the blocks of stage s
    sum_o n[s, k, o] = sum_{i of key k} x[i, s]
    state + in_flight_s * saved + largest transient <= limit of the stage's class
    g[i, s] <= g[i + 1, s],  g[i, s + 1] <= g[i - 1, s]

Messages take what typical devices of two classes take, wherever the cut lies. The start is the
choice at hand, so the answer is never worse by this objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, permutations

from ortools.sat.python import cp_model

from autopar.solver.mixed_fill import with_less_fill
from autopar.solver.mixed_pipelines import PipelineSearch
from autopar.solver.mixed_problem import PipelineChoice, StageChoice

MEMORY_UNIT_BYTES = 1 << 16
TIME_STEPS = 1 << 22
WORK_LIMIT = 0.4  # deterministic seconds
MAX_PLACES = 800  # stages times blocks: in that limit nothing is found for more
MAX_ROUNDS = 4  # of swaps
MAX_ORDERS = 6  # of classes


def better_cuts(
    search: PipelineSearch, pipelines: Sequence[PipelineChoice]
) -> tuple[PipelineChoice, ...]:
    """Every pipeline cut again for the micro-batches that it has."""
    made = {pipeline: _cut_again(search, pipeline) for pipeline in dict.fromkeys(pipelines)}
    return tuple(made[pipeline] for pipeline in pipelines)


def better_orders(
    search: PipelineSearch, pipelines: Sequence[PipelineChoice]
) -> tuple[PipelineChoice, ...]:
    """Every pipeline with its kinds of stages in a better order: neighbours are swapped."""
    made = {pipeline: _turned(search, pipeline) for pipeline in dict.fromkeys(pipelines)}
    return tuple(made[pipeline] for pipeline in pipelines)


def swaps(
    search: PipelineSearch, pipelines: Sequence[PipelineChoice]
) -> Iterator[tuple[PipelineChoice, ...]]:
    """Choices in which one pipeline (and its equals) has its stages in another order.

    Two neighbours change places, or the classes follow one another in any order, each in one run.
    """
    for pipeline in dict.fromkeys(pipelines):
        kinds = [stage.kind for stage in pipeline.stages]
        most = min(pipeline.num_microbatches, len(kinds))
        for other in dict.fromkeys(map(tuple, _orders(search, kinds))):
            found = None if list(other) == kinds else search.cut(other, most=most)
            if found is not None:
                turned = found.choice(pipeline.num_microbatches)
                for made in dict.fromkeys((turned, with_less_fill(search, turned))):
                    yield tuple(made if p == pipeline else p for p in pipelines)


def _orders(search: PipelineSearch, kinds: list[int]) -> Iterator[list[int]]:
    class_of = {k: search.problem.kinds[k].device_class for k in kinds}
    for order in islice(permutations(sorted(set(class_of.values()))), MAX_ORDERS):
        yield sorted(kinds, key=lambda k, order=order: order.index(class_of[k]))  # type: ignore[misc]
    for s in range(len(kinds) - 1):
        yield [*kinds[:s], kinds[s + 1], kinds[s], *kinds[s + 2 :]]


def _turned(search: PipelineSearch, pipeline: PipelineChoice) -> PipelineChoice:
    count = pipeline.num_microbatches
    best = search.priced(pipeline.stages)
    kinds = [stage.kind for stage in pipeline.stages]
    for _ in range(MAX_ROUNDS):
        improved = False
        for s in range(len(kinds) - 1):
            if kinds[s] == kinds[s + 1]:
                continue
            other = [*kinds[:s], kinds[s + 1], kinds[s], *kinds[s + 2 :]]
            found = search.cut(other, most=min(count, len(kinds)))
            if found is not None and found.time_s(count, shares=False) < best.time_s(
                count, shares=False
            ):
                best, kinds, improved = found, other, True
        if not improved:
            break
    return PipelineChoice(stages=best.stages, num_microbatches=count)


def _cut_again(search: PipelineSearch, pipeline: PipelineChoice) -> PipelineChoice:
    if len(pipeline.stages) == 1:
        return pipeline
    pipeline = with_less_fill(search, pipeline)
    if len(pipeline.stages) * search.problem.num_blocks > MAX_PLACES:
        return pipeline
    found = _Program(search, pipeline).solve()
    if found is None:
        return pipeline
    old = search.priced(pipeline.stages).time_s(pipeline.num_microbatches, shares=False)
    new = search.priced(found).time_s(pipeline.num_microbatches, shares=False)
    if not new < old:
        return pipeline
    return PipelineChoice(stages=found, num_microbatches=pipeline.num_microbatches)


class _Program:
    """The CP-SAT model of one pipeline."""

    def __init__(self, search: PipelineSearch, pipeline: PipelineChoice) -> None:
        self.search, self.pipeline = search, pipeline
        self.problem = search.problem
        self.kinds = [self.problem.kinds[s.kind] for s in pipeline.stages]
        self.prices = [search.prices[s.kind] for s in pipeline.stages]
        self.model = cp_model.CpModel()
        worst_s = sum(
            max(o.total_s for o in b.options) + b.step_s for kind in self.kinds for b in kind.blocks
        )
        self.unit_s = max(worst_s, 1e-12) / TIME_STEPS
        self.x = self._cuts()
        self.n: list[list[list[cp_model.IntVar]]] = []
        self._stages()

    def _steps(self, time_s: float) -> int:
        return round(time_s / self.unit_s)

    def _cuts(self) -> list[list[cp_model.LinearExpr]]:
        model, stages = self.model, self.pipeline.stages
        n, depth = self.problem.num_blocks, len(stages)
        g = [[model.new_bool_var(f"g{i}_{s}") for s in range(depth)] for i in range(n)]
        for i in range(n):
            model.add(g[i][0] == 1)
            for s in range(depth):
                if i + 1 < n:
                    model.add_implication(g[i][s], g[i + 1][s])
                if s + 1 < depth and i > 0:
                    model.add_implication(g[i][s + 1], g[i - 1][s])
                model.add_hint(g[i][s], int(i >= stages[s].low))
        for s in range(1, depth):
            model.add(g[0][s] == 0)
            model.add(g[n - 1][s] == 1)
        return [
            [g[i][s] - (g[i][s + 1] if s + 1 < depth else 0) for s in range(depth)]
            for i in range(n)
        ]

    def _stages(self) -> None:
        model, depth = self.model, len(self.kinds)
        horizon = 4 * TIME_STEPS
        times = []
        once = model.new_int_var(0, horizon, "once")
        for s, (kind, prices) in enumerate(zip(self.kinds, self.prices, strict=True)):
            flight = min(depth - s, self.pipeline.num_microbatches)
            room = self.problem.classes[kind.device_class].limit_bytes // MEMORY_UNIT_BYTES
            time = model.new_int_var(0, horizon, f"t{s}")
            transient = model.new_int_var(0, max(0, room), f"transient{s}")
            seconds, bytes_, rows = [], [], []
            for k, menu in enumerate(prices.menus):
                own = [i for i, key in enumerate(prices.keys) if key == k]
                row = [model.new_int_var(0, len(own), f"n{s}_{k}_{o}") for o in range(len(menu))]
                rows.append(row)
                model.add(sum(row) == sum(self.x[i][s] for i in own))
                for count, option in zip(row, menu, strict=True):
                    seconds.append(self._steps(option.total_s) * count)
                    saved = -(-flight * option.saved_bytes // MEMORY_UNIT_BYTES)
                    bytes_.append(saved * count)
                    used = model.new_bool_var("")
                    model.add(count <= len(own) * used)
                    largest = -(-option.transient_bytes // MEMORY_UNIT_BYTES)
                    model.add(transient >= largest).only_enforce_if(used)
            self.n.append(rows)
            self._hint(s)
            state = [
                -(-b.state_bytes // MEMORY_UNIT_BYTES) * self.x[i][s]
                for i, b in enumerate(kind.blocks)
            ]
            model.add(time == sum(seconds))
            model.add(sum(bytes_) + sum(state) + transient <= room)
            model.add(
                once >= sum(self._steps(b.step_s) * self.x[i][s] for i, b in enumerate(kind.blocks))
            )
            times.append(time)
        period = model.new_int_var(0, horizon, "period")
        hops = self._hops()
        for i in range(depth):
            for j in range(i, depth):
                model.add((j - i + 1) * period >= sum(times[i : j + 1]) + 2 * sum(hops[i:j]))
        model.minimize(sum(times) + (self.pipeline.num_microbatches - 1) * period + once)

    def _hops(self) -> list[int]:
        stages = self.pipeline.stages
        pairs = pairwise(stages)
        return [self._steps(self.search.hop_s(a.kind, b.kind, a.high - 1)) for a, b in pairs]

    def _hint(self, s: int) -> None:
        stage, prices = self.pipeline.stages[s], self.prices[s]
        counts: dict[tuple[int, int], int] = {}
        for key, option in zip(prices.keys[stage.low : stage.high], stage.options, strict=True):
            counts[key, option] = counts.get((key, option), 0) + 1
        for k, row in enumerate(self.n[s]):
            for o, variable in enumerate(row):
                self.model.add_hint(variable, counts.get((k, o), 0))

    def solve(self) -> tuple[StageChoice, ...] | None:
        """Stages, or None if nothing was found in the work limit."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = WORK_LIMIT
        if solver.solve(self.model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        stages = []
        for s, (old, prices) in enumerate(zip(self.pipeline.stages, self.prices, strict=True)):
            inside = [i for i in range(self.problem.num_blocks) if solver.value(self.x[i][s])]
            left = [[solver.value(v) for v in row] for row in self.n[s]]
            options = []
            for i in inside:
                row = left[prices.keys[i]]
                option = next(o for o in range(len(row) - 1, -1, -1) if row[o] > 0)
                row[option] -= 1
                options.append(option)
            stages.append(
                StageChoice(
                    kind=old.kind, low=inside[0], high=inside[-1] + 1, options=tuple(options)
                )
            )
        return tuple(stages)
