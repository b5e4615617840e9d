"""How parameters rest between steps, and the once-per-step programs that move them.

``unshard`` turns a parameter from its layout at rest into the layouts that programs read,
``reduce`` turns accumulated gradients into the layout at rest. A parameter that programs read in
parts (a fused projection) is gathered, sliced and sharded part by part; its gradient is joined
from the parts' gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import ShardingError
from autopar.ir.graph import (
    Dtype,
    Graph,
    Input,
    InputKind,
    Meta,
    Output,
    OutputKind,
    Ref,
    TensorMeta,
)
from autopar.sharding.buckets import in_buckets
from autopar.sharding.decisions import Decisions
from autopar.sharding.emitter import Emitter
from autopar.sharding.localize import Layouts
from autopar.sharding.placement import (
    Layout,
    P,
    Partial,
    Placement,
    R,
    Replicate,
    Shard,
    local_shape,
)
from autopar.sharding.programs import AXES, ParamPart, ParamSpec
from autopar.sharding.split import assemble


def storage_layout(meta: TensorMeta, compute: Layout, dp: int, zero_level: int) -> Layout:
    """Layout of a parameter at rest.

    Under ZeRO (any level over 0) the optimizer works on a shard over ``dp``. The shard's dim must
    not be one that ``tp`` shards, because a shard on an outer axis can't be gathered while an inner
    axis shards the same dim. The largest dim that ``dp`` divides is taken, else the largest that
    leaves no rank empty; a parameter without such a dim stays replicated.

    Args:
        meta: True shape.
        compute: Layout over (mb, dp, tp) in which programs read it.
        dp: Ranks along dp.
        zero_level: 0 to 3.
    """
    if zero_level == 0 or dp == 1 or not isinstance(compute[1], Replicate):
        return (R, compute[1], compute[2])
    free = [d for d in range(len(meta.shape)) if compute[2] != Shard(d)]
    even = [d for d in free if meta.shape[d] % dp == 0 and meta.shape[d] >= dp]
    uneven = [d for d in free if meta.shape[d] > (dp - 1) * -(-meta.shape[d] // dp)]
    for dims in (even, uneven):
        if dims:
            return (R, Shard(max(dims, key=lambda d: meta.shape[d])), compute[2])
    return (R, R, compute[2])


def parameter_inputs(graph: Graph) -> dict[str, list[Input]]:
    """Inputs of each parameter by its first name: one, or its parts in order."""
    found: dict[str, list[Input]] = {}
    for entry in graph.of_kind(InputKind.PARAM):
        found.setdefault(entry.param, []).append(entry)
    for entries in found.values():
        entries.sort(key=lambda e: 0 if e.part is None else e.part.start)
    return found


def param_spec(
    name: str,
    entries: Sequence[Input],
    stages: tuple[int, ...],
    zero_level: int,
    layouts: Layouts,
    decisions: Decisions,
) -> ParamSpec:
    """Where a parameter is stored and in what layouts.

    Args:
        name: Its first name.
        entries: Its graph inputs: one, or its parts in order.
        stages: Stages that use it.
        zero_level: ZeRO level of its owner stage.
        layouts: Layout of every value.
        decisions: Axis sizes.
    """
    parts = tuple(
        ParamPart(e.target, e.part, e.meta, layouts.full(e.name))
        for e in entries
        if e.part is not None and e.meta is not None
    )
    meta, compute_dtype = _whole_meta(name, entries)
    compute = _whole_compute(meta, parts, decisions) if parts else layouts.full(entries[0].name)
    return ParamSpec(
        name=name,
        aliases=entries[0].aliases,
        meta=meta,
        requires_grad=entries[0].requires_grad,
        owner=stages[0],
        stages=stages,
        storage=storage_layout(meta, compute, decisions.size("dp"), zero_level),
        compute=compute,
        parts=parts,
        compute_dtype=compute_dtype,
    )


def _whole_meta(name: str, entries: Sequence[Input]) -> tuple[TensorMeta, str]:
    """True shape and dtype at rest, and the dtype in which all its parts are read or cast from."""
    first = entries[0]
    if first.meta is None:
        raise ShardingError(f"parameter {name!r} has no shape")
    stored = first.master or first.meta.dtype
    read = {e.meta.dtype for e in entries if e.meta is not None}
    compute_dtype = first.meta.dtype if len(read) == 1 else stored
    if first.part is None:
        return TensorMeta(first.meta.shape, stored), compute_dtype
    dim = first.part.dim
    size = sum(e.part.stop - e.part.start for e in entries if e.part is not None)
    shape = (*first.meta.shape[:dim], size, *first.meta.shape[dim + 1 :])
    return TensorMeta(shape, stored), compute_dtype


def _whole_compute(meta: TensorMeta, parts: Sequence[ParamPart], decisions: Decisions) -> Layout:
    """The parts' common placement on tp, if the whole can be cut the same way."""
    common = {p.compute[2] for p in parts}
    placement = common.pop() if len(common) == 1 else R
    if isinstance(placement, Shard) and meta.shape[placement.dim] % decisions.size("tp"):
        placement = R
    return (R, R, placement)


