"""Whole tensors out of the ranks' parts, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import ConfigError
from autopar.ir.graph import TensorMeta
from autopar.plan.types import MeshShape
from autopar.runtime.parameters import StoredParameter, local_part, whole_tensor
from autopar.runtime.place import Place
from autopar.runtime.surgery import Residents
from autopar.runtime.writes import take_up_writes
from autopar.sharding.programs import LocalPrograms


class IncompatibleKeys(NamedTuple):
    """Keys that ``load_state_dict`` missed, and those it did not know."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def full_state(
    residents: Residents,
    programs: LocalPrograms,
    mesh: MeshShape,
    place: Place,
    *,
    everywhere: bool = False,
) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by every name, whole, on the CPU of rank 0; else empty.

    Args:
        residents: What this rank holds.
        programs: Say which stages hold a buffer.
        mesh: Ranks per axis.
        place: This process.
        everywhere: Give them to every rank.
    """
    result: dict[str, torch.Tensor] = {}
    for name, value in whole_tensors(residents, programs, mesh, place, everywhere=everywhere):
        result.update(dict.fromkeys(residents.names[name], value))
    return result


def whole_tensors(
    residents: Residents,
    programs: LocalPrograms,
    mesh: MeshShape,
    place: Place,
    *,
    everywhere: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """First name and value of every parameter and saved buffer, one at a time.

    Every rank must iterate to the end; only rank 0 is given something, or all if ``everywhere``.
    """
    take_up_writes(residents)
    for name, spec in residents.store.every.items():
        item = residents.store.get(name)
        whole = None if item is None else _whole(item)
        source = mesh.rank_of(mesh.pipeline_rank(spec.owner), 0, 0)
        value = _arrived(whole, spec.meta, source, place, everywhere=everywhere)
        if value is not None:
            yield name, value.to(residents.own_dtypes[name])
    for name in residents.saved_order:
        stages = programs.buffer_stages.get(name, ())
        source = mesh.rank_of(mesh.pipeline_rank(min(stages)), 0, 0) if stages else 0
        meta = residents.buffer_metas[name]
        held = residents.buffers.get(name)
        value = _arrived(held, meta, source, place, everywhere=everywhere)
        if value is not None:
            yield name, value


def _whole(item: StoredParameter) -> torch.Tensor:
    return whole_tensor(item.parameter.detach())


def _arrived(
    whole: torch.Tensor | None, meta: TensorMeta, source: int, place: Place, *, everywhere: bool
) -> torch.Tensor | None:
    """The tensor of rank ``source`` on the CPU of rank 0, or of all; None elsewhere."""
    if not place.is_distributed:
        return None if whole is None else whole.detach().cpu().clone()
    if everywhere:
        if place.rank == source:
            assert whole is not None
            value = whole.detach().contiguous().clone()
        else:
            value = torch.empty(meta.shape, dtype=torch_dtype(meta.dtype), device=place.device)
        dist.broadcast(value, source)
        return value.cpu()
    if source == 0:
        return None if place.rank or whole is None else whole.detach().cpu().clone()
    if place.rank == source:
        assert whole is not None
        dist.send(whole.contiguous(), 0)
    if place.rank:
        return None
    arrived = torch.empty(meta.shape, dtype=torch_dtype(meta.dtype), device=place.device)
    dist.recv(arrived, source)
    return arrived.cpu()


def keep_own_dtypes(model: torch.nn.Module, residents: Residents) -> None:
    """Have ``model.state_dict()`` give parameters in the dtypes of the user's model.

    Masters of a model in a low precision are float32 and are cast; with ``keep_vars`` they are
    given as they are.
    """
    narrowed = {
        alias: dtype
        for name, dtype in residents.own_dtypes.items()
        if name in residents.store.every
        and torch_dtype(residents.store.every[name].meta.dtype) != dtype
        for alias in residents.names[name]
    }
    if not narrowed:
        return

    def hook(_: torch.nn.Module, found: dict[str, torch.Tensor], prefix: str, __: object) -> None:
        for name, dtype in narrowed.items():
            value = found.get(prefix + name)
            if value is not None and not isinstance(value, torch.nn.Parameter):
                found[prefix + name] = value.to(dtype)

    model.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]


def load_state(
    residents: Residents, given: Mapping[str, torch.Tensor], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Copy this rank's part of ``given`` into its parameters and buffers.

    Returns:
        Missing and unexpected names.

    Raises:
        ConfigError: A shape differs, or names do not match and ``strict`` is set.
    """
    take_up_writes(residents)
    missing, unexpected = check_names(residents, given, strict=strict)  # before any write
    with torch.no_grad():
        for item in residents.store:
            value = _find(residents.names[item.spec.name], given)
            if value is not None:
                _copy(item, value)
        for name in residents.saved_order:
            held = residents.buffers.get(name)
            value = None if held is None else _find(residents.names[name], given)
            if held is not None and value is not None:
                _check_shape(name, value, tuple(held.shape))
                held.copy_(whole_tensor(value))
    return missing, unexpected


def check_names(
    residents: Residents, given: Collection[str], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Missing and unexpected names: of the whole model if anything of another stage is given.

    Raises:
        ConfigError: There are some and ``strict`` is set.
    """
    every = [*residents.store.every, *residents.saved_order]
    here = {item.spec.name for item in residents.store} | set(residents.buffers)
    given_names = {name for name in every if any(alias in given for alias in residents.names[name])}
    wanted = every if given_names - here else [name for name in every if name in here]
    known = {alias for names in residents.names.values() for alias in names}
    missing = [name for name in wanted if name not in given_names]
    unexpected = [name for name in given if name not in known]
    if strict and (missing or unexpected):
        raise ConfigError(
            f"load_state_dict: missing {missing}, unexpected {unexpected}; give the state dict of "
            "this model, or pass strict=False"
        )
    return missing, unexpected


def _check_shape(name: str, value: torch.Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(value.shape) != wanted:
        raise ConfigError(
            f"load_state_dict: {name!r} has shape {tuple(value.shape)}, the model has "
            f"{wanted}; give the state dict of this model"
        )


def _find(names: tuple[str, ...], given: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    # as in torch, where every name is copied in turn into the one tensor: the last one stays
    return next((given[name] for name in reversed(names) if name in given), None)


def _copy(item: StoredParameter, value: torch.Tensor) -> None:
    _check_shape(item.spec.name, value, item.spec.meta.shape)
    parameter = item.parameter
    if isinstance(value, DTensor):
        same = (
            isinstance(parameter, DTensor)
            and value.device_mesh == parameter.device_mesh
            and value.placements == parameter.placements
        )
        if same:
            item.view.copy_(local_part(value))
            return
        value = value.full_tensor()
    item.view.copy_(item.block.of(value))
