"""What the user writes into a compiled module's tensors between steps.

The programs read memory of their own: that of the tensors which were moved in. In-place writes
reach it. A tensor that is put in the place of another would not, so it is looked for before every
use: a buffer's value is copied in, a parameter is refused by name.
"""

from __future__ import annotations

import weakref

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.errors import ConfigError
from autopar.runtime.parameters import ParameterStore, StoredParameter, whole_tensor
from autopar.runtime.surgery import Residents
from autopar.torch_compat import intercept_random_writes

_STORES: weakref.WeakKeyDictionary[ParameterStore, bool] = weakref.WeakKeyDictionary()


def take_up_writes(residents: Residents) -> None:
    """Copy buffers that were assigned into the memory that programs read.

    Raises:
        ConfigError: A parameter was replaced, removed or cast, or a buffer has another shape.
    """
    for name, skeleton in zip(residents.names, residents.skeletons, strict=True):
        is_parameter = skeleton.slots[0].is_parameter
        item = residents.store.get(name) if is_parameter else None
        held: torch.Tensor | None = residents.buffers.get(name)
        if item is not None:
            held = item.parameter
            if held.dtype != item.padded.dtype:
                raise ConfigError(
                    f"parameter {name!r} was cast to {held.dtype} after autopar.compile(), the "
                    f"programs compute with {item.padded.dtype}; cast the model before compile(), "
                    "or compile it with precision='bf16'"
                )
        found = [slot.table.get(slot.attribute) for slot in skeleton.slots]
        if all(tensor is held for tensor in found):
            continue
        if is_parameter:
            raise ConfigError(
                f"parameter {name!r} was replaced after autopar.compile(), where the programs "
                "can't see it; copy into it (with torch.no_grad(): parameter.copy_(value)), use "
                "load_state_dict(), or change the model before compile()"
            )
        _take_up_buffer(name, residents, held, found)
        for slot in skeleton.slots:
            slot.put(held)


def _take_up_buffer(
    name: str,
    residents: Residents,
    held: torch.Tensor | None,
    found: list[torch.Tensor | None],
) -> None:
    new = {id(tensor): tensor for tensor in found if tensor is not held}
    value = next(iter(new.values()))
    names = residents.names[name]
    if len(new) > 1 or (len(names) > 1 and any(tensor is held for tensor in found)):
        raise ConfigError(
            f"the buffer of the names {', '.join(map(repr, names))} was assigned under some of "
            "them only, which would make them two buffers; copy into it, or assign to all"
        )
    if value is None:
        raise ConfigError(f"buffer {name!r} was removed after autopar.compile(); put it back")
    shape = residents.buffer_metas[name].shape
    if tuple(value.shape) != shape:
        raise ConfigError(
            f"buffer {name!r} was assigned a tensor of shape {tuple(value.shape)}, it was compiled "
            f"with {shape}; assign one of that shape, or compile the model again"
        )
    if held is not None:
        with torch.no_grad():
            held.copy_(whole_tensor(value))


def draw_whole(store: ParameterStore, *, in_stages: bool) -> None:
    """Make random in-place writes (``normal_``, ``uniform_``) into parameters draw whole tensors.

    Every rank draws the whole tensor, as one device would, and keeps its block of rank 0's. Without
    it each rank would draw its shard alone: equal shards, or replicas that differ.

    Args:
        store: The parameters.
        in_stages: Whether ranks hold different parameters, and so would draw the same numbers for
            different layers: such a write is refused.
    """
    _STORES[store] = in_stages
    intercept_random_writes(_write)


def _write(target: DTensor, draw: object) -> bool:
    """Whether ``target`` is ours and was filled; ``draw(tensor)`` fills a plain tensor."""
    assert callable(draw)
    memory = target.to_local().untyped_storage().data_ptr()
    for store, in_stages in _STORES.items():
        item = next((i for i in store if _memory(i) == memory), None)
        if item is None or tuple(target.shape) != item.spec.meta.shape:
            continue
        if in_stages:
            raise ConfigError(
                f"random numbers are written into parameter {item.spec.name!r} of a model in "
                "several pipeline stages, whose ranks would draw the same for different layers; "
                "initialise the model before autopar.compile(), or load_state_dict()"
            )
        whole = torch.empty(tuple(target.shape), dtype=target.dtype)
        draw(whole)
        mesh = target.device_mesh
        spread = distribute_tensor(whole.to(item.padded.device), mesh, target.placements)
        target.to_local().copy_(spread.to_local())
        return True
    return False


def _memory(item: StoredParameter) -> int:
    return item.padded.untyped_storage().data_ptr()
