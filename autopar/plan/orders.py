"""The order of a plan: one function from schedule, mesh and warm-up to who computes what when.

>>> from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
>>> v = MeshShape(pp=2, virtual=2, placement=StagePlacement.V)
>>> for row in order_of(ScheduleKind.GPIPE, v, 1):
...     print(*row)
0F0 3F0 3B0 0B0
1F0 2F0 2B0 1B0
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar.errors import ConfigError
from autopar.plan.order_codes import (
    CodedRow,
    eager_codes,
    forward_codes,
    v_codes,
    whole_codes,
    zero_bubble_codes,
)
from autopar.plan.schedule import Order, compute_order, forward_order
from autopar.plan.types import MeshShape, Plan, ScheduleKind, StagePlacement
from autopar.plan.zero_bubble import eager_1f1b_order, zero_bubble_h1_order, zero_bubble_v_order


def order_of(
    kind: ScheduleKind,
    mesh: MeshShape,
    num_microbatches: int,
    warmup: Sequence[int] | None = None,
) -> Order:
    """What every pipeline rank computes, in order.

    Args:
        kind: The schedule.
        mesh: Pipeline ranks, and which stages they have.
        num_microbatches: Micro-batches, >= 1; any number.
        warmup: Forwards before the first backward, by pipeline rank, for 1F1B alone; None: as few
            as keep the pipeline full.

    Raises:
        ConfigError: Schedule, mesh and warm-up do not go together.
    """
    fault = schedule_fault(kind, mesh, warmup)
    if fault:
        raise ConfigError(fault)
    if warmup is not None:
        return eager_1f1b_order(warmup, num_microbatches)
    match kind:
        case ScheduleKind.ZERO_BUBBLE:
            return zero_bubble_h1_order(mesh.pp, num_microbatches)
        case ScheduleKind.ZBV:
            return zero_bubble_v_order(mesh.pp, num_microbatches)
    return _placed(compute_order(kind, mesh.pp, mesh.virtual, num_microbatches), mesh)


def codes_of(
    kind: ScheduleKind,
    mesh: MeshShape,
    num_microbatches: int,
    warmup: Sequence[int] | None = None,
) -> tuple[CodedRow, ...]:
    """The same as numbers, which are made much faster; arguments are those of :func:`order_of`.

    Raises:
        ConfigError: As there.
    """
    fault = schedule_fault(kind, mesh, warmup)
    if fault:
        raise ConfigError(fault)
    pp = mesh.pp
    if warmup is not None:
        rows = eager_codes(warmup, num_microbatches)
    elif kind is ScheduleKind.ZERO_BUBBLE:
        rows = zero_bubble_codes(pp, num_microbatches)
    elif kind is ScheduleKind.ZBV:
        rows = v_codes(pp, num_microbatches)
    elif kind is ScheduleKind.FORWARD:
        rows = forward_codes(pp, mesh.virtual, num_microbatches)
    else:
        rows = whole_codes(kind, pp, mesh.virtual, num_microbatches)
    return tuple(CodedRow(row, mesh.stages_of(rank)) for rank, row in enumerate(rows))


def forwards_of(mesh: MeshShape, num_microbatches: int) -> Order:
    """Forwards only, as evaluation and inference run them."""
    return _placed(forward_order(mesh.pp, mesh.virtual, num_microbatches), mesh)


def plain_warmup(pp: int) -> tuple[int, ...]:
    """Depths of plain 1F1B: as few as keep the pipeline full.

    >>> plain_warmup(3)
    (3, 2, 1)
    """
    return tuple(pp - rank for rank in range(pp))


def receives_ahead(warmup: Sequence[int] | None) -> int:
    """Computes by which receives are posted early: a deeper warm-up hides messages only so."""
    return 0 if warmup is None else 1


def plan_order(plan: Plan) -> Order:
    """The order of a plan.

    Raises:
        ConfigError: As :func:`order_of`.
    """
    return order_of(plan.schedule, plan.mesh, plan.num_microbatches, plan.warmup)


def schedule_fault(kind: ScheduleKind, mesh: MeshShape, warmup: Sequence[int] | None) -> str:
    """Why schedule, mesh and warm-up do not go together; "" if they do."""
    is_v = mesh.placement is StagePlacement.V
    if kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE) and mesh.virtual > 1:
        other = "interleaved" if kind is ScheduleKind.ONE_F_ONE_B else "zbv"
        return (
            f"schedule {kind.value!r} has one stage per pipeline rank, not {mesh.virtual}; "
            f"use {other!r}"
        )
    if kind is ScheduleKind.ZBV and not (is_v and mesh.virtual == 2):
        return (
            f"schedule 'zbv' has 2 stages per pipeline rank in a V, the mesh has {mesh.virtual} "
            f"placed as {mesh.placement.value!r}; use 'zero_bubble' for one"
        )
    if is_v and kind is ScheduleKind.INTERLEAVED:
        return "schedule 'interleaved' deals stages round robin, not in a V; use 'zbv'"
    if warmup is None:
        return ""
    if kind is not ScheduleKind.ONE_F_ONE_B:
        return f"warmup={tuple(warmup)} goes with schedule '1f1b', not {kind.value!r}; leave it out"
    if len(warmup) != mesh.pp:
        return (
            f"warmup={tuple(warmup)} has {len(warmup)} depths for {mesh.pp} pipeline ranks; "
            "give one each"
        )
    if min(warmup) < 1 or any(a < b for a, b in pairwise(warmup)):
        return (
            f"warmup={tuple(warmup)}: depths must be at least 1 and must not increase along the "
            f"pipeline; {tuple(mesh.pp - rank for rank in range(mesh.pp))} is plain 1F1B"
        )
    return ""


def _placed(order: Order, mesh: MeshShape) -> Order:
    """An order whose stages are dealt round robin, with each chunk where the mesh has it."""
    if mesh.placement is StagePlacement.LOOP:
        return order
    return tuple(
        tuple(c._replace(stage=mesh.stages_of(rank)[c.stage // mesh.pp]) for c in row)
        for rank, row in enumerate(order)
    )
