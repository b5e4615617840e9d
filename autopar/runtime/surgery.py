"""Put a rank's parameters and buffers into the user's module, and whole fakes back for capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture.torch_ops import torch_dtype
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
        own_dtypes: Dtype that each parameter had in the user's model, which state dicts keep.
    """

    store: ParameterStore
    buffers: Mapping[str, torch.Tensor]
    names: Mapping[str, tuple[str, ...]]
    saved_order: tuple[str, ...]
    buffer_metas: Mapping[str, TensorMeta]
    own_dtypes: Mapping[str, torch.dtype]
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
    found = compositions(local, parts, {name: _meta(t.tensor) for name, t in parameters.items()})
    whole_ones = {name: _composition(name, tied, found) for name, tied in parameters.items()}
    movers = _Movers(values, local, mesh_shape, mesh, place, is_given=bool(given))
    stored: list[StoredParameter] = []
    replaced: dict[str, torch.nn.Parameter] = {}
    pending: list[tuple[Tied, torch.Tensor | None]] = []
    for name, tied in parameters.items():
        item = movers.parameter(name, tied.tensor, whole_ones[name])
        if item is not None:
            stored.append(item)
        if item is None or item.parameter is not tied.tensor:
            assert isinstance(tied.tensor, torch.nn.Parameter)
            replaced[name] = tied.tensor
            pending.append((tied, None if item is None else item.parameter))
    kept: dict[str, torch.Tensor] = {}
    for name, tied in buffers.items():
        tensor = movers.buffer(name, tied.tensor)
        if tensor is not None:
            kept[name] = tensor
        pending.append((tied, tensor))
    # only now: initialisers of tensors on the meta device must not see their finished neighbours
    for tied, tensor in pending:
        for slot in tied.slots:
            slot.put(tensor)
    names = {name: tied.names for name, tied in (*parameters.items(), *buffers.items())}
    residents = Residents(
        store=ParameterStore(stored, {n: c.spec for n, c in whole_ones.items()}, names),
        buffers=kept,
        names=names,
        saved_order=tuple(name for name, tied in buffers.items() if _is_saved(tied)),
        buffer_metas={name: _meta(tied.tensor) for name, tied in buffers.items()},
        own_dtypes={name: tied.tensor.dtype for name, tied in parameters.items()},
        skeletons=skeletons,
    )
    return residents, replaced


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _is_saved(tied: Tied) -> bool:
    slot = tied.slots[0]
    return slot.attribute not in slot.module._non_persistent_buffers_set


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


class _Movers:
    """Makes this rank's tensors, one by one, in the model's order on every rank."""

    def __init__(
        self,
        values: InitialValues,
        local: LocalPrograms,
        mesh_shape: MeshShape,
        mesh: DeviceMesh | None,
        place: Place,
        *,
        is_given: bool,
    ) -> None:
        is_idle = place.rank >= mesh_shape.num_ranks
        coordinate = (-1, 0, 0) if is_idle else mesh_shape.coordinate(place.rank)
        self._pp, self._dp, self._tp = coordinate
        self._values = values
        self._local = local
        self._mesh_shape = mesh_shape
        self._mesh = mesh
        self._place = place
        self._is_given = is_given

    def parameter(
        self, name: str, old: torch.Tensor, composition: Composition
    ) -> StoredParameter | None:
        """The parameter as it is stored here; None if another stage owns it."""
        is_own = self._mesh_shape.pipeline_rank(composition.spec.owner) == self._pp
        if is_own and self._is_kept(old, composition.spec.meta.dtype):
            assert isinstance(old, torch.nn.Parameter)
            return adopt_parameter(composition, old)
        if not is_own and not self._values.is_collective(name):
            return None
        whole = self._values.whole(name)
        if not is_own:
            return None
        item = store_parameter(
            composition,
            whole,
            axis_sizes=self._local.axis_sizes,
            coordinate=(self._dp, self._tp),
            mesh=self._mesh,
            device=self._place.device,
        )
        item.parameter.__dict__.update(old.__dict__)
        return item

    def _is_kept(self, old: torch.Tensor, dtype: str) -> bool:
        """Whether one device goes on with the user's own parameter."""
        is_alone = self._mesh is None and not self._is_given
        fits = old.device == self._place.device and old.dtype == torch_dtype(dtype)
        return is_alone and fits and old.is_contiguous()

    def buffer(self, name: str, old: torch.Tensor) -> torch.Tensor | None:
        """The whole buffer; None if only other stages read it."""
        stages = self._local.buffer_stages.get(name, ())
        if not stages and old.is_meta:
            try:
                return self._values.whole(name).to(self._place.device)
            except ConfigError:
                return old  # nothing reads it
        own = {s for s in stages if self._mesh_shape.pipeline_rank(s) == self._pp}
        is_own = bool(own) or not stages
        if not is_own and not self._values.is_collective(name):
            return None
        whole = self._values.whole(name)
        if not is_own:
            return None
        if old.device == self._place.device:  # keep the object: the user may hold it
            if whole.data_ptr() != old.data_ptr():
                old.copy_(whole)
            return old
        return whole.to(self._place.device).clone()
