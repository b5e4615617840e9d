"""Bytes of a step on the device that holds most, by part, and whether they fit.

Bytes per parameter follow from the framework and the precision (:func:`state_bytes`); saved
activations are the liveness of the split programs times the micro-batches in flight; transients are
the peak of one pass. Printed memory is compared with what the program allocates; a run fits if that
and what the caching allocator loses are within the device's memory less the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar.cluster.presets import CONTEXT_BYTES
from autopar.plan.schedule import compute_order, in_flight
from autopar.plan.types import ScheduleKind
from autopar.validation.family import Framework
from autopar.validation.records import Record
from autopar.validation.works import RecordWorks, StageWorks

# Share of activations and transients that the caching allocator loses between blocks of different
# sizes. [fitted on which published runs ran out of memory; one figure for all]
FRAGMENTED_SHARE = 0.06


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter: the working copy, gradient, and master with both moments."""

    weight: float
    gradient: float
    optimizer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """A predicted peak.

    Attributes:
        parts_bytes: ``"parameters"``, ``"gradients"``, ``"optimizer"``, ``"activations"``,
            ``"transients"``, ``"buffers"`` on the fullest pipeline rank.
        rank: That rank.
        usable_bytes: What its device leaves to the program.
        rank_bytes: Peak of every pipeline rank.
        rank_reserve_bytes: What the allocator is taken to lose beside it, of every rank.
    """

    parts_bytes: dict[str, float]
    rank: int
    usable_bytes: float
    rank_bytes: tuple[float, ...]
    rank_reserve_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        """Peak of the fullest device."""
        return sum(self.parts_bytes.values())

    @property
    def reserve_bytes(self) -> float:
        """What the allocator is taken to lose beside the peak of the fullest device."""
        return self.rank_reserve_bytes[self.rank]

    @property
    def fits(self) -> bool:
        """Whether the run is predicted not to run out of memory."""
        return self.total_bytes + self.reserve_bytes <= self.usable_bytes


def printed_bytes(record: Record, memory: StepMemory) -> float:
    """What the run's own report shows of a predicted peak.

    * Which ranks: nanotron logs the memory of global rank 0, on the first pipeline rank; a list
      that is shorter than the pipeline is that of the machine which kept the log, and holds the
      first ranks. Others print the largest.
    * Which figure: torchtitan and the runtime that lists its stages print what the caching
      allocator reserved, its own loss included.

    Source: nanotron, ``logging/base.py``; torchtitan, ``components/metrics.py``.
    """
    ranks = list(range(len(memory.rank_bytes)))
    by_stage = record.measured.stage_memory_bytes
    if by_stage:
        ranks = ranks[: len(by_stage)]
    elif record.family.framework is Framework.NANOTRON:
        ranks = ranks[:1]
    if by_stage or record.family.framework is Framework.FSDP:
        return max(memory.rank_bytes[r] + memory.rank_reserve_bytes[r] for r in ranks)
    return max(memory.rank_bytes[r] for r in ranks)


def state_bytes(works: RecordWorks) -> StateBytes:
    """Bytes per parameter of a framework's convention.

    Mixed half precision keeps a float32 master and two moments (12 bytes); gradients are in
    float32 where they are summed in it (bfloat16), else in half precision. Compilers and FSDP
    hold float32 parameters and cast on use; FSDP's gradients rest in float32.
    Source: Rajbhandari et al., ZeRO, 2020, section 3; Korthikanti et al. 2022; framework code.
    """
    if works.precision in ("fp32", "tf32"):
        return StateBytes(weight=4, gradient=4, optimizer=8)
    if works.family.framework in (Framework.FSDP, Framework.XLA):
        return StateBytes(weight=4, gradient=4, optimizer=8)
    if works.precision in ("fp16", "bf16-pure") or works.family.framework is Framework.TORCH:
        return StateBytes(weight=2, gradient=2, optimizer=12)
    if works.family.framework is Framework.NANOTRON:
        return StateBytes(weight=2, gradient=2 + 4, optimizer=12)  # its own beside the sum
    return StateBytes(weight=2, gradient=4, optimizer=12)


def predict_memory(works: RecordWorks) -> StepMemory:
    """The step's peak."""
    per_rank = [_rank_bytes(works, rank) for rank in range(works.pp)]
    totals = tuple(sum(parts.values()) for parts in per_rank)
    fullest = max(range(works.pp), key=lambda r: totals[r])
    first = works.ranks_of(fullest, "tp")[0]
    return StepMemory(
        parts_bytes=per_rank[fullest],
        rank=fullest,
        usable_bytes=float(works.cluster.device_of(first).memory_bytes - CONTEXT_BYTES),
        rank_bytes=totals,
        rank_reserve_bytes=tuple(
            FRAGMENTED_SHARE * (parts["activations"] + parts["transients"]) for parts in per_rank
        ),
    )


def _rank_bytes(works: RecordWorks, rank: int) -> dict[str, float]:
    chunks = works.stages[rank :: works.pp]
    dp, params = chunks[0].dp, sum(c.params for c in chunks)
    state = state_bytes(works)
    weights, grads, optimizer = (
        params * state.weight, params * state.gradient, params * state.optimizer,
    )  # fmt: skip
    if works.zero >= 1:
        optimizer /= dp
    if works.zero >= 2:
        grads /= dp
    if works.zero >= 3:
        weights /= dp
    saved = sum(
        stage.saved_bytes * _in_flight(works, rank + i * works.pp) for i, stage in enumerate(chunks)
    )
    transients = max(max(c.forward_peak_bytes, c.backward_peak_bytes) for c in chunks)
    return {
        "parameters": weights,
        "gradients": grads,
        "optimizer": optimizer,
        "activations": saved,
        "transients": transients,
        "buffers": sum(_buffers(works, c) for c in chunks[:1]),
    }


def _buffers(works: RecordWorks, stage: StageWorks) -> float:
    """Whole weights and gradients of sharded parameters while they are used; casts of weights."""
    if works.zero >= 3 and stage.dp > 1:
        biggest = max(stage.layer_params, stage.edge_params)
        # two units gathered at once, and the gradient of one
        return biggest * 2 * 2 + biggest * (2 if works.precision == "bf16-pure" else 4)
    if works.zero == 2 and stage.dp > 1:
        return stage.layer_params * 2
    if works.family.framework is Framework.XLA and works.precision == "fp16":
        # a compiler casts a weight where it is read: two layers' casts, or the head's, at once
        return max(2 * stage.layer_params, stage.edge_params) * 2
    return 0.0


def _in_flight(works: RecordWorks, stage: int) -> int:
    return _flights(works.pp, works.virtual, min(works.microbatches, 4 * works.pp), works.gpipe)[
        stage
    ]


@lru_cache(maxsize=256)
def _flights(pp: int, virtual: int, microbatches: int, gpipe: bool) -> tuple[int, ...]:
    kind = ScheduleKind.INTERLEAVED if virtual > 1 else ScheduleKind.ONE_F_ONE_B
    order = compute_order(ScheduleKind.GPIPE if gpipe else kind, pp, virtual, microbatches)
    return tuple(in_flight(order, stage) for stage in range(pp * virtual))