class Mover:
    """Grows a once-per-step program over the axes in space.

    Args:
        decisions: Axis sizes.
    """

    def __init__(self, decisions: Decisions) -> None:
        axes = tuple(a for a in decisions.axes if a != "mb")
        self._places = tuple(AXES.index(a) for a in axes)
        self._emitter = Emitter(axes, tuple(decisions.size(a) for a in axes))
        self._describe: dict[str, tuple[InputKind, str, Meta]] = {}
        self._outputs: list[tuple[str, Ref]] = []

    def _space(self, layout: Layout) -> Layout:
        return tuple(layout[p] for p in self._places)

    def bind(self, kind: InputKind, target: str, meta: TensorMeta, layout: Layout) -> Ref:
        """Declare an input of true shape ``meta`` in a full layout."""
        shape = local_shape(meta.shape, self._space(layout), self._emitter.sizes)
        local = TensorMeta(shape, meta.dtype)
        name = f"{kind.value}_{len(self._describe)}"
        self._describe[name] = (kind, target, local)
        return self._emitter.bind(name, local)

    def move(self, ref: Ref, meta: TensorMeta, have: Layout, want: Layout) -> Ref:
        """Reshard a value between full layouts; the axis ``mb`` takes no part."""
        return self._emitter.reshard(ref, meta.shape, self._space(have), self._space(want))

    def cast(self, ref: Ref, dtype: str) -> Ref:
        """A value in another dtype."""
        meta = self._emitter.meta(ref)
        if meta.dtype == dtype:
            return ref
        cast = TensorMeta(meta.shape, dtype)
        return self._emitter.emit("aten._to_copy.default", (ref,), cast, (("dtype", Dtype(dtype)),))

    def yields(self, target: str, ref: Ref) -> None:
        """Declare an output."""
        self._outputs.append((target, ref))

    def program(self, kind: OutputKind) -> Graph:
        """What has grown, small collectives together."""
        outputs = tuple(Output(kind, target, ref) for target, ref in self._outputs)
        whole = assemble(tuple(self._emitter.nodes), outputs, self._describe)
        sizes = dict(zip(self._emitter.axes, self._emitter.sizes, strict=True))
        return in_buckets(whole, sizes)

    def unshard(self, spec: ParamSpec) -> None:
        """From the layout and dtype at rest to what programs read: cast first, gathered then."""
        ref = self.bind(InputKind.PARAM, spec.name, spec.meta, spec.storage)
        meta = spec.compute_meta
        ref = self.cast(ref, meta.dtype)
        if not spec.parts:
            self.yields(spec.name, self.move(ref, meta, spec.storage, spec.compute))
            return
        whole = self.move(ref, meta, spec.storage, (R, R, R))
        for part in spec.parts:
            where = part.part
            piece = self._emitter.emit(
                "aten.slice.Tensor",
                (whole, where.dim, where.start, where.stop, 1),
                TensorMeta(part.meta.shape, meta.dtype),
            )
            piece = self.cast(piece, part.meta.dtype)
            self.yields(part.target, self.move(piece, part.meta, (R, R, R), part.compute))

    def reduce(self, spec: ParamSpec, grads: Mapping[str, Layout]) -> None:
        """From accumulated gradients to the layout at rest, in the dtype of sums.

        Args:
            spec: The parameter.
            grads: Target -> full layout of the gradients that this stage's backward yields.
        """
        if not spec.parts:
            if spec.name in grads:
                have = grads[spec.name]
                ref = self.bind(InputKind.GRAD, spec.name, spec.grad_meta, have)
                self.yields(spec.name, self.move(ref, spec.meta, have, spec.storage))
            return
        if not any(p.target in grads for p in spec.parts):
            return
        have_dp = {grads[p.target][1] for p in spec.parts if p.target in grads}
        common: Placement = have_dp.pop() if len(have_dp) == 1 else P
        if not isinstance(common, Partial | Replicate):
            common = R
        joint: Layout = (R, common, R)
        pieces = []
        for part in spec.parts:
            meta = TensorMeta(part.meta.shape, spec.grad_meta.dtype)
            if part.target in grads:
                have = grads[part.target]
                ref = self.bind(InputKind.GRAD, part.target, meta, have)
                pieces.append(self.move(ref, meta, have, joint))
            else:  # read by another stage only
                pieces.append(self._zeros(meta))
        dim = spec.parts[0].part.dim
        whole = self._emitter.emit("aten.cat.default", (tuple(pieces), dim), spec.grad_meta)
        self.yields(spec.name, self.move(whole, spec.meta, joint, spec.storage))

    def _zeros(self, meta: TensorMeta) -> Ref:
        return self._emitter.emit(
            "aten.full.default", (meta.shape, 0.0), meta, (("dtype", Dtype(meta.dtype)),)
        )
