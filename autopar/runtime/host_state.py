"""Optimizer state in host memory: a step brings it to the device chunk by chunk and back.

Between steps the tensors of the state have no memory on the device: their storages are empty, and
host buffers (pinned for a GPU) hold the bytes. The step runs the optimizer's own code on some
parameters at a time, so that at most a chunk of state is on the device. That is right for
optimizers that step every parameter by itself. The numbers are those of a whole step.

A state dict is made of what is on the device: all of it comes back for that, until the next step.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import ConfigError
from autopar.runtime.optimizer_memory import ELEMENTWISE
from cost_models.offload import CHUNK_BYTES

Parameters = list[torch.nn.Parameter]
_TENSORS_EACH = 2  # of a parameter's shape, where its state is not made yet


def keep_on_host(optimizer: Optimizer, chunk_bytes: int = CHUNK_BYTES) -> HostState:
    """Keep the state of an optimizer in host memory from its next step on.

    Args:
        optimizer: The optimizer; its ``step`` is replaced.
        chunk_bytes: State on the device at once, unless that of one parameter is more.

    Raises:
        ConfigError: It is not known to step every parameter by itself.
    """
    kind = type(optimizer).__name__
    if kind.lower() not in ELEMENTWISE:
        raise ConfigError(
            f"the plan keeps optimizer state in host memory and steps some parameters at a time, "
            f"which is known to be right for {', '.join(sorted(ELEMENTWISE))}, not for {kind}; "
            "take one of them, or plan with offload='never'"
        )
    return HostState(optimizer, chunk_bytes)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """The bytes of a storage in host memory."""

    bytes: torch.Tensor

    @classmethod
    def of(cls, storage: torch.UntypedStorage) -> _Buffer:
        pinned = storage.device.type == "cuda"
        return cls(torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned))


class HostState:
    """Where the state of one optimizer is.

    Args:
        optimizer: The optimizer.
        chunk_bytes: As of :func:`keep_on_host`.
    """

    def __init__(self, optimizer: Optimizer, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._buffers = WeakIdKeyDictionary()  # tensor of the state -> its buffer
        cls = type(optimizer)
        own = cls.step
        whole: Callable[[Optimizer], object] = getattr(own, "__wrapped__", own)  # without hooks

        def step(owner: Optimizer, closure: Callable[[], float] | None = None) -> float | None:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(owner, whole)
            return loss

        hooked = Optimizer.profile_hook_step(step)  # hooks see one step, not one for each chunk
        optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(self.bring)

    @property
    def device_bytes(self) -> int:
        """Bytes of state that has a buffer and is on the device now."""
        return sum(_storage(tensor).nbytes() for tensor in list(self._buffers))

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(self._buffers[tensor].bytes.numel() for tensor in list(self._buffers))

    def bring(self, optimizer: Optimizer) -> None:
        """Bring all state to the device, until the next step."""
        self._bring(optimizer, list(optimizer.state))

    def _step(self, optimizer: Optimizer, whole: Callable[[Optimizer], object]) -> None:
        groups = optimizer.param_groups
        every: list[Parameters] = [group["params"] for group in groups]
        try:
            for chunk in self._chunks(optimizer, every):
                for group, own in zip(groups, chunk, strict=True):
                    group["params"] = own
                members = [p for own in chunk for p in own]
                self._bring(optimizer, members)
                whole(optimizer)
                self._take(optimizer, members)
        finally:
            for group, own in zip(groups, every, strict=True):
                group["params"] = own

    def _chunks(
        self, optimizer: Optimizer, every: Sequence[Parameters]
    ) -> Iterator[list[Parameters]]:
        """The parameters of all groups, in order, some at a time."""
        chunk: list[Parameters] = [[] for _ in every]
        filled = 0
        for at, own in enumerate(every):
            for parameter in own:
                size = self._size(optimizer, parameter)
                if filled and filled + size > self._chunk_bytes:
                    yield chunk
                    chunk, filled = [[] for _ in every], 0
                chunk[at].append(parameter)
                filled += size
        yield chunk

    def _size(self, optimizer: Optimizer, parameter: torch.nn.Parameter) -> int:
        tensors = _tensors(optimizer, parameter)
        if not tensors:
            return _TENSORS_EACH * _local(parameter).numel() * parameter.element_size()
        return sum(
            self._buffers[t].bytes.numel() if t in self._buffers else _storage(t).nbytes()
            for t in tensors
        )

    @torch.no_grad()
    def _bring(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            for tensor in _tensors(optimizer, parameter):
                storage = _storage(tensor)
                if tensor in self._buffers and not storage.nbytes():
                    buffer = self._buffers[tensor]
                    storage.resize_(buffer.bytes.numel())
                    _bytes(storage).copy_(buffer.bytes, non_blocking=True)

    @torch.no_grad()
    def _take(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Into host memory; on a GPU all of it is in the order of the stream."""
        for parameter in parameters:
            for tensor in _tensors(optimizer, parameter):
                storage = _storage(tensor)
                if storage.nbytes():
                    if tensor not in self._buffers:
                        self._buffers[tensor] = _Buffer.of(storage)
                    self._buffers[tensor].bytes.copy_(_bytes(storage), non_blocking=True)
                    storage.resize_(0)


def _tensors(optimizer: Optimizer, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a parameter's state, step counters left out."""
    values = optimizer.state[parameter].values() if parameter in optimizer.state else ()
    return [v for v in values if isinstance(v, torch.Tensor) and v.dim() > 0]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return _local(tensor).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
