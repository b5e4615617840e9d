"""Emits the local form of operators and the collectives that change a value's layout.

One :class:`Emitter` grows one list of local nodes. It is used to build programs
(:mod:`autopar.sharding.localize`) and, on a scratch list, to price one operator or one reshard:
what the solver prices is what the program runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.errors import ShardingError
from autopar.ir.graph import Arg, Meta, Node, Phase, Ref, TensorMeta
from autopar.sharding.lowerings import LOWERINGS
from autopar.sharding.placement import (
    Layout,
    Partial,
    Placement,
    R,
    Replicate,
    Routed,
    Shard,
    Varying,
    local_shape,
    shard_size,
)
from autopar.sharding.signature import AxisStrategy, OpSignature


@dataclass(slots=True)
class Emitter:
    """A growing local program.

    Attributes:
        axes: Axis names that split, outermost first.
        sizes: Their sizes.
        prefix: Put before the names of emitted nodes, to keep several emitters apart.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    prefix: str = ""
    nodes: list[Node] = field(default_factory=list)
    metas: dict[str, TensorMeta | None] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD
    origin: Node | None = None
    used_coords: set[str] = field(default_factory=set)
    _serial: dict[str, int] = field(default_factory=dict)

    # -- naming and bookkeeping ------------------------------------------------------------------
    def fresh(self, stem: str) -> str:
        """A name that no node has yet."""
        stem = self.prefix + stem
        count = self._serial.get(stem, 0)
        self._serial[stem] = count + 1
        name = stem if count == 0 and stem not in self.metas else f"{stem}__{count}"
        while name in self.metas:
            self._serial[stem] += 1
            name = f"{stem}__{self._serial[stem]}"
        return name

    def bind(self, name: str, meta: TensorMeta | None) -> Ref:
        """Declare an input of the program."""
        self.metas[name] = meta
        return Ref(name)

    def coord(self, axis: str) -> Ref:
        """The rank's coordinate along an axis, an integer."""
        self.used_coords.add(axis)
        return Ref(f"coord_{axis}")

    def axis_size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes[self.axes.index(axis)]

    def meta(self, ref: Ref) -> TensorMeta:
        """Local shape and dtype of a value."""
        meta = self.metas[ref.name]
        if meta is None:
            raise ShardingError(f"{ref} is an integer, not a tensor")
        return meta

    def emit(
        self,
        op: str,
        args: tuple[Arg, ...],
        meta: Meta,
        kwargs: tuple[tuple[str, Arg], ...] = (),
        name: str | None = None,
    ) -> Ref:
        """Append one local node; several results are read with :meth:`item`."""
        origin = self.origin
        short = op.split(".")[1] if "." in op else op
        stem = name or (f"{origin.name}_{short}" if origin else short)
        node = Node(
            name=self.fresh(stem),
            op=op,
            args=args,
            meta=meta,
            kwargs=kwargs,
            phase=self.phase,
            twin=origin.twin if origin else None,
            scope=origin.scope if origin else "",
            origin=origin.name if origin else "",
            source=origin.source if origin else "",
        )
        self.nodes.append(node)
        self.metas[node.name] = meta if isinstance(meta, TensorMeta) else None
        self._multi(node)
        return Ref(node.name)

    def _multi(self, node: Node) -> None:
        if isinstance(node.meta, tuple):
            for index, meta in enumerate(node.meta):
                self.metas[f"{node.name}#{index}"] = meta

    def item(self, ref: Ref, index: int) -> Ref:
        """Result ``index`` of an operator with several results."""
        meta = self.metas[f"{ref.name}#{index}"]
        if meta is None:
            raise ShardingError(f"{ref} has no result {index}")
        return self.emit("getitem", (ref, index), meta)

    # -- reshard ---------------------------------------------------------------------------------
    def reshard(self, ref: Ref, shape: tuple[int, ...], current: Layout, target: Layout) -> Ref:
        """Emit what turns ``current`` into ``target`` (layouts over :attr:`axes`).

        Axes are undone from the innermost out and redone from the outermost in. An axis that stays
        as it is is undone all the same if an axis outside of it starts or stops sharding its dim:
        the blocks of a dim are nested, the outer ones can't change under the inner ones.

        Args:
            ref: The local value.
            shape: True global shape.
            current: Its layout.
            target: The layout wanted.
        """
        now = list(current)
        changing = _changing_levels(current, target)
        self._check_routed(ref, current, target, changing)
        for level in reversed(range(len(self.axes))):
            if level in changing:
                ref = self._undo(ref, shape, now, target, level, changing)
        for level in range(len(self.axes)):
            if now[level] != target[level]:
                ref = self._redo(ref, now, target, level)
        return ref

    def _check_routed(self, ref: Ref, current: Layout, target: Layout, changing: set[int]) -> None:
        """Rows sorted by expert stay as they are, and so do the axes outside of them."""
        for level in range(len(self.axes)):
            for have, want in ((current[level], target[level]), (target[level], current[level])):
                if not isinstance(have, Routed):
                    continue
                outer = _dims(p for o in changing if o < level for p in (current[o], target[o]))
                if have != want or have.dim in outer:
                    raise ShardingError(
                        f"{ref}: rows sorted by expert ({have} over axis {self.axes[level]!r}) "
                        f"can't become {want}: their order is each rank's own"
                    )

    def _undo(
        self,
        ref: Ref,
        shape: tuple[int, ...],
        now: list[Placement],
        target: Layout,
        level: int,
        changing: set[int],
    ) -> Ref:
        axis, want, have = self.axes[level], target[level], now[level]
        if isinstance(have, Replicate):
            return ref
        if axis == "mb" or isinstance(have, Varying):
            raise ShardingError(
                f"{ref}: {have} over axis {axis!r} can't become {want} inside a micro-batch"
            )
        # dims that an outer axis has still to change must not be cut by this one before
        busy = _dims(p for o in changing if o < level for p in (now[o], target[o]))
        direct = want if isinstance(want, Shard) and want.dim not in busy else None
        if isinstance(have, Partial):
            if direct is not None and have.op == "sum":
                now[level] = direct
                return self.reduce_scatter(ref, have.op, direct.dim, axis)
            now[level] = R
            return self.all_reduce(ref, have.op, axis)
        whole = local_shape(shape, tuple(now[:level]), self.sizes[:level])[have.dim]
        outer = _dims(now[:level])
        if direct is not None and direct.dim != have.dim and direct.dim not in outer:
            now[level] = direct
            return self.all_to_all(ref, have.dim, direct.dim, axis, whole)
        now[level] = R
        return self.all_gather(ref, have.dim, axis, whole)

    def _redo(self, ref: Ref, now: list[Placement], target: Layout, level: int) -> Ref:
        axis, want = self.axes[level], target[level]
        now[level] = want
        if isinstance(want, Shard):
            return self.shard(ref, want.dim, axis)
        if isinstance(want, Partial):
            if want.op != "sum":
                return ref  # a whole value is already its own maximum or minimum
            return self.emit("local.first", (ref, self.coord(axis)), self.meta(ref))
        if isinstance(want, Varying):
            return ref
        raise ShardingError(f"{ref}: no way from {now[level]} to {want} over axis {axis!r}")

    # -- the dialect -----------------------------------------------------------------------------
    def all_reduce(self, ref: Ref, op: str, axis: str) -> Ref:
        """Every rank gets the reduction over the axis."""
        return self.emit("comm.all_reduce", (ref, op, axis), self.meta(ref))

    def all_gather(self, ref: Ref, dim: int, axis: str, out_size: int) -> Ref:
        """Blocks of all ranks side by side along ``dim``, cut to ``out_size``."""
        return self.emit(
            "comm.all_gather", (ref, dim, axis, out_size), _resized(self.meta(ref), dim, out_size)
        )

    def reduce_scatter(self, ref: Ref, op: str, dim: int, axis: str) -> Ref:
        """Each rank gets its block of the reduction."""
        meta = self.meta(ref)
        size = shard_size(meta.shape[dim], self.axis_size(axis))
        return self.emit("comm.reduce_scatter", (ref, op, dim, axis), _resized(meta, dim, size))

    def all_to_all(self, ref: Ref, gather_dim: int, scatter_dim: int, axis: str, out: int) -> Ref:
        """From sharded on ``gather_dim`` to sharded on ``scatter_dim``."""
        meta = _resized(self.meta(ref), gather_dim, out)
        size = shard_size(meta.shape[scatter_dim], self.axis_size(axis))
        return self.emit(
            "comm.all_to_all",
            (ref, gather_dim, scatter_dim, axis, out),
            _resized(meta, scatter_dim, size),
        )

    def shard(self, ref: Ref, dim: int, axis: str) -> Ref:
        """This rank's block of a whole value."""
        meta, parts = self.meta(ref), self.axis_size(axis)
        size = shard_size(meta.shape[dim], parts)
        return self.emit(
            "local.shard", (ref, dim, self.coord(axis), parts), _resized(meta, dim, size)
        )

    def mask(self, ref: Ref, dim: int, axes: Sequence[str], size: int, fill: float) -> Ref:
        """Overwrite what lies beyond the true size of ``dim``."""
        coords = tuple(self.coord(a) for a in axes)
        parts = tuple(self.axis_size(a) for a in axes)
        return self.emit("local.mask", (ref, dim, coords, parts, size, fill), self.meta(ref))

    # -- operators -------------------------------------------------------------------------------
    def operator(
        self,
        node: Node,
        signature: OpSignature | None,
        strategies: Sequence[AxisStrategy | None],
        operands: Sequence[Ref],
        operand_metas: Sequence[TensorMeta],
    ) -> tuple[Ref | None, ...]:
        """Emit the local form of one operator whose operands are in the chosen layouts.

        Args:
            node: The global operator.
            signature: Its named dims; None for an operator without a rule (all replicated).
            strategies: One per axis, None for replicated.
            operands: Local values, in the order of ``node.refs()``.
            operand_metas: True global shapes and dtypes of the operands.

        Returns:
            One reference per result.
        """
        self.origin, self.phase = node, node.phase
        context = OperatorContext(self, node, signature, tuple(strategies), tuple(operand_metas))
        operands = context.masked(list(operands))
        lowering = {s.lowering for s in strategies if s is not None and s.lowering}
        if len(lowering) > 1:
            raise ShardingError(f"{node.name}: lowerings {sorted(lowering)} can't be combined")
        if lowering:
            axes = tuple(
                a
                for a, s in zip(self.axes, strategies, strict=True)
                if s is not None and s.lowering
            )
            return tuple(LOWERINGS[lowering.pop()](context, node, list(operands), axes))
        supply = iter(operands)
        args, kwargs = node.map_refs(lambda _: next(supply))
        metas = context.result_metas()
        if signature is not None and signature.shape_arg is not None:
            at, described = signature.shape_arg, metas[signature.shape_result]
            if described is not None:
                args = (*args[:at], described.shape, *args[at + 1 :])
        if not isinstance(node.meta, tuple):
            return (self.emit(node.op, args, metas[0], kwargs, name=node.name),)
        whole = self.emit(node.op, args, metas, kwargs, name=node.name)
        return tuple(
            None if meta is None else self.item(whole, index) for index, meta in enumerate(metas)
        )


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """What a lowering may ask about the operator that it emits (the protocol ``LowerContext``)."""

    emitter: Emitter
    node: Node
    signature: OpSignature | None
    strategies: tuple[AxisStrategy | None, ...]
    operand_metas: tuple[TensorMeta, ...]

    def emit(
        self, op: str, args: tuple[Arg, ...], meta: Meta, kwargs: tuple[tuple[str, Arg], ...] = ()
    ) -> Ref:
        """Append one local node."""
        return self.emitter.emit(op, args, meta, kwargs)

    def item(self, ref: Ref, index: int) -> Ref:
        """Result ``index`` of an operator with several results."""
        return self.emitter.item(ref, index)

    def coord(self, axis: str) -> Ref:
        """The rank's coordinate along an axis."""
        return self.emitter.coord(axis)

    def axis_size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.emitter.axis_size(axis)

    def meta(self, ref: Ref) -> TensorMeta:
        """Local shape and dtype of a value."""
        return self.emitter.meta(ref)

    def operand_layout(self, index: int) -> Layout:
        """Layout of an operand over the emitter's axes."""
        return tuple(R if s is None else s.inputs[index] for s in self.strategies)

    def result_layout(self, index: int) -> Layout:
        """Layout of a result over the emitter's axes."""
        return tuple(R if s is None else s.outputs[index] for s in self.strategies)

    def operand_axes(self, index: int, dim: int) -> tuple[str, ...]:
        """Axes that shard a dim of an operand, outermost first."""
        layout = self.operand_layout(index)
        return tuple(a for a, p in zip(self.emitter.axes, layout, strict=True) if p == Shard(dim))

    def result_axes(self, index: int, dim: int) -> tuple[str, ...]:
        """Axes that shard a dim of a result, outermost first."""
        layout = self.result_layout(index)
        return tuple(a for a, p in zip(self.emitter.axes, layout, strict=True) if p == Shard(dim))

    def operand_rows(self, index: int) -> tuple[tuple[str, Routed], ...]:
        """Axes whose ranks have rows of their own of an operand, and of which form."""
        return self._rows(self.operand_layout(index))

    def result_rows(self, index: int) -> tuple[tuple[str, Routed], ...]:
        """Axes whose ranks have rows of their own of a result, and of which form."""
        return self._rows(self.result_layout(index))

    def _rows(self, layout: Layout) -> tuple[tuple[str, Routed], ...]:
        pairs = zip(self.emitter.axes, layout, strict=True)
        return tuple((axis, p) for axis, p in pairs if isinstance(p, Routed))

    def global_meta(self, index: int) -> TensorMeta:
        """True global shape and dtype of an operand."""
        return self.operand_metas[index]

    def result_metas(self) -> tuple[TensorMeta | None, ...]:
        """Local metas of the results in the chosen layouts."""
        return tuple(
            None
            if meta is None
            else TensorMeta(
                local_shape(meta.shape, self.result_layout(i), self.emitter.sizes), meta.dtype
            )
            for i, meta in enumerate(self.node.metas())
        )

    def masked(self, operands: list[Ref]) -> list[Ref]:
        """Operands with the padding of reduced factors neutralised.

        Only a factor that a result loses needs it; elsewhere padding stays in the padding.
        """
        signature = self.signature
        if signature is None:
            return operands
        plain = [s for s in self.strategies if s is not None and s.factor and not s.lowering]
        for factor in {s.factor for s in plain}:
            size = signature.sizes[factor]
            axes = tuple(
                a
                for a, s in zip(self.emitter.axes, self.strategies, strict=True)
                if s is not None and s.factor == factor
            )
            parts = 1
            for axis in axes:
                parts *= self.axis_size(axis)
            if size % parts == 0 or not _is_lost(signature, factor):
                continue
            for index, dims in enumerate(signature.inputs):
                for dim, factors in enumerate(dims or ()):
                    if factors[:1] == (factor,):
                        operands[index] = self.emitter.mask(
                            operands[index], dim, axes, size, signature.pad_fill
                        )
        return operands


def _dims(placements: Iterable[Placement]) -> set[int]:
    return {p.dim for p in placements if isinstance(p, Shard)}


def _changing_levels(current: Layout, target: Layout) -> set[int]:
    """Axes to undo: those that change, and those nested in a dim that an outer axis changes."""
    changing: set[int] = set()
    for level, (have, want) in enumerate(zip(current, target, strict=True)):
        outer = _dims(p for o in changing for p in (current[o], target[o]))
        if have != want or (isinstance(have, Shard) and have.dim in outer):
            changing.add(level)
    return changing


def _is_lost(signature: OpSignature, factor: str) -> bool:
    return any(
        dims is not None and all(factor not in factors for factors in dims)
        for dims in signature.outputs
    )


def _resized(meta: TensorMeta, dim: int, size: int) -> TensorMeta:
    return TensorMeta((*meta.shape[:dim], size, *meta.shape[dim + 1 :]), meta.dtype)
