"""Small problems of mixed devices, and all that can be chosen in them: an oracle for the solver."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from autopar.cluster import Cluster, parse_devices
from autopar.solver.mixed_problem import (
    DeviceClass,
    MixedProblem,
    PipelineChoice,
    StageChoice,
    StageKind,
    device_counts_of,
)
from autopar.solver.stages_problem import BlockMenu, Option
from cost_models.analytic import AnalyticCostModel

MIB = 1 << 20


def small_problem(
    *,
    counts: tuple[int, ...] = (2, 2),
    speeds: tuple[float, ...] = (1.0, 1.0),
    limits: tuple[int, ...] = (1 << 40, 1 << 40),
    num_blocks: int = 4,
    batch: int = 4,
    sizes: tuple[int, ...] = (1,),
    widths: tuple[tuple[int, int], ...] = ((1, 1),),
    block_s: float | tuple[float, ...] = 1e-2,
    state_bytes: int = 8 * MIB,
    saved_bytes: int = 4 * MIB,
    gradient_bytes: int = 2 * MIB,
    step_s: float = 1e-4,
    costs: tuple[float | None, ...] = (None, None),
    devices: str | Cluster | None = None,
    leaner: bool = True,
) -> MixedProblem:
    """Blocks of one kind, or of one time each, on classes of one machine each.

    Args:
        counts: Devices of each class.
        speeds: What a block's seconds are divided by.
        limits: Memory of a device.
        num_blocks: Blocks of the chain.
        batch: Samples.
        sizes: Samples of micro-batches.
        widths: (dp, tp) of stages, where the class and the micro-batch have them.
        block_s: Forward and backward of a sample on one device of speed 1.
        state_bytes: Of a block on one device.
        saved_bytes: Of a block and a sample.
        gradient_bytes: Of a block.
        step_s: Once per step, of a block.
        costs: Per hour, of a device.
        devices: The cluster; machines of A100s and H100s if left out.
        leaner: Whether a block may be recomputed.
    """
    names = ("h100-sxm", "a100-80gb", "l4")
    text = devices or " + ".join(f"{n}:{name}" for n, name in zip(counts, names, strict=False))
    cluster = parse_devices(text)
    seconds = (block_s,) * num_blocks if isinstance(block_s, float) else block_s
    classes = tuple(
        DeviceClass(
            name=cluster.machines[c].device.name,
            machines=(c,),
            machine_size=count,
            limit_bytes=limits[c],
            cost_per_hour=costs[c],
        )
        for c, count in enumerate(counts)
    )
    kinds = []
    for c, samples, (dp, tp) in product(range(len(counts)), sizes, widths):
        if dp * tp > counts[c] or samples % dp:
            continue
        blocks = []
        for time_s in seconds:
            each_s = time_s * samples / dp / tp**0.9 / speeds[c]
            saved = saved_bytes * samples // dp // tp
            options = [
                Option(
                    name="none", forward_s=each_s / 3, backward_s=each_s * 2 / 3,
                    saved_bytes=saved, transient_bytes=saved,
                )
            ]  # fmt: skip
            if leaner:
                options.append(
                    Option(
                        name="full", forward_s=each_s / 3, backward_s=each_s,
                        saved_bytes=saved // 8, transient_bytes=2 * saved,
                    )
                )  # fmt: skip
            blocks.append(
                BlockMenu(
                    key=f"{time_s}",
                    options=tuple(options),
                    state_bytes=state_bytes // tp // (2 if dp > 1 else 1),
                    step_s=step_s * dp,
                )
            )
        kinds.append(
            StageKind(
                device_class=c, dp=dp, tp=tp, samples=samples, zero_level=int(dp > 1),
                blocks=tuple(blocks), boundary_bytes=(MIB * samples // dp,) * (num_blocks - 1),
            )
        )  # fmt: skip
    return MixedProblem(
        cluster=cluster,
        model=AnalyticCostModel(cluster),
        classes=classes,
        kinds=tuple(kinds),
        batch=batch,
        gradient_bytes=(gradient_bytes,) * num_blocks,
        max_pipelines=3,
        max_stages=num_blocks,
    )


def random_problem(seed: int) -> MixedProblem:
    """Two classes, up to 6 blocks and 6 devices; memory binds in about half of them."""
    rng = random.Random(seed)
    counts = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (2, 3), (1, 4)])
    num_blocks = rng.randint(2, 5 if sum(counts) < 5 else 4)
    uniform = rng.random() < 0.4
    times = tuple(rng.choice((4e-3, 1e-2, 2e-2)) for _ in range(num_blocks))
    tight = rng.random() < 0.5
    states = 8 * MIB
    room = states * num_blocks
    limits = tuple(int(room * rng.uniform(0.45, 1.3)) if tight else 1 << 40 for _ in counts)
    return small_problem(
        counts=counts,
        speeds=(1.0, rng.choice((1.0, 0.5, 1 / 3))),
        limits=limits,
        num_blocks=num_blocks,
        batch=rng.choice((2, 3, 4)),
        sizes=rng.choice(((1,), (1, 2))),
        widths=((1, 1), (2, 1), (1, 2)) if rng.random() < 0.5 else ((1, 1),),
        block_s=1e-2 if uniform else times,
        gradient_bytes=rng.choice((MIB, 16 * MIB)),
        costs=(rng.choice((2.0, 4.0)), rng.choice((1.0, 3.0))),
        leaner=rng.random() < 0.7,
    )


def all_pipelines(problem: MixedProblem) -> Iterator[tuple[int, tuple[StageChoice, ...]]]:
    """Every pipeline that the classes have devices for: samples of a micro-batch, stages."""

    def grown(low: int, samples: int, used: tuple[int, ...], done: tuple[StageChoice, ...]):
        if low == problem.num_blocks:
            yield done
            return
        for index, kind in enumerate(problem.kinds):
            c = kind.device_class
            count = used[c] + kind.num_devices
            if kind.samples != samples or count > problem.classes[c].num_devices:
                continue
            rest = (*used[:c], count, *used[c + 1 :])
            for high in range(low + 1, problem.num_blocks + 1):
                menus = [range(len(b.options)) for b in kind.blocks[low:high]]
                for options in product(*menus):
                    stage = StageChoice(kind=index, low=low, high=high, options=options)
                    yield from grown(high, samples, rest, (*done, stage))

    for samples in sorted({kind.samples for kind in problem.kinds}):
        for stages in grown(0, samples, (0,) * len(problem.classes), ()):
            yield samples, stages


def without_needless_recompute(
    found: list[tuple[int, tuple[StageChoice, ...]]],
) -> list[tuple[int, tuple[StageChoice, ...]]]:
    """One of those that differ in which of several equal blocks is recomputed."""
    kept = {}
    for samples, stages in found:
        key = (samples, tuple((s.kind, s.low, s.high, sum(s.options)) for s in stages))
        kept.setdefault(key, (samples, stages))
    return list(kept.values())


def all_choices(problem: MixedProblem, *, alike: bool) -> Iterator[tuple[PipelineChoice, ...]]:
    """Every choice of pipelines side by side, and every way to share the batch.

    Args:
        problem: The problem.
        alike: Whether all blocks are equal, so that only the number of recomputed ones counts.
    """
    singles = list(all_pipelines(problem))
    if alike:
        singles = without_needless_recompute(singles)
    most = tuple(c.num_devices for c in problem.classes)

    def grown(first: int, left: int, chosen: tuple[PipelineChoice, ...]):
        if left == 0:
            yield chosen
            return
        if len(chosen) == problem.max_pipelines:
            return
        for index in range(first, len(singles)):
            samples, stages = singles[index]
            for count in range(1, left // samples + 1):
                added = (*chosen, PipelineChoice(stages=stages, num_microbatches=count))
                used = device_counts_of(problem, added)
                if all(a <= b for a, b in zip(used, most, strict=True)):
                    yield from grown(index, left - count * samples, added)

    yield from grown(0, problem.batch, ())


def with_limits(problem: MixedProblem, limits: tuple[int, ...]) -> MixedProblem:
    """The same with other memories."""
    classes = zip(problem.classes, limits, strict=True)
    return replace(problem, classes=tuple(replace(c, limit_bytes=n) for c, n in classes))
