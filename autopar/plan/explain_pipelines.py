"""What binds a plan of unequal pipelines."""

from __future__ import annotations

from autopar.plan.answers import Binding
from autopar.plan.pipelines import PipelinePlan, PipelineStage
from autopar.plan.types import Plan
from autopar.units import format_bytes, format_time

FAR = 0.5  # of a limit


def far_words(share: float) -> str:
    """Said where a limit is named that a plan is not near."""
    return ", far from the limit" if share < FAR else ""


def pipeline_binding(plan: Plan) -> list[Binding]:
    """The fullest device of each kind, the pipeline that ends last, its slowest stage."""
    stages = [
        (number, at, stage)
        for number, pipeline in enumerate(plan.pipelines)
        for at, stage in enumerate(pipeline.stages)
    ]
    fullest: dict[str, tuple[int, int, PipelineStage]] = {}
    for number, at, stage in stages:
        other = fullest.get(stage.device)
        if other is None or _share(stage) > _share(other[2]):
            fullest[stage.device] = (number, at, stage)
    found = [_memory(*entry) for entry in fullest.values() if entry[2].memory_limit_bytes]
    found.sort(key=lambda item: -item.share)
    if plan.time_s > 0:
        found += _time(plan)
    return found


def _share(stage: PipelineStage) -> float:
    limit = stage.memory_limit_bytes
    return stage.memory_bytes / limit if limit else 0.0


def _memory(number: int, at: int, stage: PipelineStage) -> Binding:
    where = f"stage {at} of pipeline {number} ({len(stage.devices)} {stage.device})"
    text = (
        f"memory of {where}: {format_bytes(stage.memory_bytes)} of "
        f"{format_bytes(stage.memory_limit_bytes)} ({100 * _share(stage):.1f} %)"
    )
    text += far_words(_share(stage))
    if stage.recompute:
        text += "; operators are recomputed"
    return Binding(kind="memory", where=where, share=_share(stage), text=text)


def _time(plan: Plan) -> list[Binding]:
    last = max(range(len(plan.pipelines)), key=lambda i: plan.pipelines[i].time_s)
    pipeline = plan.pipelines[last]
    share = pipeline.time_s / plan.time_s
    others = ", ".join(
        f"pipeline {i} {format_time(p.time_s)}" for i, p in enumerate(plan.pipelines) if i != last
    )
    text = f"time of pipeline {last}: it ends last, after {format_time(pipeline.time_s)}"
    found = [
        Binding(
            kind="time",
            where=f"pipeline {last}",
            share=share,
            text=text + (f" ({others})" if others else ""),
        )
    ]
    at, busy_s = _busiest(pipeline)
    stage = pipeline.stages[at]
    where = f"stage {at} of pipeline {last}"
    found.append(
        Binding(
            kind="time",
            where=where,
            share=busy_s / plan.time_s,
            text=f"time of {where} ({len(stage.devices)} {stage.device}): busy for "
            f"{format_time(busy_s)} of it",
        )
    )
    exchange_s = max(s.exchange_s for p in plan.pipelines for s in p.stages)
    if exchange_s > 0 and len(plan.pipelines) > 1:
        found.append(
            Binding(
                kind="link",
                where="between pipelines",
                share=exchange_s / plan.time_s,
                text=f"gradients added up between pipelines: {format_time(exchange_s)} of a step "
                f"({100 * exchange_s / plan.time_s:.1f} %)",
            )
        )
    return found


def _busiest(pipeline: PipelinePlan) -> tuple[int, float]:
    """The stage with most work, and its seconds."""
    count = pipeline.num_microbatches
    times = [count * (s.forward_s + s.backward_s) for s in pipeline.stages]
    return times.index(max(times)), max(times)
