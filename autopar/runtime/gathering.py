"""Whole tensors out of the ranks' parts, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import ConfigError
from autopar.ir.graph import TensorMeta
from autopar.plan.types import MeshShape
from autopar.runtime.parameters import StoredParameter, local_part
from autopar.runtime.place import Place
from autopar.runtime.surgery import Residents
from autopar.sharding.programs import LocalPrograms


def full_state(
    residents: Residents, programs: LocalPrograms, mesh: MeshShape, place: Place
) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by every name, whole, on the CPU of rank 0; else empty."""
    result: dict[str, torch.Tensor] = {}
    for name, spec in residents.store.every.items():
        item = residents.store.get(name)
        whole = None if item is None else _whole(item)
        source = mesh.rank_of(mesh.pipeline_rank(spec.owner), 0, 0)
        value = _to_first(whole, spec.meta, source, place)
        if value is not None:
            value = value.to(residents.own_dtypes[name])
            result.update(dict.fromkeys(residents.names[name], value))
    for name in residents.saved_order:
        stages = programs.buffer_stages.get(name, ())
        source = mesh.rank_of(mesh.pipeline_rank(min(stages)), 0, 0) if stages else 0
        meta = residents.buffer_metas[name]
        value = _to_first(residents.buffers.get(name), meta, source, place)
        if value is not None:
            result.update(dict.fromkeys(residents.names[name], value))
    return result


def _whole(item: StoredParameter) -> torch.Tensor:
    parameter = item.parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _to_first(
    whole: torch.Tensor | None, meta: TensorMeta, source: int, place: Place
) -> torch.Tensor | None:
    """The tensor of rank ``source`` on the CPU of rank 0; None elsewhere."""
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
    missing: list[str] = []
    with torch.no_grad():
        for item in residents.store:
            value = _find(residents.names[item.spec.name], given)
            if value is None:
                missing.append(item.spec.name)
            else:
                _copy(item, value)
        for name in residents.saved_order:
            held = residents.buffers.get(name)
            value = _find(residents.names[name], given)
            if held is not None and value is None:
                missing.append(name)
            elif held is not None and value is not None:
                held.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
    known = {alias for names in residents.names.values() for alias in names}
    unexpected = [name for name in given if name not in known]
    if strict and (missing or unexpected):
        raise ConfigError(
            f"load_state_dict: missing {missing}, unexpected {unexpected}; give the state dict of "
            "this model, or pass strict=False"
        )
    return missing, unexpected


def _find(names: tuple[str, ...], given: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    return next((given[name] for name in names if name in given), None)


def _copy(item: StoredParameter, value: torch.Tensor) -> None:
    if tuple(value.shape) != item.spec.meta.shape:
        raise ConfigError(
            f"load_state_dict: {item.spec.name!r} has shape {tuple(value.shape)}, the model has "
            f"{item.spec.meta.shape}; give the state dict of this model"
        )
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
