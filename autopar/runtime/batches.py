"""Whether a batch is the one that a program was captured for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from autopar.capture.calls import ModelCall
from autopar.errors import InputError
from autopar.ir.graph import TensorMeta
from autopar.runtime.changes import Marks


@dataclass(frozen=True, slots=True)
class CallKey:
    """Everything about a call that a captured program depends on.

    Attributes:
        tensors: (path, shape, dtype) of each tensor, in order.
        statics: (path, text) of each argument that is no tensor.
        modes: Train or eval mode of each module that is not in the model's own mode, and the
            model's own.
        autocast: Device types with autocast on, and to which dtype.
        backward: Whether gradients are wanted.
        changes: What the user changed in the model since it was captured, as
            :class:`~autopar.runtime.changes.Marks` has it.
    """

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    statics: tuple[tuple[str, str], ...]
    modes: tuple[str, ...]
    autocast: tuple[str, ...]
    backward: bool
    changes: tuple[tuple[str, str], ...] = ()


def call_key(marks: Marks, call: ModelCall, *, backward: bool) -> CallKey:
    """The key of a call, here and now, of a model with these marks."""
    return CallKey(
        tensors=tuple((path, tuple(t.shape), _dtype(t)) for path, t in call.tensors().items()),
        statics=tuple((path, repr(value)) for path, value in call.statics().items()),
        modes=marks.modes,
        autocast=tuple(
            f"{device}: {torch.get_autocast_dtype(device)}"
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ),
        backward=backward,
        changes=marks.changes,
    )


def check_batch(
    tensors: Mapping[str, torch.Tensor],
    captured: Mapping[str, TensorMeta],
    device: torch.device,
    *,
    rank: int | None,
) -> None:
    """Refuse a batch that no plan of this model could take.

    Sizes may differ from the captured ones, number of dims and dtypes may not.

    Args:
        tensors: The call's tensors by path.
        captured: Shapes and dtypes that the plan was made for.
        device: Where this rank computes; tensors on the CPU are moved there.
        rank: This rank, for messages; None in a plain process.

    Raises:
        InputError: An entry is missing, unknown, or has other dims, dtype or device.
    """
    where = "" if rank is None else f"rank {rank}: "
    missing = [path for path in captured if path not in tensors]
    extra = [path for path in tensors if path not in captured]
    if missing or extra:
        raise InputError(
            f"{where}the batch has {'no ' + ', '.join(map(repr, missing)) if missing else ''}"
            f"{' and ' if missing and extra else ''}"
            f"{'an unknown ' + ', '.join(map(repr, extra)) if extra else ''}; the plan was made "
            f"for {', '.join(map(repr, captured))}; call the model with these arguments, or "
            "compile it again with the new ones"
        )
    for path, meta in captured.items():
        tensor = tensors[path]
        found = f"{_dtype(tensor)}{list(tensor.shape)}"
        if _dtype(tensor) != meta.dtype:
            raise InputError(
                f"{where}input {path!r} is {found}, the plan was made for {meta}; cast it to "
                f"torch.{meta.dtype}"
            )
        if tensor.dim() != len(meta.shape):
            raise InputError(
                f"{where}input {path!r} is {found} with {tensor.dim()} dims, the plan was made for "
                f"{meta} with {len(meta.shape)}; give a batch of that form, or compile again"
            )
        if not tensor.numel() and meta.numel:
            raise InputError(
                f"{where}input {path!r} is {found}, which is empty; give at least one row, or skip "
                "the call on every rank"
            )
    check_device(tensors, device, rank=rank)


def check_device(
    tensors: Mapping[str, torch.Tensor], device: torch.device, *, rank: int | None
) -> None:
    """Refuse tensors that are neither on this rank's device nor on the CPU.

    Raises:
        InputError: Names the first one and both devices.
    """
    where = "" if rank is None else f"rank {rank}: "
    for path, tensor in tensors.items():
        if tensor.device.type not in ("cpu", device.type):
            raise InputError(
                f"{where}input {path!r} is on {tensor.device}, this rank computes on {device}; "
                f"move it by .to({str(device)!r})"
            )


def check_takes_no_gradient(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that wait for a gradient: a compiled model gives its parameters alone one.

    Args:
        tensors: The call's tensors by path, in a call whose result can be differentiated.

    Raises:
        InputError: Names those that require a gradient.
    """
    found = [path for path, tensor in tensors.items() if tensor.requires_grad]
    if not found:
        return
    makers = (tensors[path].grad_fn for path in found)
    made = next((f", made by {maker.name()}" for maker in makers if maker is not None), "")
    raise InputError(
        f"input {', '.join(map(repr, found))} requires a gradient{made}, and a compiled model "
        "gives gradients to its own parameters alone: what was computed before it would not be "
        "trained; compile one module that holds both, or pass .detach() of the tensor, or call "
        "under torch.no_grad()"
    )


def changed_inputs(
    tensors: Mapping[str, torch.Tensor], captured: Mapping[str, TensorMeta]
) -> tuple[str, ...]:
    """Each input of another shape, as ``"'labels' [8, 16] instead of [8, 32]"``."""
    return tuple(
        f"{path!r} {list(tensors[path].shape)} instead of {list(meta.shape)}"
        for path, meta in captured.items()
        if tuple(tensors[path].shape) != meta.shape
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
