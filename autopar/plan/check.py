"""Is a plan consistent with itself, and with the cluster it is to run on?

A plan from the solver is; one that was edited by hand, or made for other machines, may not be.
Rules, each with the numbers that clash:

1. The mesh is no larger than the devices, and there is at least one micro-batch.
2. There are ``pp * virtual`` stages, numbered in order; mesh and warm-up fit the schedule.
3. Stage ``s`` has the block of ``dp * tp`` ranks of its pipeline rank.
4. Splits are texts of strategies or placements, on the axes mb, dp, tp.
5. The predicted peak is within the memory limit, and within every device of the cluster.

A plan of unequal pipelines has rules of its own (:mod:`autopar.plan.check_pipelines`).
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.cluster import Cluster
from autopar.errors import PlanError, ShardingError
from autopar.plan.check_pipelines import pipeline_faults
from autopar.plan.orders import plan_order, schedule_fault
from autopar.plan.schedule import in_flight
from autopar.plan.types import DP_AXIS, MB_AXIS, TP_AXIS, Plan
from autopar.sharding.placement import parse_placement
from autopar.sharding.signature import AxisStrategy


def check_plan(plan: Plan, cluster: Cluster | None = None) -> None:
    """Raise if ``plan`` can't be run as it says.

    Args:
        plan: The plan.
        cluster: What it is to run on; None checks the plan against itself only.

    Raises:
        PlanError: Lists every rule that is broken, with its numbers.
    """
    if plan.pipelines:
        faults = [*pipeline_faults(plan, cluster), *_splits(plan), *_memory(plan)]
    else:
        faults = [*_sizes(plan), *_stages(plan), *_splits(plan), *_memory(plan)]
        if cluster is not None:
            faults += _cluster_faults(plan, cluster)
    if not faults:
        return
    if len(faults) == 1:
        raise PlanError(f"the plan can't be run: {faults[0]}; plan again")
    raise PlanError("\n  - ".join(["the plan can't be run; plan again:", *faults]))


def _sizes(plan: Plan) -> Iterator[str]:
    mesh = plan.mesh
    sizes = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "virtual": mesh.virtual}
    for name, size in sizes.items():
        if size < 1:
            yield f"mesh axis {name!r} has size {size}, the least is 1"
    if mesh.num_ranks > plan.num_devices:
        yield f"mesh {mesh} needs {mesh.num_ranks} devices, the plan has {plan.num_devices}"
    if plan.num_microbatches < 1:
        yield f"there are {plan.num_microbatches} micro-batches, the least is 1"
    fault = schedule_fault(plan.schedule, mesh, plan.warmup)
    if fault:
        yield fault


def _stages(plan: Plan) -> Iterator[str]:
    mesh = plan.mesh
    if min(mesh.dp, mesh.tp, mesh.pp, mesh.virtual, plan.num_microbatches) < 1:
        return  # reported by _sizes; nothing below would make sense
    if len(plan.stages) != mesh.num_stages:
        yield (
            f"there are {len(plan.stages)} stages, mesh {mesh} has pp {mesh.pp} x virtual "
            f"{mesh.virtual} = {mesh.num_stages}"
        )
        return
    order = None
    if not schedule_fault(plan.schedule, mesh, plan.warmup):
        order = plan_order(plan)
    width = mesh.dp * mesh.tp
    for position, stage in enumerate(plan.stages):
        if stage.index != position:
            yield f"stage {stage.index} stands at position {position}"
        begin = mesh.pipeline_rank(position) * width
        if stage.devices != tuple(range(begin, begin + width)):
            yield (
                f"stage {position} has devices {_ranks(stage.devices)}, its pipeline rank has "
                f"{_ranks(tuple(range(begin, begin + width)))}"
            )
        if stage.zero_level not in (0, 1, 2, 3):
            yield f"stage {position} has ZeRO level {stage.zero_level}, the levels are 0 to 3"
        alive = in_flight(order, position) if order else stage.num_in_flight
        if stage.num_in_flight < alive:
            yield (
                f"stage {position} counts memory for {stage.num_in_flight} micro-batches in "
                f"flight, its schedule has {alive}"
            )
    names = [stage.first for stage in plan.stages if stage.first]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        yield f"two stages begin with the operator {twice!r}"


def _splits(plan: Plan) -> Iterator[str]:
    known = (MB_AXIS, DP_AXIS, TP_AXIS)
    for axis, table in plan.splits.items():
        if axis not in known:
            yield f"splits name the axis {axis!r}, the axes are {', '.join(map(repr, known))}"
        for text in sorted(set(table.values())):
            try:
                if "->" in text:
                    AxisStrategy.parse(text)
                else:
                    parse_placement(text)
            except (ShardingError, ValueError):
                name = next(n for n, t in table.items() if t == text)
                yield (
                    f"{name!r} on axis {axis!r} has the split {text!r}, which is neither a "
                    "placement such as S(0) nor a strategy such as S(0) R -> S(0)"
                )


def _memory(plan: Plan) -> Iterator[str]:
    if plan.offload not in ("", "optimizer"):
        yield f"it offloads {plan.offload!r}; what can be in host memory is 'optimizer', its state"
    for stage in plan.stages:
        remade = set(stage.offload) & set(stage.recompute)
        if remade:
            yield (
                f"stage {stage.index} both recomputes {sorted(remade)[0]!r} and keeps it in host "
                "memory"
            )
    if 0 < plan.memory_limit_bytes < plan.peak_bytes:
        yield (
            f"it needs {plan.peak_bytes:,} bytes on the worst device, "
            f"its limit is {plan.memory_limit_bytes:,}"
        )


def _cluster_faults(plan: Plan, cluster: Cluster) -> Iterator[str]:
    if plan.mesh.num_ranks > cluster.num_devices:
        yield (
            f"mesh {plan.mesh} needs {plan.mesh.num_ranks} devices, "
            f"the cluster has {cluster.num_devices}"
        )
        return
    for stage in plan.stages:
        needed = stage.memory.total_bytes
        for rank in stage.devices:
            if not 0 <= rank < cluster.num_devices:
                continue  # reported by _stages
            device = cluster.devices[rank]
            if needed > device.memory_bytes:
                yield (
                    f"stage {stage.index} needs {needed:,} bytes, "
                    f"device {rank} ({device.name}) has {device.memory_bytes:,}"
                )
                break


def _ranks(ranks: tuple[int, ...]) -> str:
    """Such as ``0-3`` or ``0,2``.

    >>> _ranks((0, 1, 2))
    '0-2'
    """
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) or "none"
