"""A gradient scaler's decision, the same on every rank.

``torch.amp.GradScaler`` looks for gradients that are not finite among those that a rank holds, and
skips the step and lowers its scale by what it finds there. Ranks that decide differently have other
weights, and other scales, from then on. What one rank finds is therefore shared with all before the
scaler acts on it.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from autopar.runtime.optimizers import OptimizerGuard
from autopar.runtime.place import Place
from autopar.torch_compat import watch_unscaling


class SharedOverflow:
    """Shares what gradient scalers find in the gradients of one compiled model.

    It ends with this object. Every rank must step its optimizers through a scaler alike.

    Args:
        guard: Knows the optimizers that hold the model's parameters.
        place: This process, one of several.
    """

    def __init__(self, guard: OptimizerGuard, place: Place) -> None:
        self._guard = guard
        self._device = place.device
        reference = weakref.ref(self)

        def share(optimizer: Optimizer, found: MutableMapping[torch.device, torch.Tensor]) -> None:
            owner = reference()
            if owner is not None and owner._guard.holds_ours(optimizer):
                owner._share(found)

        weakref.finalize(self, watch_unscaling(share))

    def _share(self, found: MutableMapping[torch.device, torch.Tensor]) -> None:
        if not found:  # no parameter of this rank has a gradient
            found[self._device] = torch.zeros((), device=self._device)
        flag = torch.stack([value.detach().to(self._device) for value in found.values()]).max()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        for value in found.values():
            value.copy_(flag)
