"""Unequal pipelines side by side: the part of a plan for devices of several kinds.

A pipeline takes its own number of micro-batches, of its own size, through its own stages; all
pipelines add up their gradients once per step. A stage is ``dp * tp`` devices of one kind: each
micro-batch is split over ``dp``, operators over ``tp``. Plain data: torch and the rest of the plan
are not needed to read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SAMPLES, POSITIONS = "samples", "positions"
SHARED_DIM = "pipelines share positions of "
"""How a plan says which dim stands for a batch of one sample."""


def share_unit(assumptions: Iterable[str]) -> str:
    """What the shares of pipelines are counted in: samples, or positions of another dim."""
    return POSITIONS if any(text.startswith(SHARED_DIM) for text in assumptions) else SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage of one pipeline.

    Attributes:
        device: Kind of its devices, such as ``"h100-sxm"``.
        devices: Global ranks, tensor-parallel ranks adjacent.
        dp: Ranks that split a micro-batch.
        tp: Ranks that split operators.
        zero_level: ZeRO level of its parameters over dp.
        layers: First block of the model's chain that it runs, and the one after its last.
        first: First forward operator (stable name).
        scopes: Module paths of its layers, for people.
        recompute: Forward operators whose values are recomputed in backward.
        recompute_words: How its blocks are run, in words; "" if nothing is recomputed.
        splits: Operator or input of the stage -> text of its strategy over tp; what is not listed
            is replicated.
        num_in_flight: Most micro-batches alive at once.
        forward_s: Seconds of one micro-batch's forward, collectives included.
        backward_s: The same of its backward, recomputing included.
        p2p_s: Seconds of the message of a micro-batch to the next stage.
        step_s: Seconds once per step inside the stage: gradients over dp, optimizer.
        exchange_s: Seconds once per step of adding up gradients with other pipelines.
        memory_bytes: Predicted peak of one of its devices.
        memory_limit_bytes: What one of its devices may use.
    """

    device: str
    devices: tuple[int, ...]
    dp: int
    tp: int
    layers: tuple[int, ...]
    first: str = ""
    zero_level: int = 0
    scopes: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    recompute_words: str = ""
    splits: Mapping[str, str] = field(default_factory=dict)
    num_in_flight: int = 1
    forward_s: float = 0.0
    backward_s: float = 0.0
    p2p_s: float = 0.0
    step_s: float = 0.0
    exchange_s: float = 0.0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0

    def __str__(self) -> str:
        """Such as ``16 h100-sxm (dp 2 x tp 8) blocks 0-40``."""
        return (
            f"{len(self.devices)} {self.device} (dp {self.dp} x tp {self.tp}) "
            f"blocks {self.layers[0]}-{self.layers[1] - 1}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """One pipeline.

    Attributes:
        num_microbatches: Micro-batches that it takes per step.
        microbatch_samples: Samples in each of them.
        stages: In forward order.
        time_s: Seconds from its first forward to its last backward.
    """

    num_microbatches: int
    microbatch_samples: int
    stages: tuple[PipelineStage, ...]
    time_s: float = 0.0

    @property
    def num_devices(self) -> int:
        """Devices of all its stages."""
        return sum(len(stage.devices) for stage in self.stages)

    @property
    def samples(self) -> int:
        """Its share of the batch."""
        return self.num_microbatches * self.microbatch_samples

    def words(self, unit: str) -> str:
        """One line.

        Args:
            unit: What is counted, of :func:`share_unit`.
        """
        stages = " -> ".join(map(str, self.stages))
        return f"{self.num_microbatches} x {self.microbatch_samples} {unit}: {stages}"

    def __str__(self) -> str:
        """One line."""
        return self.words(SAMPLES)
