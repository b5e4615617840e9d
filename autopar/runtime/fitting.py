"""How a call with other sizes than the planned ones is cut into micro-batches and data ranks.

A plan says how many micro-batches a batch is cut into and how many ranks share each. The last batch
of an epoch is smaller, one for evaluation larger, and not every size divides. What is kept, in
this order: the numbers of one device, the planned size of a block (it was promised to fit), the
data ranks, the number of micro-batches. Blocks are always equal: a sum over equal blocks, divided
by global counts, is weighted right. Where the data ranks do not divide the batch, each of them
computes all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod

from autopar.errors import ShardingError
from autopar.ir.graph import Graph
from autopar.plan.types import Plan
from autopar.sharding.decisions import Decisions
from autopar.sharding.dim_classes import Signatures
from autopar.sharding.placement import Shard, local_shape
from autopar.sharding.programs import LocalPrograms
from autopar.sharding.propagate import DataAxes, DataSplits
from autopar.sharding.propagation import AxisChoices


@dataclass(frozen=True, slots=True)
class FittedData:
    """Splits over the data axes for one call.

    Attributes:
        splits: Per axis; nothing is split over ``dp`` if the ranks share no batch.
        num_microbatches: Of this call.
        shares_batch: Whether the data ranks share the batch; else each computes all of it.
    """

    splits: DataSplits
    num_microbatches: int
    shares_batch: bool


def planned_batch(
    decisions: Decisions, graph: Graph, signatures: Signatures
) -> tuple[dict[str, int], int]:
    """Batch dim of each input by name, and samples of a block, as planned; ({}, 0) without one."""
    parts = decisions.axis_sizes[0] * decisions.axis_sizes[1]
    if parts == 1:  # nothing is cut: what could be
        dims = DataAxes(graph, signatures).known_batch()
        return dims, _common_size(graph, dims)
    dims = {
        name: choice.dim
        for axis in ("mb", "dp")
        for name, choice in decisions.choices.get(axis, {}).items()
        if isinstance(choice, Shard) and name in graph.input_map()
    }
    return dims, _common_size(graph, dims) // parts


def fit_data_axes(
    graph: Graph,
    signatures: Signatures,
    decisions: Decisions,
    planned: tuple[Mapping[str, int], int],
    *,
    microbatch_statistics: bool = False,
    experts: Mapping[str, int] | None = None,
) -> FittedData:
    """The splits of a call's program that come nearest to the planned ones.

    Args:
        graph: The call's program.
        signatures: Its operators' named dims.
        decisions: Of the plan, for the numbers of micro-batches and data ranks.
        planned: What :func:`planned_batch` says of the planned program.
        microbatch_statistics: As in the plan; the number of micro-batches is then part of what the
            model computes, and stays.
        experts: Expert weights that are split over ``dp``, by dim.

    Raises:
        ShardingError: Statistics are per micro-batch, and the planned number does not divide.
    """
    count, dp = decisions.axis_sizes[:2]
    dims, rows = planned
    none = AxisChoices({})
    whole = FittedData(DataSplits(none, none), 1, shares_batch=True)
    if count * dp == 1 and not dims:
        return whole
    axes = DataAxes(graph, signatures, batch=dims or None)
    size = _common_size(graph, axes.known_batch())
    if count * dp == 1 and size <= rows:
        return whole
    refusal: ShardingError | None = None
    for ranks in dict.fromkeys((dp, 1)):
        if size % ranks or not size:
            counts = [] if ranks > 1 else [1]
        elif microbatch_statistics:
            counts = [count] if size // ranks % count == 0 else []
        else:
            counts = [_count(size // ranks, rows, count), 1]
        for chosen in dict.fromkeys(counts):
            try:
                splits = axes.split(
                    num_microbatches=chosen,
                    dp=ranks,
                    microbatch_statistics=microbatch_statistics,
                    experts=experts if ranks > 1 else None,
                )
            except ShardingError as error:  # samples of different micro-batches mix
                refusal = error
                continue
            if experts and ranks < dp:  # the experts rest as planned, and are gathered for use
                kept = AxisChoices({name: Shard(dim) for name, dim in experts.items()})
                splits = DataSplits(splits.mb, kept)
            return FittedData(splits, chosen, shares_batch=ranks == dp)
    raise refusal or ShardingError(
        f"statistics are taken per micro-batch, and {size} samples do not divide into the planned "
        f"{count} micro-batches; give a batch whose size {count} divides"
    )


def how_fitted(fitted: FittedData, plan: Plan) -> str:
    """In what a call's split over the data axes differs from the plan's; "" if in nothing."""
    parts = []
    if fitted.num_microbatches != plan.num_microbatches:
        parts.append(
            f"it runs in {fitted.num_microbatches} micro-batches instead of {plan.num_microbatches}"
        )
    if not fitted.shares_batch:
        parts.append(f"the {plan.mesh.dp} data ranks do not divide it, each computes all of it")
    return ", and ".join(parts)


def larger_blocks(local: LocalPrograms, planned: LocalPrograms) -> str:
    """The first call argument of which a rank holds more than the plan counted on; "" if none."""

    def elements(programs: LocalPrograms, name: str) -> int:
        spec = programs.users[name]
        return prod(local_shape(spec.meta.shape, spec.layout, programs.axis_sizes))

    common = (name for name in local.users if name in planned.users)
    return next((n for n in common if elements(local, n) > elements(planned, n)), "")


def _count(samples: int, rows: int, planned: int) -> int:
    """Micro-batches for one rank's samples, at most ``rows`` in each; near the planned number."""
    counts = [n for n in range(1, samples + 1) if samples % n == 0 and samples // n <= max(rows, 1)]
    return max((n for n in counts if n <= planned), default=counts[0])


def _common_size(graph: Graph, dims: Mapping[str, int]) -> int:
    """Largest number that divides the size of every batch dim; 0 without one."""
    inputs = graph.input_map()
    metas = [(inputs[name].meta, dim) for name, dim in dims.items() if name in inputs]
    return gcd(*(meta.shape[dim] for meta, dim in metas if meta is not None))
