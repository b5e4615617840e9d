"""The state dict of an optimizer whose parameters are spread over ranks, keyed by name.

torch keys it by position, and a position means another parameter on another stage. Here the state
is keyed by the parameter's first name, holds this rank's parameters only, and every group lists
the names of all ranks, so that the list is the same whoever saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as DReplicate
from torch.optim.optimizer import Optimizer

from autopar.errors import ConfigError
from autopar.runtime.parameters import ParameterStore, StoredParameter, as_dtensor

StateDict: TypeAlias = dict[str, object]
GroupNames: TypeAlias = tuple[tuple[str, ...], ...]
"""Names of the parameters of each group."""

_SHOWN = 3


def own_groups(optimizer: Optimizer, names: Mapping[int, str]) -> GroupNames:
    """Names of this rank's parameters in each group; foreign ones are called by position."""
    found: list[tuple[str, ...]] = []
    position = 0
    for group in optimizer.param_groups:
        labels = [names.get(id(p), str(position + i)) for i, p in enumerate(group["params"])]
        position += len(labels)
        found.append(tuple(label for label in labels if label))
    return tuple(found)


def merge_groups(every: Sequence[GroupNames], order: Mapping[str, int]) -> GroupNames:
    """The groups of one optimizer over all ranks, names in the model's order.

    Raises:
        ConfigError: The ranks have different numbers of groups.
    """
    counts = {len(groups) for groups in every}
    if len(counts) > 1:
        raise ConfigError(
            f"an optimizer has {min(counts)} parameter groups on one rank and {max(counts)} on "
            "another; build it in the same way on every rank, with a group that is empty there"
        )
    merged: list[tuple[str, ...]] = []
    for parts in zip(*every, strict=True):
        names = dict.fromkeys(name for part in parts for name in part)
        merged.append(tuple(sorted(names, key=lambda name: order.get(name, len(order)))))
    return tuple(merged)


def to_names(
    optimizer: Optimizer, state_dict: StateDict, names: Mapping[int, str], groups: GroupNames
) -> StateDict:
    """The state dict of torch with names in the place of positions.

    Args:
        optimizer: Gave the state dict.
        state_dict: As torch made it.
        names: ``id`` of each parameter -> name; "" for one that belongs into no state dict.
        groups: Names of each group, over all ranks.
    """
    held = [p for group in optimizer.param_groups for p in group["params"]]
    keys: dict[object, str] = {
        position: names.get(id(parameter), str(position)) for position, parameter in enumerate(held)
    }
    saved, state = _parts(state_dict)
    new_groups: list[StateDict] = []
    for group, listed in zip(saved, groups, strict=True):
        labels = {"param_names": list(listed)} if "param_names" in group else {}
        new_groups.append({**group, "params": list(listed), **labels})
    named = {keys.get(key, str(key)): value for key, value in state.items()}
    named.pop("", None)
    return {**state_dict, "state": named, "param_groups": new_groups}


def to_positions(
    optimizer: Optimizer,
    state_dict: StateDict,
    names: Mapping[int, str],
    store: ParameterStore,
    wanted: GroupNames,
    *,
    in_stages: bool,
) -> StateDict:
    """A state dict with names as torch's ``load_state_dict`` wants it.

    Args:
        optimizer: Is to take it up.
        state_dict: With names, or with positions where these say something.
        names: ``id`` of each parameter -> name; "" for one that is in no state dict.
        store: This rank's parameters.
        wanted: Names of each group over all ranks, so that all of them refuse alike.
        in_stages: Whether ranks hold different parameters, so that positions say nothing.

    Raises:
        ConfigError: It has other groups or other parameters, or is keyed by position where
            positions say nothing.
    """
    groups, state = _parts(state_dict)
    listed = [set(_listed(group)) for group in groups]
    known = set().union(*listed) if listed else set()
    if known and not any(isinstance(key, str) for key in known):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        _check_positions(len(known), len(held), in_stages=in_stages)
        items = [store.get(names.get(id(parameter), "")) for parameter in held]
        return {
            **state_dict,
            "state": {k: _cut_all(v, items[int(str(k))]) for k, v in state.items()},
        }
    if len(groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"optimizer state dict has {len(groups)} parameter groups, the optimizer has "
            f"{len(optimizer.param_groups)}; build the optimizer with the same groups"
        )
    for index, group_names in enumerate(wanted):
        for name in group_names:
            if _alias_in(listed[index], name, store) is None:
                raise ConfigError(_misplaced(name, index, listed))
    position = 0
    new_groups: list[StateDict] = []
    new_state: dict[object, object] = {}
    for index, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        first = position
        for parameter in group["params"]:
            name = names.get(id(parameter), str(position))
            item = store.get(name)
            values = state.get(_alias_in(listed[index], name, store))
            if values is not None:
                new_state[position] = _cut_all(values, item)
            position += 1
        kept = {key: value for key, value in saved.items() if key != "param_names"}
        new_groups.append({**kept, "params": list(range(first, position))})
    return {**state_dict, "state": new_state, "param_groups": new_groups}


