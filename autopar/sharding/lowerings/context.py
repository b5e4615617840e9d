"""What a lowering may ask and emit, and the index arithmetic that lowerings share.

A lowering is the local form of an operator under a special split: local nodes with collectives,
in place of the operator on local shapes. It is rank-agnostic: what depends on the rank is computed
from coordinates, which are integer inputs of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Protocol, TypeAlias

from autopar.ir.graph import Arg, Meta, Node, Ref, TensorMeta
from autopar.sharding.placement import Routed, shard_size


class LowerContext(Protocol):
    """The operator at hand, and the program that grows.

    Operands and results are numbered as in ``Node.refs()`` and ``Node.metas()``.
    """

    def emit(
        self, op: str, args: tuple[Arg, ...], meta: Meta, kwargs: tuple[tuple[str, Arg], ...] = ()
    ) -> Ref:
        """Append one local node; ``meta`` is local, None for an integer."""

    def item(self, ref: Ref, index: int) -> Ref:
        """Result ``index`` of a node with several results."""

    def coord(self, axis: str) -> Ref:
        """The rank's coordinate along an axis, an integer."""

    def axis_size(self, axis: str) -> int:
        """Ranks along an axis."""

    def meta(self, ref: Ref) -> TensorMeta:
        """Local shape and dtype of a value."""

    def global_meta(self, index: int) -> TensorMeta:
        """True global shape and dtype of an operand."""

    def result_metas(self) -> tuple[TensorMeta | None, ...]:
        """Local metas of the results in the chosen layouts."""

    def operand_axes(self, index: int, dim: int) -> tuple[str, ...]:
        """Axes that shard a dim of an operand, outermost first."""

    def result_axes(self, index: int, dim: int) -> tuple[str, ...]:
        """Axes that shard a dim of a result, outermost first."""

    def operand_rows(self, index: int) -> tuple[tuple[str, Routed], ...]:
        """Axes whose ranks have rows of their own of an operand, and of which form."""

    def result_rows(self, index: int) -> tuple[tuple[str, Routed], ...]:
        """Axes whose ranks have rows of their own of a result, and of which form."""


Lowering: TypeAlias = Callable[
    [LowerContext, Node, list[Ref], tuple[str, ...]], tuple[Ref | None, ...]
]
"""``lower(ctx, node, operands, axes)``: emits the local form of ``node``.

``operands`` are local values in the layouts of the strategies; ``axes`` are those whose strategy
has this lowering, outermost first. Returns one reference per result, None for a missing one.
"""


def local_args(node: Node, operands: Sequence[Ref]) -> list[Arg]:
    """Positional arguments of ``node`` with its references replaced by local values."""
    supply = iter(operands)
    return list(node.map_refs(lambda _: next(supply))[0])


def block_start(ctx: LowerContext, axes: Sequence[str], size: int) -> Arg:
    """Global index of the first element of the rank's block of a dim: 0, or an integer value.

    Args:
        ctx: The context.
        axes: Axes that shard the dim, outermost first.
        size: True global size of the dim.
    """
    if not axes:
        return 0
    coords = tuple(ctx.coord(axis) for axis in axes)
    parts = tuple(ctx.axis_size(axis) for axis in axes)
    return ctx.emit("local.start", (coords, parts, size), None)


def mask_padding(
    ctx: LowerContext, ref: Ref, dim: int, *, axes: Sequence[str], size: int, fill: float
) -> Ref:
    """``ref`` with the padding of a sharded dim overwritten; ``ref`` itself if there is none."""
    parts = tuple(ctx.axis_size(axis) for axis in axes)
    if block_size(size, parts) * prod(parts) == size:
        return ref
    coords = tuple(ctx.coord(axis) for axis in axes)
    return ctx.emit("local.mask", (ref, dim, coords, parts, size, fill), ctx.meta(ref))


def block_size(size: int, parts: Sequence[int]) -> int:
    """Size of the blocks, padding included, after nested splits.

    >>> block_size(10, (2, 2))
    3
    """
    for count in parts:
        size = shard_size(size, count)
    return size


def all_reduce(ctx: LowerContext, ref: Ref, op: str, axes: Sequence[str]) -> Ref:
    """``ref`` reduced over every axis of ``axes``."""
    for axis in axes:
        ref = ctx.emit("comm.all_reduce", (ref, op, axis), ctx.meta(ref))
    return ref


def reduced(meta: TensorMeta, dims: Sequence[int]) -> TensorMeta:
    """Meta with ``dims`` of size one."""
    shape = tuple(1 if i in dims else size for i, size in enumerate(meta.shape))
    return TensorMeta(shape, meta.dtype)
