"""A plan of unequal pipelines simulated from its own figures, for pictures.

All pipelines run in one simulation, each stage a rank of its own. Once-per-step work follows the
last backward of a stage: gradients added up with other pipelines on the lane between nodes, then
the stage's own. That a reduction across pipelines waits for the slowest of them is not drawn; the
plan's ``time_s`` has it.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.actions import Action, ActionKind
from autopar.plan.pipelines import PipelinePlan, PipelineStage
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, Plan, ScheduleKind
from cost_models.lanes import Lane, Segment
from cost_models.simulate import StageSeconds, simulate
from cost_models.spans import Simulation

K = ActionKind


def simulate_pipelines(plan: Plan) -> Simulation:
    """A step of all pipelines side by side; rank ``r`` is the r-th stage of all of them."""
    lists: list[list[Action]] = []
    seconds: list[StageSeconds] = []
    links: dict[tuple[int, int], float] = {}
    for pipeline in plan.pipelines:
        base = len(seconds)
        lists += [[_moved(action, base) for action in row] for row in _lists(pipeline)]
        seconds += [_seconds(stage) for stage in pipeline.stages]
        for at, stage in enumerate(pipeline.stages[:-1], base):
            links[at, at + 1] = links[at + 1, at] = stage.p2p_s
    return simulate(lists, seconds, p2p_s=links)


def stage_words(plan: Plan, rank: int) -> str:
    """Which devices a rank of the simulation stands for."""
    at = 0
    for number, pipeline in enumerate(plan.pipelines):
        if rank < at + len(pipeline.stages):
            stage = pipeline.stages[rank - at]
            return f"pipeline {number} stage {rank - at}, {len(stage.devices)} {stage.device}"
        at += len(pipeline.stages)
    return "no devices"


def _lists(pipeline: PipelinePlan) -> list[list[Action]]:
    depth = len(pipeline.stages)
    ahead = [(s - 1, s) for s in range(1, depth)]
    lists = action_lists(
        compute_order(ScheduleKind.ONE_F_ONE_B, depth, 1, pipeline.num_microbatches),
        MeshShape(pp=depth),
        forward_edges=ahead,
        backward_edges=[(t, s) for s, t in ahead],
    )
    return [[*row, Action(s, K.OPTIMIZER)] for s, row in enumerate(lists)]


def _moved(action: Action, base: int) -> Action:
    peer = None if action.peer is None else action.peer + base
    return replace(action, stage=action.stage + base, peer=peer)


def _seconds(stage: PipelineStage) -> StageSeconds:
    return StageSeconds(
        forward_s=stage.forward_s,
        backward_s=stage.backward_s,
        once_s={K.OPTIMIZER: stage.step_s},
        segments={
            K.REDUCE_GRAD: [
                Segment(lane=Lane.INTER, seconds=stage.exchange_s, label="between pipelines")
            ]
        },
    )
