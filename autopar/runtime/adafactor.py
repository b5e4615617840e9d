"""Adafactor's update for sharded parameters.

``torch.optim.Adafactor`` takes norms in place, which sharded tensors refuse. The same update is
computed here: means of rows and columns from sums over the shards, the rest on each shard alone.
The second moments of a matrix (a row and a column) stay whole on every rank of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.torch_compat import replace_adafactor_updates


def route_adafactor() -> None:
    """Let ``torch.optim.Adafactor`` step sharded parameters, wherever it was imported."""
    replace_adafactor_updates(_for_shards)


def _for_shards(original: Callable[..., None]) -> Callable[..., None]:
    def update(
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        row_vars: list[torch.Tensor | None],
        col_vars: list[torch.Tensor | None],
        variances: list[torch.Tensor | None],
        state_steps: list[torch.Tensor],
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        **options: Any,  # noqa: ANN401  # torch's own options, handed on
    ) -> None:
        every: list[list[Any]] = [params, grads, row_vars, col_vars, variances, state_steps]
        plain = [i for i, p in enumerate(params) if not isinstance(p, DTensor)]
        if plain:
            lists = [[values[i] for i in plain] for values in every]
            original(*lists, grad_scale=grad_scale, found_inf=found_inf, **options)
        for index, parameter in enumerate(params):
            if isinstance(parameter, DTensor):
                _update(*[values[index] for values in every], **options)

    return update


def _update(  # noqa: PLR0913  # the arguments of torch's own
    param: DTensor,
    grad: DTensor,
    row_var: DTensor | None,
    col_var: DTensor | None,
    variance: DTensor | None,
    step: torch.Tensor,
    *,
    d: float,
    lr: float | torch.Tensor,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    has_complex: bool,
) -> None:
    """One step of one parameter, the formulas of ``torch.optim.Adafactor``."""
    del has_complex  # refused by the optimizer
    lr = float(lr)
    floor = torch.finfo(param.dtype).eps if eps1 is None else eps1
    local, slope = param.to_local(), grad.to_local()
    if maximize:
        slope = -slope
    step += 1
    count = float(step)
    weight = count**beta2_decay
    root_size = max(param.numel(), 1) ** 0.5
    rate = max(eps2, _square_sum(local, param) ** 0.5 / root_size) * min(lr, count**-0.5)
    if weight_decay:
        local.mul_(1 - lr * weight_decay)
    if row_var is not None and col_var is not None:
        row = _mean_of_squares(slope, param, -1)
        column = _mean_of_squares(slope, param, -2)
        row_var.lerp_(row.redistribute(placements=row_var.placements), weight)
        col_var.lerp_(column.redistribute(placements=col_var.placements), weight)
        estimate = _estimate(row_var, col_var, param, floor)
    else:
        assert variance is not None
        variance.to_local().lerp_(slope * slope, weight)
        estimate = variance.to_local().clone()
    update = estimate.clamp_(min=floor * floor).rsqrt_().mul_(slope)
    limit = max(1.0, _square_sum(update, param) ** 0.5 / (root_size * d))
    local.add_(update, alpha=-rate / limit)


def _square_sum(local: torch.Tensor, like: DTensor) -> float:
    """Sum of squares over the whole tensor of which ``local`` is a shard as of ``like``."""
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in like.placements]
    total = (local.float() if local.element_size() < 4 else local).square().sum()
    return float(
        DTensor.from_local(total, like.device_mesh, placements, run_check=False).full_tensor()
    )


def _mean_of_squares(slope: torch.Tensor, like: DTensor, dim: int) -> DTensor:
    """Mean over one dim of the whole tensor, kept as a dim of size 1, whole on every rank."""
    reduced = like.ndim + dim
    total = slope.square().sum(dim=dim, keepdim=True).div_(like.size(dim))
    placements: list[Placement] = [
        Partial() if isinstance(p, Shard) and p.dim == reduced else p for p in like.placements
    ]
    shape = list(like.shape)
    shape[dim] = 1
    stride = torch.empty(shape, device="meta").stride()
    mean = DTensor.from_local(
        total, like.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return mean.redistribute(placements=[Replicate()] * like.device_mesh.ndim)


def _estimate(row_var: DTensor, col_var: DTensor, like: DTensor, floor: float) -> torch.Tensor:
    """This rank's shard of the outer product of the second moments."""
    whole = [Replicate()] * like.device_mesh.ndim
    row, column = (v.redistribute(placements=whole) for v in (row_var, col_var))
    mean = row.to_local().mean(dim=-2, keepdim=True).clamp(min=floor)
    parts = (
        _shard(row, like, -1),
        _shard(column, like, -2),
        _shard(DTensor.from_local(mean, like.device_mesh, whole, run_check=False), like, -1, -2),
    )
    return (parts[0] @ parts[1]).div_(parts[2])


def _shard(value: DTensor, like: DTensor, *broadcast: int) -> torch.Tensor:
    """The rows of a whole tensor that belong to a shard; dims of size 1 stay."""
    kept = {like.ndim + dim for dim in broadcast}
    placements: Sequence[Placement] = [
        Replicate() if isinstance(p, Shard) and p.dim in kept else p for p in like.placements
    ]
    return value.redistribute(placements=placements).to_local()
