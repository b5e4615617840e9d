"""What one rank runs: the rank-agnostic programs of each stage, and how values move between them.

Every program is an :class:`~autopar.ir.graph.Graph` over *local* shapes. Rank coordinates are
integer inputs (``InputKind.COORD``, target ``"mb"``, ``"dp"`` or ``"tp"``), collectives name a mesh
axis, so that one program serves every rank of a stage. Which program holds what:

===========  ====================================================  ================================
program      inputs                                                outputs
===========  ====================================================  ================================
unshard      PARAM (storage layout)                                PARAM (compute layout)
prologue     USER (whole step), BUFFER, COORD                      PROLOGUE
forward      PARAM (compute), BUFFER, USER (micro-batch), RECV,    SEND, LOSS, OUTPUT, MUTATION,
             PROLOGUE, COORD, RNG                                  SAVED
backward     PARAM (compute), BUFFER, USER, RECV, PROLOGUE,        SEND, GRAD
             COORD, RNG, SAVED, TANGENT
reduce       GRAD (accumulated over micro-batches)                 GRAD (storage layout)
finish       LOSS summed over micro-batches (as kind GRAD)         LOSS (whole on every rank)
===========  ====================================================  ================================

An input's or output's ``target`` is the parameter's, buffer's, user path's or value's name. A
value that a stage receives keeps its name, so SEND and RECV of one value match by ``target``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Graph, OutputKind, Part, TensorMeta
from autopar.ir.precision_rules import sum_dtype
from autopar.sharding.placement import Layout

AXES = ("mb", "dp", "tp")
"""Order of the axes in every layout: micro-batches outermost."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor spread over the axes.

    Attributes:
        meta: The true, global shape and dtype.
        layout: One placement per axis of :data:`AXES`, sizes of one included (as ``R``).
    """

    meta: TensorMeta
    layout: Layout


@dataclass(frozen=True, slots=True)
class ParamPart:
    """A slice of a parameter that programs read as a tensor of its own.

    Attributes:
        target: Its name in programs, such as ``"c_attn.weight[1, 0:32]"``.
        part: What it is a slice of.
        meta: Its true shape and dtype.
        compute: Layout in which programs read it.
    """

    target: str
    part: Part
    meta: TensorMeta
    compute: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter: where it is stored, in what layout, and who uses it.

    Attributes:
        name: The user's first name for it.
        aliases: The other names (tied weights).
        meta: True shape and dtype at rest.
        requires_grad: Whether it is trained.
        owner: Stage that stores it; the first that uses it.
        stages: Every stage that uses it, the owner included. The others borrow its storage shard
            once per step and return their gradient once.
        storage: Layout at rest (``mb`` is always R).
        compute: Layout in which programs read it; for a parameter in parts, a layout in which a
            rank would hold as much of it as of its parts.
        parts: The slices that programs read in its place, if any; in order, covering it.
        compute_dtype: Dtype in which programs read it; "" for that at rest.
    """

    name: str
    aliases: tuple[str, ...]
    meta: TensorMeta
    requires_grad: bool
    owner: int
    stages: tuple[int, ...]
    storage: Layout
    compute: Layout
    parts: tuple[ParamPart, ...] = ()
    compute_dtype: str = ""

    @property
    def compute_meta(self) -> TensorMeta:
        """True shape, and the dtype in which programs read it."""
        return replace(self.meta, dtype=self.compute_dtype or self.meta.dtype)

    @property
    def grad_meta(self) -> TensorMeta:
        """True shape, and the dtype in which its gradient is summed: float32 for lower ones."""
        return replace(self.meta, dtype=sum_dtype(self.meta.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSpec:
    """A loss or output of the model, as a stage's forward program yields it per micro-batch.

    Attributes:
        kind: LOSS, OUTPUT or MUTATION.
        target: Path in the model's result, or the buffer's name.
        stage: Stage whose forward yields it.
        spec: Global meta and layout. ``layout[0]`` says how micro-batches combine: ``S(d)``
            concatenates along d, ``P(sum)`` adds, ``R`` takes any, ``V`` takes them in turn.
    """

    kind: OutputKind
    target: str
    stage: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrograms:
    """The programs of one stage; an empty program has no outputs.

    Where programs are priced, not run, a stage may have those of one that is alike: ``scopes`` then
    says which scope of its own stands for each of theirs.
    """

    index: int
    unshard: Graph
    prologue: Graph
    forward: Graph
    backward: Graph
    reduce: Graph
    finish: Graph
    scopes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LocalPrograms:
    """Everything that the ranks run, and the metadata to feed it.

    Attributes:
        axis_sizes: Sizes of :data:`AXES`.
        stages: Programs by stage.
        params: By first name.
        buffers: Name -> meta; buffers are whole on every rank of ``buffer_stages``.
        buffer_stages: Stages that read or write each buffer.
        users: Call-argument path -> spec as the forward programs read it (its ``mb`` and ``dp``
            placements say which rows a rank needs for a micro-batch). Prologue programs read the
            same with ``mb`` = R.
        user_stages: Stages that read each call argument.
        tangents: Tangent name -> spec; for a model with a scalar loss one scalar.
        results: Losses, outputs and mutations.
        forward_edges: (source, target) -> names of the values sent, in order; source < target.
        backward_edges: (source, target) -> names sent after the source's backward;
            source > target.
        edge_metas: Local meta of every value that crosses stages.
        grads: (stage, parameter) -> spec in which that stage's backward yields the gradient.
        saved: Stage -> names of what its forward keeps for its backward.
        unruled: Operators without a rule, replicated, as ``"op at source"``.
    """

    axis_sizes: tuple[int, int, int]
    stages: tuple[StagePrograms, ...]
    params: Mapping[str, ParamSpec]
    buffers: Mapping[str, TensorMeta]
    buffer_stages: Mapping[str, tuple[int, ...]]
    users: Mapping[str, TensorSpec]
    user_stages: Mapping[str, tuple[int, ...]]
    tangents: Mapping[str, TensorSpec]
    results: tuple[ResultSpec, ...]
    forward_edges: Mapping[tuple[int, int], tuple[str, ...]]
    backward_edges: Mapping[tuple[int, int], tuple[str, ...]]
    edge_metas: Mapping[str, TensorMeta]
    grads: Mapping[tuple[int, str], TensorSpec]
    saved: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    unruled: tuple[str, ...] = ()
