"""The plan: the solver's whole answer, as data.

A plan is a value: frozen, comparable, hashable by content (:mod:`autopar.plan.io`), keyed by the
user's own parameter names and by stable operator names. Ranks are numbered so that stage ``s``
owns a contiguous block of ``dp * tp`` ranks, tensor-parallel ranks adjacent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NoReturn

from autopar.errors import ConfigError
from autopar.plan.pipelines import PipelinePlan
from autopar.units import format_bytes, format_time

if TYPE_CHECKING:
    from autopar.plan.answers import ParamExplanation, PlanExplanation
    from autopar.plan.diff import PlanDiff

MB_AXIS = "mb"
DP_AXIS = "dp"
TP_AXIS = "tp"
PP_AXIS = "pp"


class ScheduleKind(StrEnum):
    """Order of forward and backward micro-batches; ``FORWARD`` has no backwards: inference.

    ``ZERO_BUBBLE`` (ZB-H1) and ``ZBV`` (ZB-V) run the two halves of a backward apart.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"
    ZBV = "zbv"
    FORWARD = "forward"

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed by separate programs."""
        return self in (ScheduleKind.ZERO_BUBBLE, ScheduleKind.ZBV)


class StagePlacement(StrEnum):
    """Which pipeline rank has which stages.

    ``LOOP`` deals them round robin; under ``V`` every second round goes back, so that the last
    stage of a round and the first of the next are on one rank.
    """

    LOOP = "loop"
    V = "v"


class ZeroLevel(int):
    """0: state replicated over dp; 1: optimizer state; 2: and gradients; 3: and parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Sizes of the parallel axes; their product is the number of working ranks.

    Attributes:
        dp: Ranks that split the batch.
        tp: Ranks that split operators.
        pp: Ranks along the pipeline.
        virtual: Stages per pipeline rank (interleaving).
        placement: Which pipeline rank has which stages.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    placement: StagePlacement = StagePlacement.LOOP

    @property
    def num_ranks(self) -> int:
        """Working ranks."""
        return self.dp * self.tp * self.pp

    @property
    def num_stages(self) -> int:
        """Stages, all chunks of all pipeline ranks."""
        return self.pp * self.virtual

    def rank_of(self, pp: int, dp: int, tp: int) -> int:
        """Global rank at a coordinate."""
        return (pp * self.dp + dp) * self.tp + tp

    def coordinate(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, tp) of a global rank."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def pipeline_rank(self, stage: int) -> int:
        """Pipeline rank that runs ``stage``.

        >>> [MeshShape(pp=2, virtual=2).pipeline_rank(stage) for stage in range(4)]
        [0, 1, 0, 1]
        >>> v = MeshShape(pp=2, virtual=2, placement=StagePlacement.V)
        >>> [v.pipeline_rank(stage) for stage in range(4)]
        [0, 1, 1, 0]
        """
        chunk, position = divmod(stage, self.pp)
        goes_back = self.placement is StagePlacement.V and chunk % 2 == 1
        return self.pp - 1 - position if goes_back else position

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Stages that a pipeline rank runs, in the order of the model.

        >>> MeshShape(pp=2, virtual=2, placement=StagePlacement.V).stages_of(0)
        (0, 3)
        """
        if not 0 <= pipeline_rank < self.pp:
            return ()
        there, back = pipeline_rank, self.pp - 1 - pipeline_rank
        is_v = self.placement is StagePlacement.V
        return tuple(
            chunk * self.pp + (back if is_v and chunk % 2 else there)
            for chunk in range(self.virtual)
        )

    def __str__(self) -> str:
        """Such as ``pp2 x dp2 x tp2``."""
        parts = [f"{n}{s}" for n, s in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp)) if s > 1]
        text = " x ".join(parts) or "1 device"
        form = " in a V" if self.placement is StagePlacement.V else ""
        return text + (f" (v{self.virtual}{form})" if self.virtual > 1 or form else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes on one device at the stage's peak.

    Attributes:
        params_bytes: Parameters as stored, and their gathered compute copies.
        grads_bytes: Gradient accumulators.
        optimizer_bytes: Optimizer state.
        activations_bytes: Saved values of all micro-batches in flight.
        transient_bytes: The most that is alive inside one program beyond its inputs and outputs.
        buffers_bytes: Module buffers and communication buffers.
    """

    params_bytes: int = 0
    grads_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    transient_bytes: int = 0
    buffers_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.params_bytes
            + self.grads_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.transient_bytes
            + self.buffers_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeParts:
    """Seconds of one micro-batch on a stage, and once-per-step work.

    ``forward_s`` and ``backward_s`` include their collectives. ``weight_s`` is the part of
    ``backward_s`` that makes the gradients of weights, where a schedule runs it apart; else 0.
    ``copy_s`` is the part of ``optimizer_s`` that copies its state from host memory and back.
    ``offload_s`` and ``fetch_s`` are copies of saved values to host memory in a forward and back in
    a backward, beside computing; what of them is waited for is in ``forward_s`` and ``backward_s``.
    ``sync_s`` is what else comes once per step, beside gradients and parameters: what all
    micro-batches need, losses, outputs and statistics that are summed up or sent to all, weights
    that stages share.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    p2p_s: float = 0.0
    reduce_s: float = 0.0
    unshard_s: float = 0.0
    optimizer_s: float = 0.0
    weight_s: float = 0.0
    copy_s: float = 0.0
    offload_s: float = 0.0
    fetch_s: float = 0.0
    sync_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All collectives of one kind on one axis in one step on one device.

    Attributes:
        where: ``"forward"``, ``"backward"``, ``"once per step"``.
        count: Calls per step.
        payload_bytes: Sum of the payloads: the larger of the local input and output.
    """

    kind: str
    axis: str
    where: str
    count: int
    payload_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage.

    Attributes:
        index: Position in the pipeline.
        devices: Global ranks.
        first: First forward operator (stable name); "" in an empty stage.
        scopes: Module paths of the stage's layers, for people.
        recompute: Forward operators whose values are recomputed in backward.
        zero_level: ZeRO level of its parameters over dp.
        parameters: Number of parameter elements of the whole stage.
        num_in_flight: Most micro-batches alive at once.
        offload: Forward operators whose values are kept for backward in host memory.
        offload_bytes: Bytes of them of one micro-batch on a device.
    """

    index: int
    devices: tuple[int, ...]
    first: str
    scopes: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    zero_level: int = 0
    parameters: int = 0
    num_in_flight: int = 1
    memory: MemoryParts = field(default_factory=MemoryParts)
    time: TimeParts = field(default_factory=TimeParts)
    collectives: tuple[CollectiveTotal, ...] = ()
    offload: tuple[str, ...] = ()
    offload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerms:
    """Where the seconds of a step go on the pipeline rank that is busy longest.

    Attributes:
        compute_s: Operators of all micro-batches, recomputing included.
        collectives_s: Collectives of all micro-batches.
        once_s: Once per step: gradients reduced, parameters gathered, losses summed, the optimizer.
        waiting_s: The rest: pipeline bubbles, and messages that nothing hides.
    """

    compute_s: float = 0.0
    collectives_s: float = 0.0
    once_s: float = 0.0
    waiting_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of the terms: the step."""
        return self.compute_s + self.collectives_s + self.once_s + self.waiting_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that was considered: what it was and why it lost (empty for the winner).

    Attributes:
        zero_level: The highest of any stage.
        terms: Where its time goes, by the same measure as ``time_s``; None if nothing was priced.
        warmup: As in :class:`Plan`.
        zero_levels: By stage, where they differ; else empty.
    """

    mesh: MeshShape
    num_microbatches: int
    schedule: ScheduleKind
    zero_level: int
    recompute: str
    time_s: float
    peak_bytes: int
    reason: str
    terms: TimeTerms | None = None
    warmup: tuple[int, ...] | None = None
    zero_levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedConstraint:
    """A constraint in force, with its origin (``"user"`` or ``"default"``) and effect in words."""

    name: str
    value: str
    origin: str
    effect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who does what, how long, how many bytes, and why.

    Attributes:
        model_hash: Hash of the captured graph that the plan was made for.
        cluster: Text of the cluster, such as ``"4x8:h100-sxm"``.
        num_devices: Devices asked for; those beyond ``mesh.num_ranks`` are idle.
        splits: Per axis (``"mb"``, ``"dp"``, ``"tp"``): operator name -> text of its
            :class:`~autopar.sharding.signature.AxisStrategy`. Operators that are not listed are
            replicated. Inputs are listed with a bare placement.
        microbatch_statistics: Whether batch statistics are taken per micro-batch.
        time_s: Predicted time of a step.
        objective_s: What the search estimated for this plan before it was simulated, as for those
            that lost.
        bound_s: Lower bound on the simulated time of every plan in the space that was searched.
        model_gap: What is left open by the lower bound of the estimates that the search goes by,
            as a share of the best estimate.
        peak_bytes: Predicted peak of the worst device.
        peak_at: When that is, in words: stage, pass, micro-batch, operator; "" if not known.
        memory_limit_bytes: The limit it was made under.
        optimizer: Optimizer assumed for state bytes.
        offload: What is kept in host memory all the time: ``"optimizer"``, its state; "" for
            nothing. What stages keep there of a micro-batch is in :class:`StagePlan`.
        offload_window_bytes: Bytes of saved values on a device that are under way to host memory,
            or back before they are read, at once.
        unruled: Operators without a rule (replicated), as ``"op at source"``.
        assumptions: What was taken for granted, in sentences.
        provenance: Versions and sources of prices.
        names: Input of the graph -> the user's name of the call argument or parameter.
        param_words: Parameter -> how ``tp`` and ZeRO-3 split it, in words; empty if nothing does.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; None: in the model's own dtypes.
        precision_words: Dtype -> which operators compute in it, in words; empty if it is None.
        warmup: Forwards that each pipeline rank runs before its first backward, for 1F1B alone;
            None: as few as keep the pipeline full (``pp - rank``).
        rank_bytes: Predicted peak of each pipeline rank's devices; empty where it is what its
            stages take, added up.
        links: Axis with several ranks -> the slowest link that its groups use, in words.
        pipelines: Unequal pipelines side by side, on devices of several kinds; empty for a plan of
            one mesh. With pipelines ``mesh`` is that of one device and there are no ``stages``.
        objective: What was minimised: ``"time"``, ``"cost"`` or ``"time within cost"``.
        cost_per_step: Price of a step on the devices in use, in the currency of the cluster's
            ``cost_per_hour``; None where prices are not known.
        cost_bound: Lower bound of it over the searched space, where it was minimised.
        cost_limit: The most that a step may cost, if the user gave it.
    """

    model_hash: str
    cluster: str
    num_devices: int
    mesh: MeshShape
    num_microbatches: int
    schedule: ScheduleKind
    stages: tuple[StagePlan, ...]
    splits: Mapping[str, Mapping[str, str]]
    microbatch_statistics: bool = False
    time_s: float = 0.0
    objective_s: float = 0.0
    bound_s: float = 0.0
    peak_bytes: int = 0
    peak_at: str = ""
    memory_limit_bytes: int = 0
    optimizer: str = "adamw"
    constraints: tuple[AppliedConstraint, ...] = ()
    runners_up: tuple[Candidate, ...] = ()
    unruled: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    param_words: Mapping[str, str] = field(default_factory=dict)
    precision: str | None = None
    precision_words: Mapping[str, str] = field(default_factory=dict)
    warmup: tuple[int, ...] | None = None
    rank_bytes: tuple[int, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    model_gap: float = 0.0
    pipelines: tuple[PipelinePlan, ...] = ()
    objective: str = "time"
    cost_per_step: float | None = None
    cost_bound: float | None = None
    cost_limit: float | None = None
    offload: str = ""
    offload_window_bytes: int = 0

    @property
    def offloads_activations(self) -> bool:
        """Whether saved values of any stage are kept in host memory."""
        return any(stage.offload for stage in self.stages)

    @property
    def gap(self) -> float:
        """What the bound leaves open, as a share of the predicted time."""
        return max(0.0, 1 - self.bound_s / self.time_s) if self.time_s > 0 else 0.0

    @property
    def num_ranks(self) -> int:
        """Devices in use."""
        return sum(p.num_devices for p in self.pipelines) or self.mesh.num_ranks

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Devices that are not in use."""
        if not self.pipelines:
            return tuple(range(self.mesh.num_ranks, self.num_devices))
        used = {rank for p in self.pipelines for stage in p.stages for rank in stage.devices}
        return tuple(rank for rank in range(self.num_devices) if rank not in used)

    @property
    def mode(self) -> str:
        """``"train"``, or ``"inference"`` for a plan that has no backward."""
        return "inference" if self.schedule is ScheduleKind.FORWARD else "train"

    def explain(self, pattern: str | None = None) -> PlanExplanation | ParamExplanation:
        """What binds and who lost; or how the parameters that match a pattern are split.

        The plan alone is asked. What takes the model (what more memory would be worth, what other
        splits would cost) is told by ``model.explain()`` and by ``autopar explain``.

        Args:
            pattern: Of parameter names, such as ``"model.layers.*.mlp.down_proj.weight"``.

        Raises:
            ConfigError: No parameter matches the pattern.
        """
        from autopar.plan.explain import explain_parameters, explain_plan

        return explain_plan(self) if pattern is None else explain_parameters(self, pattern)

    def diff(self, other: Plan) -> PlanDiff:
        """What another plan does differently: shape, stages, splits, memory and time by part."""
        from autopar.plan.diff import diff_plans

        return diff_plans(self, other)

    def replan(self, devices: object = None, **change: object) -> NoReturn:
        """Refused: a plan alone can't be solved again.

        Raises:
            ConfigError: Always; the text says whom to ask.
        """
        from autopar.plan.explain import NEEDS_MODEL

        words = [] if devices is None else [repr(devices)]
        given = ", ".join([*words, *(f"{name}={value!r}" for name, value in change.items())])
        raise ConfigError(
            NEEDS_MODEL.format(
                what="planning again", call=f"model.replan({given})", command="replan"
            )
        )

    def why_not(self, **constraints: object) -> NoReturn:
        """Refused: a plan alone can't be solved again.

        Raises:
            ConfigError: Always; the text says whom to ask.
        """
        from autopar.plan.explain import NEEDS_MODEL

        given = ", ".join(f"{name}={value!r}" for name, value in constraints.items())
        raise ConfigError(
            NEEDS_MODEL.format(
                what=f"why not {given}", call=f"model.why_not({given})", command="why-not"
            )
        )

    def __str__(self) -> str:
        """A few lines; ``model.report()`` and ``autopar report`` say everything."""
        idle = len(self.idle_ranks)
        shape = f"{_counted(len(self.pipelines), 'pipeline')}" if self.pipelines else f"{self.mesh}"
        lines = [
            f"plan for {_counted(self.num_devices, 'device')} of {self.cluster}: {shape}"
            + (f", {idle} idle" if idle else ""),
            f"{self.schedule.value}, {_counted(self.num_microbatches, 'micro-batch')}, "
            f"{format_time(self.time_s)} per step, {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.memory_limit_bytes)} on the worst device"
            + (f", {self.precision} with float32 masters" if self.precision else "")
            + (", optimizer state in host memory" if self.offload else "")
            + (", saved values in host memory" if self.offloads_activations else ""),
        ]
        lines += [
            f"stage {s.index}: {_ranks(s.devices)}, {_counted(s.parameters, 'parameter')}, "
            f"ZeRO {s.zero_level}, {_counted(len(s.recompute), 'operator')} recomputed"
            for s in self.stages
            if s.devices
        ]
        lines += [str(pipeline) for pipeline in self.pipelines]
        return "\n".join(lines)


def _counted(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _ranks(devices: tuple[int, ...]) -> str:
    return f"ranks {devices[0]}-{devices[-1]}" if len(devices) > 1 else f"rank {devices[0]}"
