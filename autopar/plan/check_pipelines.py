"""Rules of a plan of unequal pipelines.

1. It has no mesh and no stages beside its pipelines, and at least one micro-batch in each.
2. A stage has ``dp * tp`` devices, ``dp`` divides the samples of a micro-batch.
3. No device is in two stages, and every one is among the plan's.
4. The stages of a pipeline run all blocks once, in order; all pipelines run the same number.
5. Every stage fits the memory of its own kind of device; in the cluster, that kind is what it has,
   or the slowest of what it has.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cluster import Cluster
from autopar.plan.pipelines import PipelinePlan, PipelineStage
from autopar.plan.types import Plan


def pipeline_faults(plan: Plan, cluster: Cluster | None = None) -> Iterator[str]:
    """What is wrong with the pipelines of ``plan``, in sentences.

    Args:
        plan: A plan that has pipelines.
        cluster: What it is to run on; None checks the plan against itself only.
    """
    if plan.mesh.num_ranks != 1 or plan.stages:
        yield (
            f"it has {len(plan.pipelines)} pipelines, mesh {plan.mesh} and {len(plan.stages)} "
            "stages; a plan has pipelines or a mesh with stages"
        )
    owner: dict[int, str] = {}
    depths = set()
    for number, pipeline in enumerate(plan.pipelines):
        yield from _shape_faults(number, pipeline)
        depths |= {stage.layers[1] for stage in pipeline.stages[-1:] if len(stage.layers) == 2}
        for index, stage in enumerate(pipeline.stages):
            where = f"stage {index} of pipeline {number}"
            for rank in stage.devices:
                if not 0 <= rank < plan.num_devices:
                    yield f"{where} has device {rank}, the plan has {plan.num_devices} devices"
                elif rank in owner:
                    yield f"device {rank} is in {owner[rank]} and in {where}"
                owner[rank] = where
            yield from _memory_faults(where, stage)
            if cluster is not None:
                yield from _cluster_faults(where, stage, cluster)
    if len(depths) > 1:
        yield f"its pipelines run different numbers of blocks: {sorted(depths)}"


def _shape_faults(number: int, pipeline: PipelinePlan) -> Iterator[str]:
    name = f"pipeline {number}"
    if pipeline.num_microbatches < 1 or pipeline.microbatch_samples < 1:
        yield (
            f"{name} has {pipeline.num_microbatches} micro-batches of "
            f"{pipeline.microbatch_samples} samples, the least is 1 of 1"
        )
    if not pipeline.stages:
        yield f"{name} has 0 stages, the least is 1"
    at = 0
    for index, stage in enumerate(pipeline.stages):
        where = f"stage {index} of {name}"
        if stage.dp * stage.tp != len(stage.devices) or stage.dp < 1:
            yield (
                f"{where} has {len(stage.devices)} devices, dp {stage.dp} x tp {stage.tp} needs "
                f"{stage.dp * stage.tp}"
            )
        if stage.dp > 0 and pipeline.microbatch_samples % stage.dp:
            yield (
                f"{where} splits a micro-batch of {pipeline.microbatch_samples} samples over "
                f"{stage.dp} ranks, which does not divide it"
            )
        if len(stage.layers) != 2 or stage.layers[0] != at or stage.layers[1] <= at:
            yield f"{where} runs blocks {list(stage.layers)}, must begin at {at} and run at least 1"
            return
        at = stage.layers[1]
        alive = min(len(pipeline.stages) - index, pipeline.num_microbatches)
        if stage.num_in_flight < alive:
            yield (
                f"{where} counts memory for {stage.num_in_flight} micro-batches in flight, its "
                f"schedule has {alive}"
            )


def _memory_faults(where: str, stage: PipelineStage) -> Iterator[str]:
    if 0 < stage.memory_limit_bytes < stage.memory_bytes:
        yield (
            f"{where} needs {stage.memory_bytes:,} bytes on a {stage.device}, its limit is "
            f"{stage.memory_limit_bytes:,}"
        )


def _cluster_faults(where: str, stage: PipelineStage, cluster: Cluster) -> Iterator[str]:
    there = [rank for rank in stage.devices if 0 <= rank < cluster.num_devices]
    # a stage that stayed when a machine of its got slower is of the slowest kind that it has
    pace = cluster.slowest_device(there).name if there else ""
    for rank in stage.devices:
        if not 0 <= rank < cluster.num_devices:
            yield f"{where} has device {rank}, the cluster has {cluster.num_devices} devices"
            return
        device = cluster.device_of(rank)
        if stage.device not in (device.name, pace):
            yield f"{where} is for {stage.device}, device {rank} of the cluster is {device.name}"
            return
        if stage.memory_bytes > device.memory_bytes:
            yield (
                f"{where} needs {stage.memory_bytes:,} bytes, device {rank} ({device.name}) has "
                f"{device.memory_bytes:,}"
            )
            return
