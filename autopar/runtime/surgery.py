"""Put a rank's parameters and buffers into the user's module, and whole fakes back for capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import ConfigError
from autopar.ir.graph import Part, TensorMeta
from autopar.plan.types import MeshShape
from autopar.runtime.materialise import InitialValues, Slot, Tied, find_tensors
from autopar.runtime.parameters import (
    ParameterStore,
    StoredParameter,
    adopt_parameter,
    store_parameter,
)
from autopar.runtime.pieces import Composition, compositions
from autopar.runtime.place import Place
from autopar.sharding.placement import R
from autopar.sharding.programs import AXES, LocalPrograms, ParamSpec


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """The places of one tensor and a stand-in of its true shape on the meta device."""

    slots: tuple[Slot, ...]
    stand_in: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """What lives in the module on this rank.

    Attributes:
        store: Parameters of this rank's own stages.
        buffers: Buffers by first name, whole.
        names: First name of every tensor of the model -> all its names.
        saved_order: First names of the buffers that belong into a state dict.
        buffer_metas: Shape and dtype of every buffer of the model by first name.
    """

    store: ParameterStore
    buffers: Mapping[str, torch.Tensor]
    names: Mapping[str, tuple[str, ...]]
    saved_order: tuple[str, ...]
    buffer_metas: Mapping[str, TensorMeta]
    skeletons: tuple[_Skeleton, ...]

    @contextlib.contextmanager
    def whole_shapes(self) -> Iterator[None]:
        """Let the module have all its tensors, on the meta device, while the body runs."""
        before = [[slot.table[slot.attribute] for slot in s.slots] for s in self.skeletons]
        for skeleton in self.skeletons:
            for slot in skeleton.slots:
                slot.put(skeleton.stand_in)
        try:
            yield
        finally:
            for skeleton, tensors in zip(self.skeletons, before, strict=True):
                for slot, tensor in zip(skeleton.slots, tensors, strict=True):
                    slot.put(tensor)


def move_in(
    model: torch.nn.Module,
    local: LocalPrograms,
    parts: Mapping[str, Part],
    mesh_shape: MeshShape,
    mesh: DeviceMesh | None,
    place: Place,
    *,
    seed: int,
    given: Mapping[str, torch.Tensor] | None,
) -> tuple[Residents, dict[str, torch.nn.Parameter]]:
    """Replace the module's tensors by this rank's.

    Parameters and buffers of other ranks' stages leave their names behind with None, so that they
    are not listed. Collective where the ranks' initial values differ.

    Args:
        model: The user's module; changed.
        local: Says who owns what, in which layout.
        parts: Slices of parameters that the programs read.
        mesh_shape: Ranks per axis.
        mesh: Mesh (dp, tp) of this rank's stages; None for one device and on idle ranks.
        place: This process.
        seed: Seed of tensors on the meta device.
        given: Whole tensors by name.

    Returns:
        What lives in the module now, and the user's parameters that gave way, by first name.
    """
    parameters = find_tensors(model, parameters=True)
    buffers = find_tensors(model, parameters=False)
    skeletons = tuple(
        _Skeleton(tied.slots, _stand_in(tied.tensor))
        for tied in (*parameters.values(), *buffers.values())
    )
    values = InitialValues(
        model, {**parameters, **buffers}, seed=seed, given=given,
        distributed=place.is_distributed,
    )  # fmt: skip
    is_idle = place.rank >= mesh_shape.num_ranks
    pp, dp, tp = (-1, 0, 0) if is_idle else mesh_shape.coordinate(place.rank)
    found = compositions(local, parts, {name: _meta(t.tensor) for name, t in parameters.items()})
    whole_ones = {name: _composition(name, tied, found) for name, tied in parameters.items()}
    stored: list[StoredParameter] = []
    replaced: dict[str, torch.nn.Parameter] = {}
    pending: list[tuple[Tied, torch.Tensor | None]] = []
    for name, tied in parameters.items():
        composition = whole_ones[name]
        spec = composition.spec
        is_own = mesh_shape.pipeline_rank(spec.owner) == pp
        old = tied.tensor
        assert isinstance(old, torch.nn.Parameter)
        if is_own and mesh is None and not old.is_meta and _is_kept(old, place, given):
            stored.append(adopt_parameter(composition, old))
            continue
        item = None
        if is_own or values.is_collective(name):
            whole = values.whole(name)
            if is_own:
                item = store_parameter(
                    composition, whole, axis_sizes=local.axis_sizes, coordinate=(dp, tp), mesh=mesh,
                    device=place.device,
                )  # fmt: skip
                item.parameter.__dict__.update(old.__dict__)
                stored.append(item)
        replaced[name] = old
        pending.append((tied, None if item is None else item.parameter))
    kept: dict[str, torch.Tensor] = {}
    for name, tied in buffers.items():
        tensor = _buffer(name, tied, local, mesh_shape, pp, values, place)
        if tensor is not None:
            kept[name] = tensor
        pending.append((tied, tensor))
    # only now: initialisers of tensors on the meta device must not see their finished neighbours
    for tied, tensor in pending:
        for slot in tied.slots:
            slot.put(tensor)
    residents = Residents(
        store=ParameterStore(stored, {n: c.spec for n, c in whole_ones.items()}),
        buffers=kept,
        names={name: tied.names for name, tied in (*parameters.items(), *buffers.items())},
        saved_order=tuple(name for name, tied in buffers.items() if _is_saved(tied)),
        buffer_metas={name: _meta(tied.tensor) for name, tied in buffers.items()},
        skeletons=skeletons,
    )
    return residents, replaced


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _is_saved(tied: Tied) -> bool:
    slot = tied.slots[0]
    return slot.attribute not in slot.module._non_persistent_buffers_set


def _is_kept(
    old: torch.nn.Parameter, place: Place, given: Mapping[str, torch.Tensor] | None
) -> bool:
    return old.device == place.device and not given and old.is_contiguous()


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def _composition(name: str, tied: Tied, found: Mapping[str, Composition]) -> Composition:
    """The parameter's; one that no program reads rests whole on the first stage."""
    if name in found:
        return found[name]
    tensor = tied.tensor
    whole = (R,) * len(AXES)
    spec = ParamSpec(
        name=name,
        aliases=tied.names[1:],
        meta=_meta(tensor),
        requires_grad=tensor.requires_grad,
        owner=0,
        stages=(0,),
        storage=whole,
        compute=whole,
    )
    return Composition(spec, ((spec, None),), is_joint=True)


def _buffer(
    name: str,
    tied: Tied,
    local: LocalPrograms,
    mesh_shape: MeshShape,
    pp: int,
    values: InitialValues,
    place: Place,
) -> torch.Tensor | None:
    stages = local.buffer_stages.get(name, ())
    is_own = not stages or any(mesh_shape.pipeline_rank(stage) == pp for stage in stages)
    if not stages and tied.tensor.is_meta:
        try:
            return values.whole(name).to(place.device)
        except ConfigError:
            return tied.tensor  # nothing reads it
    if not is_own and not values.is_collective(name):
        return None
    whole = values.whole(name)
    if not is_own:
        return None
    old = tied.tensor
    if old.device == place.device:  # keep the object: the user may hold it
        if whole.data_ptr() != old.data_ptr():
            old.copy_(whole)
        return old
    return whole.to(place.device).clone()
