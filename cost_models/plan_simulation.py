"""A plan simulated from its own figures: for pictures of a plan that was read from a file.

A plan keeps sums for each stage, so collectives of a forward stand at its end, messages go between
neighbours, and the transient of a stage is taken to be there in the middle of each forward and
backward. What was decided with, :mod:`autopar.solver.exact`, had the programs.
"""

from __future__ import annotations

from autopar.plan.actions import Action, ActionKind
from autopar.plan.orders import plan_order
from autopar.plan.schedule import action_lists
from autopar.plan.types import Plan, ScheduleKind, StagePlan
from cost_models.lanes import Lane, Segment
from cost_models.memory_timeline import MemoryTimeline, ProgramMemory, StageMemory, memory_timelines
from cost_models.pipelines_simulation import simulate_pipelines, stage_words
from cost_models.simulate import StageSeconds, simulate
from cost_models.spans import Simulation

K = ActionKind
_THERE, _BACK = "saved values to host memory", "saved values from host memory"
_PASSES = (K.FORWARD, K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT)


def simulate_plan(plan: Plan) -> Simulation:
    """A step of a plan, the optimizer's included.

    A rank starts its optimizer as soon as its own gradients are reduced; the plan's ``time_s`` adds
    it after the last rank, and what only the programs tell (tied weights, prologue, outputs).

    Args:
        plan: With figures of its stages; without, everything takes 0 seconds.
    """
    if plan.pipelines:
        return simulate_pipelines(plan)
    mesh, count = plan.mesh, plan.num_microbatches
    order = plan_order(plan)
    ahead = [(s - 1, s) for s in range(1, mesh.num_stages)]
    trains = plan.schedule is not ScheduleKind.FORWARD
    lists = action_lists(
        order,
        mesh,
        forward_edges=ahead,
        backward_edges=[(t, s) for s, t in ahead] if trains else (),
        zero_levels=[stage.zero_level for stage in plan.stages],
    )
    with_update = [
        [*row, *(Action(stage, K.OPTIMIZER) for stage in mesh.stages_of(rank) if trains)]
        for rank, row in enumerate(lists)
    ]
    links = {(s, t): plan.stages[s].time.p2p_s for e in ahead for s, t in (e, e[::-1])}
    return simulate(with_update, [_seconds(s, count) for s in plan.stages], p2p_s=links)


def plan_memory(plan: Plan, simulation: Simulation) -> tuple[MemoryTimeline, ...]:
    """Memory over time of a plan, one for each pipeline rank.

    Args:
        plan: With figures of its stages.
        simulation: From :func:`simulate_plan`.
    """
    if plan.pipelines:
        return ()  # of its stages only the peak is known
    stages = []
    for stage in plan.stages:
        parts = stage.memory
        transient = ProgramMemory((0, parts.transient_bytes, 0))
        saved = parts.activations_bytes // max(1, stage.num_in_flight)
        stages.append(
            StageMemory(
                params_bytes=parts.params_bytes,
                grads_bytes=parts.grads_bytes,
                optimizer_bytes=parts.optimizer_bytes,
                buffers_bytes=parts.buffers_bytes,
                saved_bytes=saved,
                weight_saved_bytes=saved,
                programs=dict.fromkeys(_PASSES, transient),
            )
        )
    return memory_timelines(simulation, stages)


def device_words(plan: Plan, pipeline_rank: int) -> str:
    """Which devices a pipeline rank stands for, such as ``"ranks 0-7"``."""
    if plan.pipelines:
        return stage_words(plan, pipeline_rank)
    devices = plan.stages[pipeline_rank].devices
    if len(devices) == 1:
        return f"rank {devices[0]}"
    return f"ranks {devices[0]}-{devices[-1]}" if devices else "no devices"


def _seconds(stage: StagePlan, num_microbatches: int) -> StageSeconds:
    time = stage.time
    reductions = num_microbatches if stage.zero_level >= 2 else 1

    def parts(total_s: float, comm_s: float) -> list[Segment]:
        compute = Segment(lane=Lane.COMPUTE, seconds=max(0.0, total_s - comm_s))
        if not comm_s > 0:
            return [compute]
        return [compute, Segment(lane=Lane.INTRA, seconds=comm_s, label="collectives")]

    def with_copies(found: list[Segment], copy_s: float, label: str) -> list[Segment]:
        """Copies beside a pass; what of them is waited for is in its seconds."""
        if not copy_s > 0:
            return found
        return [Segment(lane=Lane.COPY, seconds=copy_s, label=label, overlaps=True), *found]

    def copy(label: str) -> Segment:
        return Segment(lane=Lane.COPY, seconds=time.copy_s / 2, label=label)

    # where the collectives of a backward stand is not known: first with the inputs' gradients
    input_s = max(0.0, time.backward_s - time.weight_s)
    input_comm_s = min(time.backward_comm_s, input_s)
    return StageSeconds(
        segments={
            K.BACKWARD_INPUT: with_copies(parts(input_s, input_comm_s), time.fetch_s, _BACK),
            K.BACKWARD_WEIGHT: parts(time.weight_s, time.backward_comm_s - input_comm_s),
            K.FORWARD: with_copies(
                parts(time.forward_s, time.forward_comm_s), time.offload_s, _THERE
            ),
            K.BACKWARD: with_copies(
                parts(time.backward_s, time.backward_comm_s), time.fetch_s, _BACK
            ),
            K.REDUCE_GRAD: parts(time.reduce_s / reductions, time.reduce_s / reductions),
            K.UNSHARD: parts(time.unshard_s, time.unshard_s),
            K.OPTIMIZER: [
                *([copy("optimizer state from host memory")] if time.copy_s else []),
                *parts(time.optimizer_s - time.copy_s, 0.0),
                *([copy("optimizer state to host memory")] if time.copy_s else []),
            ],
        }
    )
