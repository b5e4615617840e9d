"""Planners for mixed devices from the literature, reduced to their rule, in our simulator.

Each takes the same problem, the same kinds of stages and the same memory model, and gives a choice
that :func:`autopar.solver.mixed_problem.evaluate` simulates. Where a paper leaves recomputing out,
the cheapest recomputing that fits is given to it, so that memory alone does not decide.

* ``even split``: one pipeline, a stage for every equal group of devices, equal layers, whatever the
  device; the best of all group sizes, tp and micro-batches.
* ``Metis-like`` (Um et al., "Metis: fast automatic distributed training on heterogeneous GPUs",
  ATC 2024): sequences of device groups of powers of two, non-decreasing, in every order of classes;
  data parallel first (the smallest tp that fits); layers in proportion to the speed of the group;
  one micro-batch size.
* ``Sailor-like`` (Strati et al., "Sailor", SOSP 2025): stages of equal layers; for each stage a
  class and a number of replicas by dynamic programming over the devices left, the least tp that
  fits per stage and class; equal micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from autopar.solver.mixed_problem import (
    MixedFigures,
    MixedProblem,
    PipelineChoice,
    StageChoice,
    evaluate,
)
from autopar.solver.mixed_runs import RunPrices, run_prices

Choice = tuple[PipelineChoice, ...]


def best_of(problem: MixedProblem, choices: Iterator[Choice]) -> tuple[MixedFigures, Choice] | None:
    """The fastest of some choices, by simulation; None if none can be placed or kept."""
    best: tuple[MixedFigures, Choice] | None = None
    for choice in choices:
        figures = evaluate(problem, choice)
        if figures is not None and (best is None or figures.step_s < best[0].step_s):
            best = figures, choice
    return best


def pipeline_of(
    problem: MixedProblem, prices: Sequence[RunPrices], kinds: Sequence[int], layers: Sequence[int]
) -> Choice | None:
    """One pipeline of given kinds and numbers of layers; None if a stage does not fit."""
    stages, low = [], 0
    for s, (kind, count) in enumerate(zip(kinds, layers, strict=True)):
        if count < 1:
            return None
        options = prices[kind].options(low, low + count, len(kinds) - s)
        if options is None:
            return None
        stages.append(StageChoice(kind=kind, low=low, high=low + count, options=options))
        low += count
    samples = problem.kinds[kinds[0]].samples
    if low != problem.num_blocks or problem.batch % samples:
        return None
    return (PipelineChoice(stages=tuple(stages), num_microbatches=problem.batch // samples),)


def parts(total: int, weights: Sequence[float]) -> list[int]:
    """``total`` in whole parts in proportion to weights, each at least 1, largest remainders up."""
    whole = sum(weights)
    exact = [total * w / whole for w in weights]
    found = [max(1, int(x)) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: int(exact[i]) - exact[i])
    at = 0
    while sum(found) < total:
        found[order[at % len(order)]] += 1
        at += 1
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found


def by_group(problem: MixedProblem, samples: int, c: int, size: int) -> list[int]:
    """Kinds of a class on ``size`` devices, the least tp first."""
    found = [
        i
        for i, k in enumerate(problem.kinds)
        if k.samples == samples and k.device_class == c and k.num_devices == size
    ]
    return sorted(found, key=lambda i: problem.kinds[i].tp)


def even_split(problem: MixedProblem) -> Iterator[Choice]:
    """Equal groups of devices in the order of the cluster, equal layers, one tp for all."""
    prices = run_prices(problem)
    sizes = sorted({k.num_devices for k in problem.kinds})
    for samples in sorted({k.samples for k in problem.kinds}):
        for size in sizes:
            if any(c.num_devices % size for c in problem.classes):
                continue
            groups = [c for c, cls in enumerate(problem.classes)
                      for _ in range(cls.num_devices // size)]  # fmt: skip
            if len(groups) > problem.num_blocks:
                continue
            layers = parts(problem.num_blocks, [1.0] * len(groups))
            for tp in sorted({k.tp for k in problem.kinds}):
                kinds = [
                    next((i for i in by_group(problem, samples, c, size)
                          if problem.kinds[i].tp == tp), -1)
                    for c in groups
                ]  # fmt: skip
                made = None if -1 in kinds else pipeline_of(problem, prices, kinds, layers)
                if made is not None:
                    yield made


def speed(problem: MixedProblem, kind: int) -> float:
    """Micro-batches of the whole chain per second."""
    return 1.0 / sum(min(o.total_s for o in b.options) for b in problem.kinds[kind].blocks)


def metis_like(problem: MixedProblem) -> Iterator[Choice]:
    """Groups of powers of two per class, layers in proportion to speed, the least tp that fits."""
    prices = run_prices(problem)
    for samples in sorted({k.samples for k in problem.kinds}):
        for order in permutations(range(len(problem.classes))):
            for shape in _group_lists(problem, order):
                if len(shape) > problem.num_blocks:
                    continue
                for lean in range(4):  # more tp while memory is short
                    kinds = []
                    for c, size in shape:
                        menu = by_group(problem, samples, c, size)
                        kinds.append(menu[min(lean, len(menu) - 1)] if menu else -1)
                    if -1 in kinds:
                        break
                    layers = parts(problem.num_blocks, [speed(problem, k) for k in kinds])
                    made = pipeline_of(problem, prices, kinds, layers)
                    if made is not None:
                        yield made
                        break


def _group_lists(
    problem: MixedProblem, order: Sequence[int]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """Per class its devices in equal groups of a power of two, classes in a given order."""
    if not order:
        yield ()
        return
    count = problem.classes[order[0]].num_devices
    size = 1
    while size <= count:
        if count % size == 0:
            for rest in _group_lists(problem, order[1:]):
                yield (*((order[0], size),) * (count // size), *rest)
        size *= 2


def sailor_like(problem: MixedProblem) -> Iterator[Choice]:
    """Equal layers; per stage the class and replicas that keep the slowest stage fastest."""
    prices = run_prices(problem)
    total = sum(c.num_devices for c in problem.classes)
    for samples in sorted({k.samples for k in problem.kinds}):
        for depth in range(1, min(problem.num_blocks, total, 16) + 1):
            layers = parts(problem.num_blocks, [1.0] * depth)[::-1]
            kinds = _sailor_stages(problem, prices, samples, layers)
            made = None if kinds is None else pipeline_of(problem, prices, kinds, layers)
            if made is not None:
                yield made


def _sailor_stages(
    problem: MixedProblem, prices: Sequence[RunPrices], samples: int, layers: Sequence[int]
) -> list[int] | None:
    """Dynamic programming over stages and devices left: the least slowest stage."""
    start = tuple(c.num_devices for c in problem.classes)
    states: dict[tuple[int, ...], tuple[float, list[int]]] = {start: (0.0, [])}
    low = 0
    for s, count in enumerate(layers):
        fresh: dict[tuple[int, ...], tuple[float, list[int]]] = {}
        for left, (slowest, chosen) in sorted(states.items(), key=lambda item: item[0]):
            for c in range(len(problem.classes)):
                for size in sorted({k.num_devices for k in problem.kinds}):
                    if size > left[c]:
                        continue
                    fitting = (
                        (kind, prices[kind].time_s(low, low + count, len(layers) - s))
                        for kind in by_group(problem, samples, c, size)
                    )
                    pick = next(((k, t) for k, t in fitting if t < float("inf")), None)
                    if pick is None:
                        continue
                    rest = (*left[:c], left[c] - size, *left[c + 1 :])
                    value = max(slowest, pick[1])
                    if rest not in fresh or value < fresh[rest][0]:
                        fresh[rest] = (value, [*chosen, pick[0]])
        states, low = fresh, low + count
    if not states:
        return None
    return min(states.values(), key=lambda pair: (pair[0], pair[1]))[1]


BASELINES = {"even split": even_split, "Metis-like": metis_like, "Sailor-like": sailor_like}