def _parts(state_dict: Mapping[str, object]) -> tuple[list[StateDict], dict[object, object]]:
    groups, state = state_dict["param_groups"], state_dict["state"]
    assert isinstance(groups, list)
    assert isinstance(state, dict)
    return groups, state


def _listed(group: Mapping[str, object]) -> list[object]:
    params = group["params"]
    assert isinstance(params, list)
    return params


def _alias_in(listed: set[object], name: str, store: ParameterStore) -> str | None:
    """The name under which a saved group lists a parameter; None if it does not."""
    aliases = store.names.get(name, (name,))
    return next((alias for alias in (name, *aliases) if alias in listed), None)


def _misplaced(name: str, index: int, listed: Sequence[set[object]]) -> str:
    other = next((i for i, names in enumerate(listed) if name in names), None)
    if other is not None:
        return (
            f"optimizer state dict has parameter {name!r} in group {other}, the optimizer in "
            f"group {index}; build the optimizer with the same groups"
        )
    some = ", ".join(repr(n) for n in sorted(map(str, listed[index]))[:_SHOWN])
    return (
        f"optimizer state dict has no parameter {name!r}: its group {index} lists "
        f"{len(listed[index])} others ({some}...); load the state of this model's optimizer"
    )


def _check_positions(count: int, held: int, *, in_stages: bool) -> None:
    if count != held or in_stages:
        raise ConfigError(
            f"optimizer state dict is keyed by position ({count} parameters; this rank's optimizer "
            f"has {held}), and positions mean other parameters on another stage; get it by "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which keys it by "
            "name"
        )


def _cut_all(values: object, item: StoredParameter | None) -> object:
    """All of one parameter's state; see :func:`cut`."""
    assert isinstance(values, Mapping)
    return {key: cut(value, item) for key, value in values.items()}


def cut(value: object, item: StoredParameter | None) -> object:
    """One entry of a parameter's state in the form that the parameter has on this rank.

    A whole tensor of the parameter's shape is cut to this rank's block. One of another shape, such
    as a row or a column of second moments, is kept whole on every rank of the stage.
    """
    if item is None or not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:  # a step count: two optimizers must not count in one tensor
        return value.clone()
    parameter = item.parameter
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    mesh = parameter.device_mesh
    if isinstance(value, DTensor):
        same_shape = value.shape == parameter.shape
        same_layout = not same_shape or value.placements == parameter.placements
        if value.device_mesh == mesh and same_layout:
            return value
        value = value.full_tensor()
    device = item.padded.device
    if value.shape == parameter.shape:
        return as_dtensor(item.block.of(value).to(device).clone(), item.spec, mesh)
    whole = [DReplicate()] * mesh.ndim
    return DTensor.from_local(value.to(device).clone(), mesh, whole, run_check=False)


def empty_state(
    shape: Sequence[int], dtype: torch.dtype, item: StoredParameter | None
) -> torch.Tensor:
    """Memory for one entry of a parameter's state, in the form of :func:`cut`."""
    if not len(shape):
        return torch.zeros((), dtype=dtype)
    device = torch.device("cpu") if item is None else item.padded.device
    if item is None or not isinstance(item.parameter, DTensor):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    mesh = item.parameter.device_mesh
    if tuple(shape) == tuple(item.parameter.shape):
        return as_dtensor(torch.zeros(item.block.size, dtype=dtype, device=device), item.spec, mesh)
    local = torch.zeros(tuple(shape), dtype=dtype, device=device)
    return DTensor.from_local(local, mesh, [DReplicate()] * mesh.ndim, run_check=False)
