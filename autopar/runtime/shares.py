"""A rank's share of a global batch: only the rows that its stages read.

A call takes the global batch or, from :class:`~autopar.runtime.loading.ShardLoader`, shares of it.
A share is a tensor of the *global* shape that holds some rows only. So it has the place of the
whole tensor everywhere shapes are looked at, and whoever would compute on it is told that most of
it is not there. It knows for which plan and rank it was made and of which batch it is a part: a
call never has to guess what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from autopar.errors import InputError
from autopar.ir.graph import InputKind
from autopar.plan.types import MeshShape
from autopar.runtime.blocks import take_block
from autopar.runtime.parameters import block_at
from autopar.sharding.placement import Layout, R, Shard
from autopar.sharding.programs import LocalPrograms, TensorSpec
from autopar.torch_compat import wrapper_tensor

_MOVES = frozenset({"_to_copy", "detach", "alias", "clone", "_pin_memory"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOrigin:
    """Where a share comes from.

    Attributes:
        plan: Hash of the plan whose rows it has.
        rank: The rank that it was made for.
        batch: What identifies the global batch: equal on all ranks that hold parts of one batch.
    """

    plan: str
    rank: int
    batch: str


class LocalShare(torch.Tensor):
    """Some rows of a global tensor; its shape is the global one.

    It can be moved, pinned and given to a compiled model. Anything else raises: it would see this
    rank's rows alone.
    """

    _local: torch.Tensor
    _rows: tuple[int, ...]
    _dim: int
    _origin: ShareOrigin

    def __new__(
        cls,
        local: torch.Tensor,
        rows: Sequence[int],
        dim: int,
        size: int,
        origin: ShareOrigin,
    ) -> LocalShare:
        """Wrap ``local``.

        Args:
            local: The rows, along ``dim`` in the order of ``rows``.
            rows: Their positions in the global batch, ascending.
            dim: Batch dim.
            size: Rows of the global batch.
            origin: For whom, and of which batch.
        """
        shape = list(local.shape)
        if shape[dim] != len(rows):
            raise InputError(
                f"a share of {len(rows)} rows has {shape[dim]} in dim {dim} of {list(local.shape)};"
                " give one row for each"
            )
        shape[dim] = size
        share: LocalShare = wrapper_tensor(cls, shape, local.dtype, local.device)
        share._local, share._rows, share._dim = local, tuple(rows), dim
        share._origin = origin
        return share

    @property
    def rows(self) -> tuple[int, ...]:
        """Positions of its rows in the global batch, ascending."""
        return self._rows

    @property
    def batch_dim(self) -> int:
        """The dim along which the global batch was cut."""
        return self._dim

    @property
    def origin(self) -> ShareOrigin:
        """For which plan and rank it was made, and of which batch."""
        return self._origin

    def local_rows(self) -> torch.Tensor:
        """The rows that are here, as a plain tensor."""
        return self._local

    def __repr__(self) -> str:  # type: ignore[override]
        """Such as ``LocalShare(4 of 8 rows of int64[8, 16])``."""
        shape = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        return f"LocalShare({len(self._rows)} of {self.shape[self._dim]} rows of {shape})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as Any
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Moves act on the rows; everything else is refused."""
        share = args[0] if args else None
        if func.overloadpacket.__name__ not in _MOVES or not isinstance(share, LocalShare):
            found = next((a for a in args if isinstance(a, LocalShare)), share)
            raise InputError(
                f"{func} on {found!r}: a share has only the rows that this rank needs, and can "
                "only be moved and given to the compiled model; compute such values in the dataset "
                "or in the model, or take the plain loader, which gives the global batch"
            )
        moved = func(share._local, *args[1:], **(kwargs or {}))
        return LocalShare(moved, share._rows, share._dim, share.shape[share._dim], share._origin)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor of the same global form, to capture with; a share's values are elsewhere."""
    if not isinstance(tensor, LocalShare):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """What is here of a tensor: the rows of a share, else all of it."""
    return tensor.local_rows() if isinstance(tensor, LocalShare) else tensor


