"""Parameters at rest: ``DTensor`` views of the padded buffers that the programs read.

A stored parameter has three faces. The *padded* buffer has the local shape of the storage layout,
the same on every rank, and is what the unshard program reads. The *view* is the part of it that
holds true elements, by ``torch.chunk``'s rule. The *parameter* is a ``DTensor`` of the true shape
whose local tensor is the view: what the user, the optimizer and checkpoints see. Padding is zero
and never leaves this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.distributed.tensor.placement_types import Placement as DPlacement

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import PassError
from autopar.ir.graph import Part
from autopar.plan.types import DP_AXIS, TP_AXIS
from autopar.runtime.pieces import Composition
from autopar.sharding.placement import Layout, Shard, local_shape, shard_size
from autopar.sharding.programs import ParamSpec

_STORAGE_AXES = 2  # a parameter at rest is spread over dp and tp; mb is time


@dataclass(frozen=True, slots=True)
class Block:
    """Where a rank's true elements of a tensor lie: ``start`` and ``size`` per dim, in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The block as a view of the whole tensor."""
        return whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))]

    def inside(self, padded: torch.Tensor) -> torch.Tensor:
        """The true elements as a view of the padded local tensor."""
        return padded[tuple(slice(0, n) for n in self.size)]


def block_at(
    shape: Sequence[int], layout: Layout, sizes: Sequence[int], coordinate: Sequence[int]
) -> Block:
    """The block of a tensor that a coordinate owns.

    Args:
        shape: True shape.
        layout: One placement per axis.
        sizes: Size of each axis.
        coordinate: Position on each axis.

    >>> from autopar.sharding.placement import Shard
    >>> block_at((5, 3), (Shard(0),), (2,), (1,))
    Block(start=(3, 0), size=(2, 3))
    """
    start, size = [0] * len(shape), list(shape)
    for placement, parts, at in zip(layout, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            step = shard_size(size[dim], parts)
            offset = min(at * step, size[dim])
            start[dim] += offset
            size[dim] = min(step, size[dim] - offset)
    return Block(tuple(start), tuple(size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What programs read of a parameter under one name.

    Attributes:
        spec: Layout, and the name that programs use.
        part: The slice; None for the whole parameter.
        padded: Its buffer in storage layout.
        block: The part of the slice that this rank holds.
    """

    spec: ParamSpec
    part: Part | None
    padded: torch.Tensor
    block: Block


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParameter:
    """One parameter of a stage that this rank runs; see the module's text for the three faces.

    Attributes:
        block: The part of the whole tensor that this rank holds.
        counted: Whether this rank counts it in sums over ranks: the first of its replicas.
        pieces: What programs read of it.
        is_joint: Whether the pieces' buffers are views of ``padded``.
    """

    spec: ParamSpec
    padded: torch.Tensor
    parameter: torch.nn.Parameter
    block: Block
    counted: bool
    pieces: tuple[Piece, ...]
    is_joint: bool

    @property
    def view(self) -> torch.Tensor:
        """The true elements of the padded buffer."""
        return self.block.inside(self.padded)

    def wrap(self, padded: torch.Tensor) -> torch.Tensor:
        """A padded local tensor (a gradient) in the form of the parameter."""
        if not isinstance(self.parameter, DTensor):
            return padded
        return as_dtensor(self.block.inside(padded), self.spec, self.parameter.device_mesh)

    def refresh(self) -> None:
        """Bring the buffers that programs read up to date.

        Collective over the stage's mesh where pieces have buffers of their own.
        """
        local = local_part(self.parameter)
        if local.numel() and local.data_ptr() != self.padded.data_ptr():
            self.view.copy_(local)  # somebody gave the parameter other memory
        if self.is_joint:
            return
        whole = whole_tensor(self.parameter.detach())
        for piece in self.pieces:
            piece.block.inside(piece.padded).copy_(piece.block.of(_slice(whole, piece.part)))

    def join(self, found: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """The gradient in the parameter's form, from those of its pieces; None without any.

        Collective over the stage's mesh where pieces have buffers of their own.

        Args:
            found: Padded gradients by the name of the piece; those of this parameter are taken out.
        """
        if len(self.pieces) == 1:
            only = found.pop(self.pieces[0].spec.name, None)
            return None if only is None else self.wrap(only)
        if not any(piece.spec.name in found for piece in self.pieces):
            return None
        gradients = [
            found.pop(p.spec.name) if p.spec.name in found else torch.zeros_like(p.padded)
            for p in self.pieces
        ]
        part = self.pieces[0].part
        assert part is not None
        if self.is_joint:
            return self.wrap(torch.cat(gradients, part.dim))
        assert isinstance(self.parameter, DTensor)
        mesh = self.parameter.device_mesh
        wholes = [
            as_dtensor(piece.block.inside(gradient), piece.spec, mesh).full_tensor()
            for piece, gradient in zip(self.pieces, gradients, strict=True)
        ]
        own = self.block.of(torch.cat(wholes, part.dim)).clone()
        return as_dtensor(own, self.spec, mesh)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``, sharing memory; a plain tensor itself, detached."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a ``DTensor``, collective over its mesh; a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _slice(whole: torch.Tensor, part: Part | None) -> torch.Tensor:
    return whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start)


def stage_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Mesh (dp, tp) of the stages of this rank's pipeline rank."""
    return mesh[DP_AXIS, TP_AXIS]


def device_placements(layout: Layout) -> tuple[DPlacement, ...]:
    """Placements in torch's types of a storage layout (its axes dp and tp)."""
    return tuple(DShard(p.dim) if isinstance(p, Shard) else DReplicate() for p in layout)


def as_dtensor(local: torch.Tensor, spec: ParamSpec, mesh: DeviceMesh) -> DTensor:
    """``local`` as this rank's part of a tensor of the parameter's true shape."""
    shape = torch.Size(spec.meta.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local,
        mesh,
        device_placements(spec.storage[-_STORAGE_AXES:]),
        run_check=False,
        shape=shape,
        stride=stride,
    )


class ParameterStore:
    """This rank's parameters by first name, in the model's order.

    Args:
        stored: The parameters of this rank's own stages; empty on idle ranks.
        every: Specs of all parameters of the model, the same on all ranks, as they rest.
        names: First name of a tensor -> all its names.
    """

    def __init__(
        self,
        stored: Iterable[StoredParameter],
        every: Mapping[str, ParamSpec],
        names: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._stored = {item.spec.name: item for item in stored}
        self.every = dict(every)
        self.names = dict(names)

    def __iter__(self) -> Iterator[StoredParameter]:
        return iter(self._stored.values())

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, name: str) -> StoredParameter | None:
        """The parameter called ``name``, or None if another stage owns it."""
        return self._stored.get(name)

    def storage(self) -> dict[str, torch.Tensor]:
        """Padded buffers under the names that programs read, up to date.

        Every rank of a stage must call it at the same time.
        """
        with torch.no_grad():
            for item in self:
                item.refresh()
        return {piece.spec.name: piece.padded for item in self for piece in item.pieces}

    def trained(self) -> list[StoredParameter]:
        """Those that take gradients, in the model's order."""
        return [item for item in self if item.parameter.requires_grad]

    def by_identity(self) -> dict[int, str]:
        """``id`` of each parameter object -> first name."""
        return {id(item.parameter): name for name, item in self._stored.items()}


def store_parameter(
    composition: Composition,
    fill: torch.Tensor,
    *,
    axis_sizes: tuple[int, int, int],
    coordinate: tuple[int, int],
    mesh: DeviceMesh | None,
    device: torch.device,
) -> StoredParameter:
    """Slice a whole tensor and make the parameter of it.

    Args:
        composition: The parameter, and what programs read of it.
        fill: The whole tensor, anywhere; only this rank's block is copied.
        axis_sizes: Sizes of (mb, dp, tp).
        coordinate: This rank's (dp, tp).
        mesh: Mesh (dp, tp) of the stage; None for one device without a process group.
        device: Where the buffer lives.
    """
    spec = composition.spec
    sizes = axis_sizes[-_STORAGE_AXES:]
    layout = spec.storage[-_STORAGE_AXES:]
    _check_storable(spec, sizes)
    block = block_at(spec.meta.shape, layout, sizes, coordinate)
    padded = torch.zeros(
        local_shape(spec.meta.shape, layout, sizes),
        dtype=torch_dtype(spec.meta.dtype),
        device=device,
    )
    with torch.no_grad():
        block.inside(padded).copy_(block.of(fill))
        data = padded if mesh is None else as_dtensor(block.inside(padded), spec, mesh)
    replicas = [at for p, at in zip(layout, coordinate, strict=True) if not isinstance(p, Shard)]
    return StoredParameter(
        spec=spec,
        padded=padded,
        parameter=torch.nn.Parameter(data, requires_grad=spec.requires_grad),
        block=block,
        counted=not any(replicas),
        pieces=tuple(
            _piece(composition, index, padded, sizes, coordinate)
            for index in range(len(composition.pieces))
        ),
        is_joint=composition.is_joint,
    )


def _piece(
    composition: Composition,
    index: int,
    padded: torch.Tensor,
    sizes: Sequence[int],
    coordinate: Sequence[int],
) -> Piece:
    spec, part = composition.pieces[index]
    layout = spec.storage[-_STORAGE_AXES:]
    block = block_at(spec.meta.shape, layout, sizes, coordinate)
    if composition.is_joint:
        buffer = _slice(padded, part)
    else:
        shape = local_shape(spec.meta.shape, layout, sizes)
        buffer = torch.zeros(shape, dtype=padded.dtype, device=padded.device)
    return Piece(spec=spec, part=part, padded=buffer, block=block)


def adopt_parameter(composition: Composition, parameter: torch.nn.Parameter) -> StoredParameter:
    """The user's own parameter as it is: one device, so that its identity is kept."""
    shape = tuple(parameter.shape)
    padded = parameter.detach()
    ones = (1,) * _STORAGE_AXES
    return StoredParameter(
        spec=composition.spec,
        padded=padded,
        parameter=parameter,
        block=Block((0,) * len(shape), shape),
        counted=True,
        pieces=tuple(
            _piece(composition, index, padded, ones, (0, 0))
            for index in range(len(composition.pieces))
        ),
        is_joint=True,
    )


def _check_storable(spec: ParamSpec, sizes: Sequence[int]) -> None:
    dims = [p.dim for p in spec.storage[-_STORAGE_AXES:] if isinstance(p, Shard)]
    for dim in {d for d in dims if dims.count(d) > 1}:
        parts = 1
        for size in sizes:
            parts *= size
        if spec.meta.shape[dim] % parts:
            raise PassError(
                f"parameter {spec.name!r}: dim {dim} of {spec.meta} is stored over dp and tp, "
                f"{parts} parts that do not divide it"
            )
