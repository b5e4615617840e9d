"""What the caller gives to a step, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autopar.capture.torch_ops import torch_dtype
from autopar.errors import InputError, PassError
from autopar.ir.graph import Input, OutputKind
from autopar.runtime.blocks import take_block
from autopar.runtime.shares import LocalShare, take_share
from autopar.sharding.placement import Layout
from autopar.sharding.programs import LocalPrograms, TensorSpec


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """What the caller gives to a step on one rank.

    Attributes:
        params: Local tensors, in storage layout and padded, of the parameters that this rank's
            stages own. Never written to.
        buffers: Whole buffers. Never written to.
        users: Call arguments by path, whole or this rank's shares of them; cut lazily.
        rng_key: Key of the random operators for this step (int64 scalar).
        constants: Captured constants by name.
        loss_tangent: Gradient of whatever follows with respect to the loss.
        tangents: Gradients with respect to outputs, whole, by path; for models without a loss.
            A missing one counts as zero.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    users: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rng_key: torch.Tensor | None = None
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_tangent: float | torch.Tensor = 1.0
    tangents: Mapping[str, torch.Tensor] = field(default_factory=dict)


def user_block(
    inputs: StepInputs,
    local: LocalPrograms,
    name: str,
    coordinate: tuple[int | None, int, int],
    device: torch.device,
) -> torch.Tensor:
    """A rank's rows of a call argument.

    Args:
        inputs: What the caller gave.
        local: Says how the argument is split.
        name: Path of the argument.
        coordinate: Position along (mb, dp, tp); None for mb means the rows of the whole step.
        device: Where the block is needed.

    Raises:
        InputError: The argument is missing, or has another shape or dtype than the plan's.
    """
    spec = local.users[name]
    tensor = inputs.users.get(name)
    if tensor is None:
        raise InputError(f"call argument {name!r} is missing; the plan reads {sorted(local.users)}")
    _check(name, tensor, spec)
    microbatch, dp, tp = coordinate
    layout: Layout = spec.layout
    sizes: tuple[int, ...] = local.axis_sizes
    at: tuple[int, ...] = (microbatch or 0, dp, tp)
    if microbatch is None:
        layout, sizes, at = layout[1:], sizes[1:], at[1:]
    if isinstance(tensor, LocalShare):
        block = take_share(name, tensor, layout, at, sizes)
    else:
        block = take_block(tensor, layout, at, sizes)
    return block.to(device, non_blocking=True)


def _check(name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
    dtype = torch_dtype(spec.meta.dtype)
    if tuple(tensor.shape) != spec.meta.shape or tensor.dtype != dtype:
        found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        raise InputError(
            f"call argument {name!r} is {found}, the plan was made for {spec.meta}; "
            "pass the global batch of that shape, or compile again for this one"
        )


def tangent_block(
    inputs: StepInputs,
    local: LocalPrograms,
    item: Input,
    coordinate: tuple[int, int, int],
    device: torch.device,
) -> torch.Tensor:
    """A rank's part of the gradient with respect to a loss or an output.

    A pending sum has the whole gradient on every rank and in every micro-batch: d(sum)/d(term) = 1.
    """
    if item.meta is None:
        raise PassError(f"tangent {item.name!r} has no shape")
    dtype = torch_dtype(item.meta.dtype)
    if any(r.kind is OutputKind.LOSS and r.target == item.target for r in local.results):
        tangent = torch.as_tensor(inputs.loss_tangent, dtype=dtype, device=device)
        return tangent.expand(item.meta.shape)
    given = inputs.tangents.get(item.target)
    if given is None:
        return torch.zeros(item.meta.shape, dtype=dtype, device=device)
    layout = local.tangents[item.target].layout
    block = take_block(given, layout, coordinate, local.axis_sizes)
    return block.to(device=device, dtype=dtype)
