"""Everything that a record's step runs, unpriced: items per stage, collectives, schedule, bytes.

:func:`works_of` needs torch only for shapes that it has not captured yet; its result holds plain
values, is pickled with the standard library and can be priced again and again
(:mod:`autopar.validation.predict`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.cluster.topology import Cluster
from autopar.errors import ConfigError
from autopar.validation.blocks import Collective, Item, Items, Piece, PieceKey, counted, piece_of
from autopar.validation.chains import EVERYTHING
from autopar.validation.convolutions import BLOCKS, ConvShape
from autopar.validation.errors import SkipRecord
from autopar.validation.family import Framework, KernelFamily
from autopar.validation.hardware import cluster_of
from autopar.validation.models import BlockShape
from autopar.validation.probes import Part
from autopar.validation.records import Layout, Recompute, Record
from cost_models.flops import OpClass, Work

# Operators of a layer, and of its attention core, as planners count them (Liu et al., Aceso, 2024).
LAYER_OPERATORS = 13
CORE_OPERATORS = 4
# Stated and counted parameters agree within it if a model is what it is taken for: a head of its
# own is some percent or more.
TIED_WITHIN = 0.01
_IN_BLOCKS = (Recompute.CORE, Recompute.PER_OPERATOR)
HALF_DTYPES = {"fp16": "float16", "fp32": "float32", "tf32": "tf32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWorks:
    """One model stage (a chunk of a pipeline rank) on one of its ranks, per micro-batch.

    Attributes:
        forward: Items of forward.
        backward: Items of backward, recomputed ones included.
        gathers_forward: Weight gathers of forward over the data ranks (ZeRO-3).
        gathers_backward: The same of backward.
        reduces: Gradient reductions of every micro-batch (FSDP, ZeRO-2 and 3).
        layers: Transformer layers; fractions where a plan cuts inside layers.
        tp: Ranks that split operators.
        dp: Ranks that split the batch, context ranks included.
        params: Parameters on this rank before ZeRO.
        layer_params: Of one layer.
        edge_params: Of embedding and head.
        saved_bytes: Kept by a forward.
        forward_operators: Operators that the host issues for a forward.
        backward_operators: The same of backward.
        forward_peak_bytes: Transients of forward.
        backward_peak_bytes: Transients of backward.
    """

    forward: Items
    backward: Items
    gathers_forward: Items
    gathers_backward: Items
    reduces: Items
    layers: float
    tp: int
    dp: int
    params: float
    layer_params: float
    edge_params: float
    saved_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    forward_operators: float
    backward_operators: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWorks:
    """A record's step.

    Attributes:
        name: The record's.
        source: The record's.
        family: Its kernels and framework.
        cluster: Its machines.
        stages: By model stage; stage ``s`` is on pipeline rank ``s % pp``.
        pp: Pipeline ranks.
        virtual: Stages per pipeline rank.
        microbatches: Per step and data rank.
        gpipe: All forwards before all backwards.
        p2p_bytes: A message between stages.
        p2p_gathers: Gathered over tp on arrival (scattered messages).
        once: Per pipeline rank, what runs once per step over the data ranks: reductions, gathers.
        optimizer: Per pipeline rank, its optimizer step.
        tied: All-reduce of the shared embedding between first and last rank; None if there is none.
        zero: ZeRO level.
        precision: The record's word, normalised.
        overlaps_tensor: Collectives of the tensor group are cut up and run beside their matmuls.
    """

    name: str
    source: str
    family: KernelFamily
    cluster: Cluster
    stages: tuple[StageWorks, ...]
    pp: int
    virtual: int
    microbatches: int
    gpipe: bool
    p2p_bytes: float
    p2p_gathers: Items
    once: tuple[Items, ...]
    optimizer: tuple[Items, ...]
    tied: Collective | None
    zero: int
    precision: str
    overlaps_tensor: bool = False

    def ranks_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """Global ranks of a pipeline rank's group along ``"tp"``, ``"dp"`` or ``"pp"`` (a hop).

        Ranks are numbered tp first, then dp, then pp, as Megatron does.
        """
        sizes = [s.tp * s.dp for s in self.stages[: self.pp]]
        first = sum(sizes[:rank])
        stage = self.stages[rank]
        if axis == "tp":
            return tuple(range(first, first + stage.tp))
        if axis == "dp":
            return tuple(range(first, first + sizes[rank], stage.tp))
        after = (rank + 1) % self.pp
        return (first, sum(sizes[:after]))


def works_of(record: Record) -> RecordWorks:
    """Everything that ``record`` runs.

    Raises:
        SkipRecord: The hardware is not known, or the plan does not fit the model.
    """
    cluster = cluster_of(record.machine)
    try:
        stages = tuple(_stages(record))
    except ConfigError as error:
        raise SkipRecord(str(error)) from error
    layout = record.layout
    ranks = range(layout.pp)
    per_rank = [stages[r :: layout.pp] for r in ranks]
    width = layout.mbs * record.shape.seq * record.shape.hidden * _item_bytes(layout.precision)
    cuts = layout.tp[0] if layout.sequence_parallel or record.family.scatters_messages else 1
    gathers: Items = ()
    if record.family.scatters_messages and not layout.sequence_parallel and cuts > 1:
        gathers = ((Collective("all_gather", float(width), "tp"), 1.0),)
    return RecordWorks(
        name=record.name, source=record.source, family=record.family, cluster=cluster,
        stages=stages, pp=layout.pp, virtual=layout.virtual, microbatches=layout.microbatches,
        gpipe="gpipe" in layout.schedule.lower(),
        p2p_bytes=width / cuts / layout.cp, p2p_gathers=gathers,
        once=tuple(_once(record, chunks) for chunks in per_rank),
        optimizer=tuple(_optimizer(record, chunks) for chunks in per_rank),
        tied=_tied(record),
        zero=layout.zero, precision=layout.precision, overlaps_tensor=layout.async_tp,
    )  # fmt: skip


def is_tied(record: Record) -> bool:
    """Whether the head is the embedding: in GPTs; in others if the stated parameters say so."""
    shape = record.shape
    if shape.arch != "llama":
        return shape.arch != "wresnet"
    width, head = shape.hidden, shape.hidden // shape.heads
    layer = 2 * width * (width + shape.kv_heads * head) + 3 * width * shape.ffn + 2 * width
    once = shape.layers * layer + shape.vocab * width + width
    return abs(shape.params / once - 1.0) < TIED_WITHIN


def _tied(record: Record) -> Collective | None:
    """The sum of the gradients of an embedding that first and last rank share."""
    shape, layout = record.shape, record.layout
    if layout.pp == 1 or not is_tied(record):
        return None
    size = shape.vocab * shape.hidden * _grad_bytes(record) / layout.tp[0]
    return Collective("all_reduce", float(size), "pp")


def layer_of(
    record: Record, *, recompute: Recompute | None = None, sequence: bool | None = None
) -> RecordWorks:
    """One layer of a record alone, optionally under another choice.

    Raises:
        SkipRecord: As :func:`works_of`.
    """
    layout = record.layout
    one = replace(
        layout, pp=1, virtual=1, tp=layout.tp[:1], dp=(1,), layer_shares=(1.0,), microbatches=1,
        zero=0, recompute=layout.recompute if recompute is None else recompute,
        sequence_parallel=layout.sequence_parallel if sequence is None else sequence,
    )  # fmt: skip
    record = replace(record, layout=one)
    try:
        stage = _stage(record, 0, 1.0, is_first=False, is_last=False)
    except ConfigError as error:
        raise SkipRecord(str(error)) from error
    return RecordWorks(
        name=record.name, source=record.source, family=record.family,
        cluster=cluster_of(record.machine), stages=(stage,), pp=1, virtual=1, microbatches=1,
        gpipe=False, p2p_bytes=0.0, p2p_gathers=(), once=((),), optimizer=((),), tied=None,
        zero=0, precision=layout.precision,
    )  # fmt: skip


# -- stages ----------------------------------------------------------------------------------------
def block_shape(record: Record, dp_of_stage: int) -> BlockShape:
    """Sizes of a layer for one rank's micro-batch; vocabulary padded for the split."""
    shape, layout, family = record.shape, record.layout, record.family
    tp = max(layout.tp)
    unit = 128 * tp if shape.arch == "gpt" else tp
    batch = layout.mbs
    if len(set(layout.dp)) > 1:  # stages differ: the micro-batch is that of the whole stage
        batch = max(1, layout.mbs // dp_of_stage)
    return BlockShape(
        arch=shape.arch, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        ffn=shape.ffn, vocab=-(-shape.vocab // unit) * unit, seq=shape.seq // layout.cp,
        batch=batch, explicit_attention=family.explicit_attention, dropout=family.dropout,
        wide_softmax=family.explicit_attention and not {"softmax", EVERYTHING} & fused_of(family),
    )  # fmt: skip


def fused_of(family: KernelFamily, part: Part = Part.BLOCK) -> frozenset[str]:
    """What the family's kernels fuse, as :class:`~autopar.validation.chains.Chains` takes it.

    XLA compiles the whole step; torch programs are compiled block by block, as their recipes do.
    """
    is_whole = family.framework is Framework.XLA or part is Part.BLOCK
    return frozenset({EVERYTHING}) if family.compiled and is_whole else family.fused


def _stages(record: Record) -> Iterable[StageWorks]:
    layout = record.layout
    count = layout.pp * layout.virtual
    if record.shape.arch == "wresnet":
        yield _network(record)
        return
    for index in range(count):
        rank = index % layout.pp
        yield _stage(
            record, rank, layout.layer_shares[rank] / layout.virtual,
            is_first=index == 0, is_last=index == count - 1,
        )  # fmt: skip


def pieces_of(record: Record, rank: int = 0) -> dict[Part, Piece]:
    """Block, embedding and head of a record on one pipeline rank, in the record's precision."""
    layout = record.layout
    shape = block_shape(record, layout.dp[rank])
    recompute = layout.recompute.value if layout.recompute in _IN_BLOCKS else "none"
    found: dict[Part, Piece] = {}
    for part in (Part.BLOCK, Part.EMBEDDING, Part.HEAD):
        # the parts at the ends neither know heads nor the MLP: one capture for all that differ
        own = shape if part is Part.BLOCK else replace(
            shape, heads=1, kv_heads=1, ffn=1, explicit_attention=False, wide_softmax=False
        )  # fmt: skip
        own = replace(own, vocab=1) if part is Part.BLOCK else own
        key = PieceKey(
            part=part, shape=own, tp=layout.tp[rank],
            sequence_parallel=layout.sequence_parallel and layout.tp[rank] > 1,
            fused=fused_of(record.family, part),
            split_loss=record.family.splits_loss or part is not Part.HEAD,
            recompute=recompute if part is Part.BLOCK else "none",
        )  # fmt: skip
        piece = piece_of(key)
        if part is Part.HEAD and EVERYTHING in key.fused:
            # a compiler does not make exponentials again for each of several readers: the
            # scores, their exponentials and their gradient are in memory between its loops
            plain = piece_of(replace(key, fused=frozenset()))
            piece = replace(
                piece,
                forward_peak_bytes=plain.forward_peak_bytes,
                backward_peak_bytes=plain.backward_peak_bytes,
            )
        if key.sequence_parallel and record.family.framework is Framework.NANOTRON:
            piece = _keeping_gathered(piece, key.tp)
        found[part] = _in_precision(piece, layout, part)
    return found


def _keeping_gathered(piece: Piece, tp: int) -> Piece:
    """Gathered inputs of linear layers are kept, not gathered again for the weights' gradients.

    nanotron has both (``tp_recompute_allgather``; gathering again is what it does unless told) and
    records do not say which. Kept is taken: what runs on eight tensor ranks print is a quarter more
    than gathering again leaves. Source: nanotron, ``parallel/tensor_parallel/functional.py``.
    """
    gathers = [(i, c) for i, c in piece.forward if _is_gather(i)]
    again = Counter(dict(gathers))
    backward = tuple((i, c - again[i]) for i, c in piece.backward if c > again[i])
    whole = sum(i.payload_bytes * c for i, c in gathers if isinstance(i, Collective))
    return replace(
        piece, backward=backward, saved_bytes=piece.saved_bytes + whole * (1.0 - 1.0 / tp)
    )


def _is_gather(item: Item) -> bool:
    return isinstance(item, Collective) and item.kind == "all_gather" and item.axis == "tp"


def _shares(layout: Layout) -> tuple[float, float]:
    """Layers that are made again whole, and layers whose attention core is made again.

    A share of all operators is taken from those that keep most: the core first.
    """
    if layout.recompute is Recompute.FULL:
        return 1.0, 0.0
    if layout.recompute is not Recompute.SHARE:
        return 0.0, 0.0
    core = CORE_OPERATORS / LAYER_OPERATORS
    whole = max(0.0, layout.recompute_share - core) / (1.0 - core)
    return whole, (1.0 - whole) * min(1.0, layout.recompute_share / core)


def _stage(
    record: Record, rank: int, layers: float, *, is_first: bool, is_last: bool
) -> StageWorks:
    layout = record.layout
    pieces = pieces_of(record, rank)
    block = pieces[Part.BLOCK]
    whole, core = _shares(layout)
    parts: list[tuple[Piece, float]] = [(block, layers * (1.0 - core))]
    if core:
        lean = replace(record, layout=replace(layout, recompute=Recompute.CORE))
        parts.append((pieces_of(lean, rank)[Part.BLOCK], layers * core))
    ends = len(parts)
    if is_first:
        parts.append((pieces[Part.EMBEDDING], 1.0))
    if is_last:
        parts.append((pieces[Part.HEAD], 1.0))
    forward = counted((i, c * n) for piece, n in parts for i, c in piece.forward)
    backward = counted((i, c * n) for piece, n in parts for i, c in piece.backward)
    again = layers * whole
    backward = counted((*backward, *((i, c * again) for i, c in block.forward)))
    saved = sum(piece.saved_bytes * n for piece, n in parts)
    saved -= again * (block.saved_bytes - block.input_bytes)
    edges = sum(piece.params for piece, _ in parts[ends:])
    if is_first and is_last and is_tied(record):
        edges -= record.shape.hidden * block_shape(record, 1).vocab // layout.tp[rank]
    params = block.params * layers + edges
    gathers, reduces = _sharded(record, rank, block, layers, edges)
    return StageWorks(
        forward=forward, backward=backward,
        gathers_forward=gathers, gathers_backward=gathers, reduces=reduces,
        layers=layers, tp=layout.tp[rank], dp=layout.dp[rank] * layout.cp,
        params=params, layer_params=block.params, edge_params=edges,
        saved_bytes=saved,
        forward_peak_bytes=max(p.forward_peak_bytes for p, _ in parts),
        backward_peak_bytes=_backward_peak(
            pieces, again=again > 0, is_last=is_last, held_bytes=_held_scores_bytes(record)
        ),
        forward_operators=_operators(forward), backward_operators=_operators(backward),
    )  # fmt: skip


def _network(record: Record) -> StageWorks:
    """A convolutional network on data ranks: one stage."""
    shape, layout = record.shape, record.layout
    if layout.pp * layout.tp[0] * layout.virtual * layout.cp > 1:
        raise SkipRecord("model.arch is wresnet, which is predicted on data ranks alone")
    if shape.layers not in BLOCKS:
        known = ", ".join(map(str, BLOCKS))
        raise SkipRecord(f"model.layers is {shape.layers}; Wide-ResNets of {known} are known")
    own = ConvShape(
        layers=shape.layers, base_channels=shape.base_channels, image=shape.image,
        width_factor=shape.width_factor, batch=layout.mbs,
    )  # fmt: skip
    piece = piece_of(PieceKey(part=Part.NETWORK, shape=own, fused=fused_of(record.family)))
    count = own.num_blocks
    one = replace(piece, params=piece.params // count)
    gathers, reduces = _sharded(record, 0, one, float(count), 0.0)
    return StageWorks(
        forward=piece.forward, backward=piece.backward, gathers_forward=gathers,
        gathers_backward=gathers, reduces=reduces, layers=float(count), tp=1, dp=layout.dp[0],
        params=float(piece.params), layer_params=one.params, edge_params=0.0,
        saved_bytes=piece.saved_bytes, forward_peak_bytes=piece.forward_peak_bytes,
        backward_peak_bytes=piece.backward_peak_bytes,
        forward_operators=_operators(piece.forward),
        backward_operators=_operators(piece.backward),
    )  # fmt: skip


def _held_scores_bytes(record: Record) -> float:
    """What the loss or its caller holds of the scores of the vocabulary beside their gradient.

    Megatron frees a stage's output once it is used, FSDP recipes delete it; plain torch code of
    pipelines keeps what a stage returned, and its float32 copy, until its backward has ended. The
    loss on split scores of torch's tensor parallelism forms ``(update + exp(x)) * gradient`` in
    float32 while it holds the update: one copy more than a kernel that does it in place.
    Source: torch, ``distributed/tensor/parallel/loss.py``.
    """
    shape, layout = record.shape, record.layout
    scores = layout.mbs * shape.seq / layout.cp * shape.vocab
    if record.family.framework is Framework.TORCH:
        return scores * (2.0 + 4.0)
    if record.family.framework is Framework.FSDP and layout.tp[0] > 1:
        return scores / layout.tp[0] * 4.0
    return 0.0


def _backward_peak(
    pieces: dict[Part, Piece], *, again: bool, is_last: bool, held_bytes: float
) -> float:
    """Transients of backward: the head's, or those of a layer once the head's values are gone."""
    block, head = pieces[Part.BLOCK], pieces[Part.HEAD]
    layer = block.backward_peak_bytes
    if again:
        layer += block.saved_bytes - block.input_bytes
    if not is_last:
        return layer
    return max(head.backward_peak_bytes + held_bytes, layer - head.saved_bytes + head.input_bytes)


def _operators(items: Items) -> float:
    return sum(c * (i.num_kernels if isinstance(i, Work) else 1) for i, c in items)


def _in_precision(piece: Piece, layout: Layout, part: Part) -> Piece:
    """Captured in bfloat16; the record's type, and context parallelism's share of attention."""
    return replace(
        piece,
        forward=_retyped(piece.forward, layout, part),
        backward=_retyped(piece.backward, layout, part),
    )


@lru_cache(maxsize=8192)
def _retyped(items: Items, layout: Layout, part: Part) -> Items:
    half = HALF_DTYPES.get(layout.precision, "bfloat16")
    found: list[tuple[Item, float]] = []
    for item, count in items:
        new = item
        if isinstance(item, Work) and item.dtype == "bfloat16":
            is_float8 = layout.precision == "float8" and part is Part.BLOCK
            if is_float8 and item.op_class is OpClass.MATMUL:
                new = replace(item, dtype="float8")
            else:
                new = replace(item, dtype=half)
        if isinstance(new, Work) and new.op_class is OpClass.ATTENTION and layout.cp > 1:
            # a rank's queries meet the keys of all context ranks
            new = replace(new, flops=new.flops * layout.cp)
        found.append((new, count))
    return counted(found)


# -- data ranks ------------------------------------------------------------------------------------
def _item_bytes(precision: str) -> int:
    return 4 if precision in ("fp32", "tf32") else 2


def _grad_bytes(record: Record) -> int:
    """Bytes of a gradient element when it is reduced."""
    precision = record.layout.precision
    if precision in ("fp16", "bf16-pure"):
        return 2
    if precision == "bf16" and record.family.framework is Framework.TORCH:
        return 2  # torch sums gradients in the type of the parameter
    return 4


def _sharded(
    record: Record, rank: int, block: Piece, layers: float, edges: float
) -> tuple[Items, Items]:
    """Gathers of a pass and reductions of a micro-batch over the data ranks."""
    layout = record.layout
    if layout.dp[rank] * layout.cp == 1 or layout.zero < 2:
        return (), ()
    low = 1 if layout.precision == "float8" and record.family.compiled else 2
    item = _item_bytes(layout.precision)
    gathers = [
        (Collective("all_gather", float(block.params * min(low, item)), "dp"), layers),
        (Collective("all_gather", float(edges * item), "dp"), 1.0 if edges else 0.0),
    ]
    reduces = [
        (Collective("reduce_scatter", float(block.params * _grad_bytes(record)), "dp"), layers),
        (Collective("reduce_scatter", float(edges * _grad_bytes(record)), "dp"),
         1.0 if edges else 0.0),
    ]  # fmt: skip
    if layout.zero < 3:
        gathers = []
    return (
        counted((i, c) for i, c in gathers if c),
        counted((i, c) for i, c in reduces if c),
    )


def _once(record: Record, chunks: tuple[StageWorks, ...]) -> Items:
    """Reductions and gathers at the end of a step."""
    layout, params = record.layout, sum(c.params for c in chunks)
    if chunks[0].dp == 1 or layout.zero == 3:
        return ()
    grads, weights = (
        float(params * _grad_bytes(record)),
        float(params * _item_bytes(layout.precision)),
    )
    if layout.zero == 0:
        return ((Collective("all_reduce", grads, "dp"), 1.0),)
    gather: tuple[Item, float] = (Collective("all_gather", weights, "dp"), 1.0)
    if layout.zero == 1:
        return ((Collective("reduce_scatter", grads, "dp"), 1.0), gather)
    return (gather,)


def _optimizer(record: Record, chunks: tuple[StageWorks, ...]) -> Items:
    """Adam on a rank's share, the norm of the gradients, and their accumulation."""
    layout, params = record.layout, sum(c.params for c in chunks)
    dp = chunks[0].dp
    share = params / (dp if layout.zero else 1)
    grad = _grad_bytes(record)
    low = _item_bytes(layout.precision)
    # gradient, master and two moments read, the last three and the working copy written
    adam = share * (grad + 3 * 4 + 3 * 4 + (low if low == 2 else 0))
    # scaled and checked, squared for the norm, scaled to clip
    norm = share * grad * 4
    works = [(Work(op_class=OpClass.MEMORY, moved_bytes=adam + norm, num_kernels=16), 1.0)]
    held = params / (dp if layout.zero >= 2 else 1)
    # read, add, write: into a float32 buffer every time, else the first one is free
    added = layout.microbatches if grad == 4 else layout.microbatches - 1
    if added:
        kernels = max(1, int(16 * sum(c.layers for c in chunks)))
        moved = held * (2 * grad + 2)
        works.append(
            (Work(op_class=OpClass.MEMORY, moved_bytes=moved, num_kernels=kernels), float(added))
        )
    return counted(works)
