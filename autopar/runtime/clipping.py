"""The norm of the whole model's gradient, over all stages and shards.

Each element counts once: replicas are counted on their first rank, a tied weight on its owner
stage. Every rank of the job must call, ranks without parameters included, and gets the same
number; a nan anywhere is seen by all.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from autopar.errors import ConfigError
from autopar.runtime.parameters import ParameterStore, StoredParameter, local_part
from autopar.torch_compat import replace_total_norm_helper, total_norm_helper

_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm that it divides by


class GradientNorm:
    """Norm and clipping of the gradients of one compiled model.

    Args:
        store: This rank's parameters.
        device: Where the reduction runs.
        distributed: Whether other ranks hold parameters or replicas.
    """

    def __init__(self, store: ParameterStore, *, device: torch.device, distributed: bool) -> None:
        self._store = store
        self._device = device
        self.distributed = distributed
        wide = any(spec.meta.dtype == "float64" for spec in store.every.values())
        self._dtype = torch.float64 if wide else torch.float32

    def clip(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; gives the norm before."""
        held = [item for item in self._store if item.parameter.grad is not None]
        norm = self._norm(held, float(norm_type), error_if_nonfinite)
        scale = torch.clamp(float(max_norm) / (norm + _TINY), max=1.0)
        with torch.no_grad():
            for item in held:
                assert item.parameter.grad is not None
                local_part(item.parameter.grad).mul_(scale)
        return norm

    def of_tensors(
        self, tensors: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Norm over all ranks of gradients that are all this model's (:meth:`owns`)."""
        wanted = {id(tensor) for tensor in tensors}
        held = [item for item in self._store if id(item.parameter.grad) in wanted]
        if len(held) != len(tensors):
            raise ConfigError(
                f"clip_grad_norm_ was given {len(tensors)} gradients, {len(tensors) - len(held)} "
                "of them of another model; clip each model by its own call"
            )
        return self._norm(held, norm_type, error_if_nonfinite)

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any of the tensors is the gradient of a parameter of this model."""
        mine = {id(item.parameter.grad) for item in self._store if item.parameter.grad is not None}
        return any(id(tensor) in mine for tensor in tensors)

    def _norm(
        self, held: Sequence[StoredParameter], norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        if not norm_type > 0:
            raise ConfigError(f"norm_type is {norm_type}; give a number above 0, or inf")
        norms = [
            torch.linalg.vector_norm(local_part(item.parameter.grad), norm_type).to(
                self._device, torch.float64
            )
            for item in held
            if item.counted and item.parameter.grad is not None and item.view.numel()
        ]
        stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64)
        stacked = stacked.to(self._device)
        total = (
            self._largest(stacked) if math.isinf(norm_type) else self._power_sum(stacked, norm_type)
        ).to(self._dtype)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(  # the type that torch.nn.utils.clip_grad_norm_ raises
                f"the total norm of order {norm_type} of the gradients is {float(total)}; "
                "skip this step, or pass error_if_nonfinite=False"
            )
        return total

    def _power_sum(self, norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        total = (norms**norm_type).sum()
        if self.distributed:
            dist.all_reduce(total)
        return total ** (1.0 / norm_type)

    def _largest(self, norms: torch.Tensor) -> torch.Tensor:
        # backends disagree about the maximum of nan: it travels as a flag of its own
        is_nan = norms.isnan().any()
        pair = torch.stack([norms.nan_to_num(0.0, math.inf).max(), is_nan.to(norms.dtype)])
        if self.distributed:
            dist.all_reduce(pair, op=dist.ReduceOp.MAX)
        return torch.where(pair[1] > 0, torch.full_like(pair[0], math.nan), pair[0])


def route_clip_grad_norm(norm: GradientNorm) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` see the whole model's norm.

    The helper that it looks up is replaced, so that a function imported earlier is routed too.
    Gradients of other models are left to torch.
    """
    helper = total_norm_helper()
    if not isinstance(helper, _Router):
        helper = _Router(helper)
        replace_total_norm_helper(helper)
    helper.models.add(norm)


class _Router:
    """Stands in for torch's helper and asks the compiled models first."""

    def __init__(self, original: Callable[..., torch.Tensor]) -> None:
        self.original = original
        self.models: weakref.WeakSet[GradientNorm] = weakref.WeakSet()

    def __call__(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        model = self._find(listed)
        if model is None:
            return self.original(listed, norm_type, error_if_nonfinite, foreach)
        return model.of_tensors(listed, float(norm_type), error_if_nonfinite)

    def _find(self, tensors: list[torch.Tensor]) -> GradientNorm | None:
        models = [model for model in self.models if model.distributed]
        if tensors:
            return next((model for model in models if model.owns(tensors)), None)
        # A rank without parameters: the others wait for it in the reduction.
        if len(models) > 1:
            gc.collect()  # a dead model lives on in a cycle
            models = [model for model in self.models if model.distributed]
        if len(models) > 1:
            raise ConfigError(
                f"clip_grad_norm_ was given no gradients on rank {dist.get_rank()} and "
                f"{len(models)} compiled models are alive; call model.clip_grad_norm_(max_norm)"
            )
        return models[0] if models else None
