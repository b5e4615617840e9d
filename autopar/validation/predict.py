"""Seconds of a step from its unpriced works: lanes of a micro-batch, schedule, what runs once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.plan.schedule import ActionLists, action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.validation.blocks import Collective, Items
from autopar.validation.prices import ClusterPrices, Prices
from autopar.validation.works import RecordWorks, StageWorks
from cost_models.flops import OpClass, Work
from cost_models.simulate import StageSeconds, simulate

Pricing = Callable[[RecordWorks], Prices]
# Rounds of micro-batches (one per rank) after which a pipeline repeats itself.
WARM_ROUNDS = 3


def cluster_prices(works: RecordWorks) -> Prices:
    """The cost models' prices for a record."""
    return ClusterPrices(works.cluster, works.family)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Seconds of one pass of one stage and micro-batch by lane."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    tensor_s: float = 0.0
    host_s: float = 0.0
    data_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A predicted step.

    Attributes:
        total_s: Seconds of the step.
        parts_s: On the slowest pipeline rank: ``"matmul"``, ``"attention"``, ``"memory"``,
            ``"tensor"`` (collectives of the tensor group), ``"data"`` (gathers and reductions that
            nothing hides), ``"host"`` (kernels wait for
            the host), ``"bubble"`` (waiting and messages), ``"optimizer"``.
        forward_s: Per stage and micro-batch.
        backward_s: Per stage and micro-batch.
    """

    total_s: float
    parts_s: dict[str, float] = field(default_factory=dict)
    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()


def predict_time(works: RecordWorks, pricing: Pricing = cluster_prices) -> StepTime:
    """The step's time.

    Args:
        works: Of :func:`~autopar.validation.works.works_of`.
        pricing: Prices of a record.
    """
    prices = pricing(works)
    forwards = [_lanes(works, prices, i, is_backward=False) for i in range(len(works.stages))]
    backwards = [_lanes(works, prices, i, is_backward=True) for i in range(len(works.stages))]
    forward_s = tuple(lanes.total_s for lanes in forwards)
    backward_s = tuple(lanes.total_s for lanes in backwards)
    pipeline_s = pipeline_time_s(works, forward_s, backward_s, _messages_s(works, prices))
    ends = []
    for rank in range(works.pp):
        last_s = sum(backward_s[rank :: works.pp])
        data_s = _once_s(works, prices, rank, beside_s=last_s)
        optimizer_s = sum(
            prices.work_s(i) * c for i, c in works.optimizer[rank] if isinstance(i, Work)
        )
        ends.append((data_s, optimizer_s))
    tied_s = 0.0
    if works.tied is not None:
        ends_of = (works.ranks_of(0, "tp")[0], works.ranks_of(works.pp - 1, "tp")[0])
        tied_s = prices.collective_s(works.tied, ends_of)
    worst = max(range(works.pp), key=lambda r: sum(ends[r]))
    total_s = pipeline_s + sum(ends[worst]) + tied_s + prices.step_s()
    return StepTime(
        total_s=total_s,
        parts_s=_parts(works, forwards, backwards, total_s, ends, tied_s, prices.step_s()),
        forward_s=forward_s,
        backward_s=backward_s,
    )


def _parts(
    works: RecordWorks,
    forwards: Sequence[Lanes],
    backwards: Sequence[Lanes],
    total_s: float,
    ends: Sequence[tuple[float, float]],
    tied_s: float,
    step_s: float,
) -> dict[str, float]:
    def busy_s(rank: int) -> float:
        chunks = range(rank, len(works.stages), works.pp)
        return sum(forwards[i].total_s + backwards[i].total_s for i in chunks)

    rank = max(range(works.pp), key=busy_s)
    lanes = [t[i] for t in (forwards, backwards) for i in range(rank, len(works.stages), works.pp)]
    count = works.microbatches
    found = {
        name: count * sum(getattr(lane, f"{name}_s") for lane in lanes)
        for name in ("matmul", "attention", "memory", "tensor", "host")
    }
    hidden = count * busy_s(rank) - sum(found.values())
    found["data"] = max(0.0, hidden) + ends[rank][0] + tied_s
    found["host"] += step_s
    found["optimizer"] = ends[rank][1]
    found["bubble"] = total_s - sum(found.values())
    return found


def _lanes(works: RecordWorks, prices: Prices, index: int, *, is_backward: bool) -> Lanes:
    stage = works.stages[index]
    rank = index % works.pp
    seconds = {OpClass.MATMUL: 0.0, OpClass.ATTENTION: 0.0, OpClass.MEMORY: 0.0}
    tensor_s = 0.0
    for item, count in stage.backward if is_backward else stage.forward:
        if isinstance(item, Collective):
            tensor_s += count * prices.collective_s(item, works.ranks_of(rank, item.axis))
        else:
            lane = item.op_class if item.op_class in seconds else OpClass.MATMUL
            seconds[lane] += count * prices.work_s(item)
    operators = stage.backward_operators if is_backward else stage.forward_operators
    compute_s = prices.issued_s(sum(seconds.values()) + tensor_s, operators)
    total_s, data_s = _with_data(works, prices, stage, rank, compute_s, is_backward=is_backward)
    return Lanes(
        matmul_s=seconds[OpClass.MATMUL], attention_s=seconds[OpClass.ATTENTION],
        memory_s=seconds[OpClass.MEMORY], tensor_s=tensor_s,
        host_s=compute_s - sum(seconds.values()) - tensor_s, data_s=data_s, total_s=total_s,
    )  # fmt: skip


def _with_data(
    works: RecordWorks,
    prices: Prices,
    stage: StageWorks,
    rank: int,
    compute_s: float,
    *,
    is_backward: bool,
) -> tuple[float, float]:
    """Seconds of a pass with its weight gathers and gradient reductions, and of those alone."""
    gathers_s = _sum_s(works, prices, stage.gathers_backward if is_backward else
                       stage.gathers_forward, rank)  # fmt: skip
    reduces_s = _sum_s(works, prices, stage.reduces, rank) if is_backward else 0.0
    data_s = gathers_s + reduces_s
    if not data_s:
        return compute_s, 0.0
    steps = max(1.0, stage.layers)
    # the first gather and the last reduction have nothing to hide behind
    bare_s = gathers_s / steps if not is_backward else reduces_s / steps
    if not works.family.prefetches_weights:
        hidden_s = reduces_s if works.family.overlaps_data_reduction else 0.0
        together_s = prices.beside_s(compute_s, hidden_s)
        return together_s + data_s - hidden_s, data_s
    return prices.beside_s(compute_s, data_s - bare_s) + bare_s, data_s


def _sum_s(works: RecordWorks, prices: Prices, items: Items, rank: int) -> float:
    return sum(
        c * prices.collective_s(i, works.ranks_of(rank, i.axis))
        for i, c in items
        if isinstance(i, Collective)
    )


def _once_s(works: RecordWorks, prices: Prices, rank: int, *, beside_s: float) -> float:
    """Exposed seconds of the reductions and gathers at the end of a step."""
    exposed_s = 0.0
    for item, count in works.once[rank]:
        if not isinstance(item, Collective):
            continue
        whole_s = count * prices.collective_s(item, works.ranks_of(rank, item.axis))
        if item.kind != "all_gather" and works.family.overlaps_data_reduction:
            layers = max(1.0, sum(s.layers for s in works.stages[rank :: works.pp]))
            bare_s = whole_s / layers
            whole_s = bare_s + prices.beside_s(beside_s, whole_s - bare_s) - beside_s
        exposed_s += whole_s
    return exposed_s


def _messages_s(works: RecordWorks, prices: Prices) -> dict[tuple[int, int], float]:
    """Seconds of a message by (source stage, target stage), both ways."""
    found: dict[tuple[int, int], float] = {}
    message = Collective("p2p", works.p2p_bytes, "pp")
    hop_s: dict[int, float] = {}
    for source in range(len(works.stages) - 1):
        rank = source % works.pp
        if rank not in hop_s:
            hop_s[rank] = prices.collective_s(message, works.ranks_of(rank, "pp")) + _sum_s(
                works, prices, works.p2p_gathers, rank
            )
        found[source, source + 1] = found[source + 1, source] = hop_s[rank]
    return found


# -- schedule --------------------------------------------------------------------------------------
def pipeline_time_s(
    works: RecordWorks,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    messages_s: dict[tuple[int, int], float],
) -> float:
    """Seconds from the first forward to the last backward of all ranks.

    After a few rounds a schedule repeats itself; the rest is counted, not simulated.
    """
    count = works.microbatches
    if works.pp == 1:
        return count * (sum(forward_s) + sum(backward_s))
    stages = [
        StageSeconds(forward_s=f, backward_s=b) for f, b in zip(forward_s, backward_s, strict=True)
    ]

    def makespan_s(microbatches: int) -> float:
        lists = _lists(works.pp, works.virtual, microbatches, works.gpipe)
        return simulate(lists, stages, p2p_s=messages_s).makespan_s

    unit = works.pp
    simulated = WARM_ROUNDS * unit + count % unit
    if count <= simulated + unit or works.gpipe:
        return makespan_s(count)
    first_s, second_s = makespan_s(simulated), makespan_s(simulated + unit)
    return first_s + (second_s - first_s) * ((count - simulated) // unit)


@lru_cache(maxsize=512)
def _lists(pp: int, virtual: int, microbatches: int, gpipe: bool) -> ActionLists:
    kind = ScheduleKind.ONE_F_ONE_B
    if gpipe:
        kind = ScheduleKind.GPIPE
    elif virtual > 1:
        kind = ScheduleKind.INTERLEAVED
    mesh = MeshShape(pp=pp, virtual=virtual)
    edges = [(s, s + 1) for s in range(pp * virtual - 1)]
    return action_lists(
        compute_order(kind, pp, virtual, microbatches),
        mesh,
        forward_edges=edges,
        backward_edges=[(t, s) for s, t in edges],
    )