def needed_rows(local: LocalPrograms, mesh: MeshShape, rank: int, size: int) -> tuple[int, ...]:
    """The rows of a global batch that a rank's programs read, ascending.

    A batch that is not cut as planned, since it is larger or does not divide, may be read anywhere:
    how it is cut is known when it is called with.

    Args:
        local: The programs in force.
        mesh: Ranks per axis.
        rank: Global rank; one beyond the mesh reads nothing.
        size: Rows of the global batch.
    """
    if rank >= mesh.num_ranks:
        return ()
    pp, dp, tp = mesh.coordinate(rank)
    found: set[int] = set()
    for name, spec in local.users.items():
        own = [s for s in local.user_stages.get(name, ()) if mesh.pipeline_rank(s) == pp]
        if not own:
            continue
        dim = _batch_dim(spec)
        if dim is not None and (size > spec.meta.shape[dim] or size % _num_blocks(spec, local)):
            return tuple(range(size))
        layout = _row_layout(spec.layout, dim)
        for microbatch in range(local.axis_sizes[0]):
            found.update(_rows_at(size, layout, local.axis_sizes, (microbatch, dp, tp)))
        if any(_reads(local, stage, name) for stage in own):
            found.update(_rows_at(size, layout[1:], local.axis_sizes[1:], (dp, tp)))
    return tuple(sorted(found))


def _reads(local: LocalPrograms, stage: int, name: str) -> bool:
    """Whether the stage's prologue, which cuts the whole step's rows over dp alone, reads it."""
    inputs = local.stages[stage].prologue.inputs
    return any(i.kind is InputKind.USER and i.target == name for i in inputs)


def _batch_dim(spec: TensorSpec) -> int | None:
    """The dim that the data axes cut, or None."""
    return next((p.dim for p in spec.layout[:2] if isinstance(p, Shard)), None)


def _num_blocks(spec: TensorSpec, local: LocalPrograms) -> int:
    """Parts that the data axes cut the batch dim into."""
    dim = _batch_dim(spec)
    cuts = zip(spec.layout[:2], local.axis_sizes[:2], strict=True)
    return prod(parts for placement, parts in cuts if placement == Shard(dim or 0))


def _row_layout(layout: Layout, dim: int | None) -> Layout:
    """How rows alone are placed: cuts of other dims need every row."""
    return tuple(Shard(0) if isinstance(p, Shard) and p.dim == dim else R for p in layout)


def _rows_at(
    size: int, layout: Layout, axis_sizes: Sequence[int], coordinate: Sequence[int]
) -> range:
    block = block_at((size,), layout, axis_sizes, coordinate)
    return range(block.start[0], block.start[0] + block.size[0])


def take_share(
    name: str,
    share: LocalShare,
    layout: Layout,
    coordinate: Sequence[int],
    axis_sizes: Sequence[int],
) -> torch.Tensor:
    """What :func:`~autopar.runtime.blocks.take_block` would cut out of the whole tensor.

    Args:
        name: Path of the call argument, for messages.
        share: This rank's rows of it.
        layout: One placement per axis.
        coordinate: Position along each axis.
        axis_sizes: Size of each axis.

    Raises:
        InputError: A row is not there.
    """
    dim, size = share.batch_dim, share.shape[share.batch_dim]
    rows = _row_layout(layout, dim)
    wanted = _rows_at(size, rows, axis_sizes, coordinate)
    at = {row: position for position, row in enumerate(share.rows)}
    missing = [row for row in wanted if row not in at]
    if missing:
        raise InputError(
            f"call argument {name!r} needs row {missing[0]} of {size} here, the share has "
            f"{len(share.rows)} other rows: this call cuts its batch in another way than the "
            "planned one; give it the global batch, or compile the model for this call"
        )
    local = share.local_rows()
    part = local.narrow(dim, at[wanted[0]] if len(wanted) else 0, len(wanted))
    for placement, parts in zip(rows, axis_sizes, strict=True):
        if isinstance(placement, Shard):
            size = -(-size // parts)
    if part.shape[dim] < size:
        shape = list(part.shape)
        shape[dim] = size
        padded = part.new_zeros(shape)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        part = padded
    others = tuple(R if isinstance(p, Shard) and p.dim == dim else p for p in layout)
    return take_block(part, others, coordinate, axis_sizes)


def check_origin(tensors: Mapping[str, torch.Tensor], *, plan: str, rank: int) -> None:
    """Refuse shares that were made for another plan or rank.

    Raises:
        InputError: Names the first one.
    """
    for path, tensor in tensors.items():
        if not isinstance(tensor, LocalShare):
            continue
        origin = tensor.origin
        if origin.plan != plan or origin.rank != rank:
            raise InputError(
                f"input {path!r} is a share made for rank {origin.rank} under plan "
                f"{origin.plan[:12]}, this is rank {rank} under plan {plan[:12]}; make the loader "
                "by autopar.shard_loader(loader, model) with the model that is called"
            )
