"""A plan of given degrees, quickly: for tests, for comparing a hand-made plan, for a first try.

It is the same search with every degree fixed. By default prices are proportional to bytes and
arithmetic alone: without start-up costs, operators are split wherever that is possible, also in
models that are too small for splitting to pay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster, parse_devices
from autopar.ir.graph import Arg, Graph, Meta, OutputKind
from autopar.plan.orders import plain_warmup
from autopar.plan.types import Plan, ScheduleKind
from autopar.solver.constraints import Constraints
from autopar.solver.search import solve
from cost_models.base import CostModel
from cost_models.flops import work_of

SECONDS_PER_FLOP = 1e-12
SECONDS_PER_BYTE = 1e-11
SECONDS_PER_COMM_BYTE = 2e-11


@dataclass(frozen=True, slots=True)
class ProportionalCostModel:
    """Prices without start-up costs (a :class:`~cost_models.base.CostModel`)."""

    @property
    def source(self) -> str:
        """Where the prices come from."""
        return "proportional to bytes and arithmetic"

    def op_time_s(
        self, op: str, args: tuple[Arg, ...], operands: Sequence[Meta], results: Meta
    ) -> float:
        """Seconds of one operator."""
        work = work_of(op, args, operands, results)
        return work.flops * SECONDS_PER_FLOP + work.moved_bytes * SECONDS_PER_BYTE

    def collective_time_s(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of one collective: an all-reduce is worth two of the others."""
        count = len(ranks)
        passes = 2 if kind == "all_reduce" else 1
        return passes * (count - 1) / count * payload_bytes * SECONDS_PER_COMM_BYTE


def forced_plan(  # noqa: PLR0913  one argument per constraint
    graph: Graph,
    model_hash: str,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    virtual: int = 1,
    num_microbatches: int = 1,
    schedule: ScheduleKind | None = None,
    warmup: tuple[int, ...] | None = None,
    zero: int | tuple[int, ...] = 0,
    recompute: str | Mapping[str, str] = "none",
    placements: Mapping[str, str] | None = None,
    boundaries: tuple[str, ...] = (),
    sequence_parallel: bool | None = None,
    microbatch_statistics: bool = False,
    expert_capacity: float | None = None,
    optimizer: str = "adamw",
    cluster: Cluster | None = None,
    cost_model: CostModel | None = None,
) -> Plan:
    """The best plan among those with the given degrees.

    Args:
        graph: The joint graph.
        model_hash: Its hash.
        dp: Ranks that split the batch.
        tp: Ranks that split operators.
        pp: Pipeline ranks.
        virtual: Stages per pipeline rank; 2 for ``zbv``, whatever is given.
        num_microbatches: Per step.
        schedule: 1F1B, or interleaved if ``virtual`` is above 1, if left out.
        warmup: As in :class:`~autopar.solver.constraints.Constraints`; that of plain 1F1B if it is
            left out.
        zero: ZeRO level of all stages, or of each.
        recompute: As in :class:`~autopar.solver.constraints.Constraints`.
        placements: Likewise.
        boundaries: Likewise.
        sequence_parallel: Likewise.
        microbatch_statistics: Likewise.
        expert_capacity: Likewise.
        optimizer: Assumed optimizer.
        cluster: As many CPU processes as ranks if left out.
        cost_model: :class:`ProportionalCostModel` if left out.

    Raises:
        ConstraintError: The degrees do not fit the model or the batch.
        InfeasibleError: The cluster's memory is too small.
    """
    schedule = _plain_schedule(graph, virtual) if schedule is None else schedule
    virtual = 2 if schedule is ScheduleKind.ZBV else virtual
    if schedule is ScheduleKind.ONE_F_ONE_B and virtual == 1 and warmup is None:
        warmup = plain_warmup(pp)
    constraints = Constraints(
        dp=dp,
        tp=tp,
        pp=pp,
        virtual=virtual,
        num_microbatches=num_microbatches,
        schedule=schedule,
        warmup=warmup,
        zero=zero,
        recompute=recompute,
        placements=placements or {},
        boundaries=boundaries,
        sequence_parallel=sequence_parallel,
        microbatch_statistics=microbatch_statistics,
        expert_capacity=expert_capacity,
    )
    plan, _ = solve(
        graph,
        model_hash,
        cluster or parse_devices(f"{dp * tp * pp}:cpu"),
        constraints=constraints,
        optimizer=optimizer,
        memory_limit_bytes=None,
        cost_model=cost_model or ProportionalCostModel(),
    )
    return plan


def _plain_schedule(graph: Graph, virtual: int) -> ScheduleKind | None:
    """1F1B, or interleaved, if forwards and backwards may alternate: it trains, with its loss."""
    if not all(any(graph.outputs_of(kind)) for kind in (OutputKind.GRAD, OutputKind.LOSS)):
        return None
    return ScheduleKind.ONE_F_ONE_B if virtual == 1 else ScheduleKind.INTERLEAVED
