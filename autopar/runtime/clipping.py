"""The norm of the whole model's gradient, over all stages and shards.

Each element counts once: replicas are counted on their first rank, a tied weight on its owner
stage. Every rank of the job must call, ranks without parameters included, and gets the same
number; a nan anywhere is seen by all.

Gradients of a module that is not compiled may be in the same call. Every rank then holds all of
them, as with any replicated module, and they count once.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import ConfigError
from autopar.runtime.parameters import ParameterStore, local_part
from autopar.torch_compat import clipping_functions, replace_clipping_functions

_TINY = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm that it divides by
_SAME = 1e-4  # relative difference between ranks of what is a replica up to rounding


class GradientNorm:
    """Norm and clipping of the gradients of one compiled model.

    Args:
        store: This rank's parameters.
        device: Where the reduction runs.
        distributed: Whether other ranks hold parameters or replicas.
        all_train: Whether every rank has a parameter that is trained.
    """

    def __init__(
        self,
        store: ParameterStore,
        *,
        device: torch.device,
        distributed: bool,
        all_train: bool = True,
    ) -> None:
        self._store = store
        self._device = device
        self.distributed = distributed
        self._all_train = all_train
        wide = any(spec.meta.dtype == "float64" for spec in store.every.values())
        self._dtype = torch.float64 if wide else torch.float32

    def clip(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; gives the norm before."""
        gradients = self._gradients()
        norm = self.of_tensors(gradients, norm_type, error_if_nonfinite)
        scale_gradients(gradients, max_norm, norm)
        return norm

    def of_tensors(
        self, gradients: Sequence[torch.Tensor], norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Norm over all ranks of gradients of this model and of modules that are not compiled.

        Raises:
            ConfigError: Some are another compiled model's, or plain ones differ between ranks.
            RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set.
        """
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ConfigError(f"norm_type is {norm_type}; give a number above 0, or inf")
        items = {id(item.parameter.grad): item for item in self._store}
        counted = [g for g in gradients if id(g) in items and items[id(g)].counted]
        plain = [g for g in gradients if id(g) not in items]
        self._check_plain(plain)
        own = self._combined(self._norms(counted, norm_type), norm_type)
        beside = self._combined(self._norms(plain, norm_type), norm_type)
        total = self._total(torch.stack([own, beside]), norm_type).to(self._dtype)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise RuntimeError(  # the type that torch.nn.utils.clip_grad_norm_ raises
                f"the total norm of order {norm_type} of the gradients is {float(total)}; "
                "skip this step, or pass error_if_nonfinite=False"
            )
        return total

    def owns(self, tensors: Iterable[torch.Tensor], of_gradients: bool) -> bool:
        """Whether any of the tensors is a parameter of this model, or the gradient of one."""
        mine = set(map(id, self._gradients())) if of_gradients else self._store.by_identity()
        return any(id(tensor) in mine for tensor in tensors)

    def is_empty(self, *, of_gradients: bool) -> bool:
        """Whether this rank has no parameters, or none with a gradient."""
        return not (self._gradients() if of_gradients else len(self._store))

    def _gradients(self) -> list[torch.Tensor]:
        return [i.parameter.grad for i in self._store if i.parameter.grad is not None]

    def _check_plain(self, plain: Sequence[torch.Tensor]) -> None:
        sharded = sum(isinstance(gradient, DTensor) for gradient in plain)
        if sharded:
            raise ConfigError(
                f"{sharded} of the gradients to clip are sharded and not of this compiled model; "
                "clip each model by its own call"
            )
        if plain and not self._all_train:
            raise ConfigError(
                f"{len(plain)} of the gradients to clip are of a module that is not compiled, and "
                "some ranks hold no trained parameter of the compiled model, so that they can't "
                "know of the common norm; clip the two by calls of their own"
            )

    def _norms(self, gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
        found = [
            torch.linalg.vector_norm(local, norm_type, dtype=_wide(local.dtype)).to(
                self._device, torch.float64
            )
            for local in map(local_part, gradients)
            if local.numel()
        ]
        return torch.stack(found) if found else torch.zeros(1, dtype=torch.float64).to(self._device)

    @staticmethod
    def _combined(norms: torch.Tensor, norm_type: float) -> torch.Tensor:
        """The norm to the power of its order, or the largest; nan if one is."""
        return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()

    def _total(self, pair: torch.Tensor, norm_type: float) -> torch.Tensor:
        rows = [pair]
        if self.distributed:
            rows = [torch.empty_like(pair) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, pair)
        every = torch.stack(rows)
        beside = every[:, 1]
        if not torch.allclose(beside, beside[0].expand_as(beside), rtol=_SAME, equal_nan=True):
            odd = int((beside - beside[0]).abs().argmax())
            raise ConfigError(
                f"gradients of a module that is not compiled have another norm on rank {odd} "
                f"({float(beside[odd]):.6g}, to the power of its order) than on rank 0 "
                f"({float(beside[0]):.6g}); compute them from the same batch on every rank, or "
                "average them over the ranks first"
            )
        parts = torch.stack([self._combined_rows(every[:, 0], norm_type), beside[0]])
        total = self._combined_rows(parts, norm_type)
        return total if math.isinf(norm_type) else total ** (1.0 / norm_type)

    @staticmethod
    def _combined_rows(values: torch.Tensor, norm_type: float) -> torch.Tensor:
        return values.max() if math.isinf(norm_type) else values.sum()


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """Where to sum a gradient: a half-precision sum would be rounded."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else None


def scale_gradients(gradients: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients, sharded or not, in place by what brings ``norm`` to ``max_norm``."""
    scale = torch.clamp(float(max_norm) / (norm + _TINY), max=1.0)
    with torch.no_grad():
        for gradient in gradients:
            local_part(gradient).mul_(scale.to(gradient.device))


def route_clipping(norm: GradientNorm) -> None:
    """Make the clipping functions of ``torch.nn.utils`` see the whole of a compiled model.

    Gradients of other models are left to torch.
    """
    _ROUTER.add(norm)


class _Router:
    """Stands before torch's clipping functions and asks the compiled models first."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[GradientNorm] = weakref.WeakSet()
        self._torch: dict[str, Callable[..., torch.Tensor]] = {}

    def add(self, norm: GradientNorm) -> None:
        """Answer for one more model."""
        if not self._torch:
            self._torch = clipping_functions()
            replace_clipping_functions(
                {
                    "_get_total_norm": self.total_norm,
                    "_clip_grads_with_norm_": self.scale,
                    "clip_grad_norm_": self.clip_norm,
                    "clip_grad_value_": self.clip_value,
                }
            )
        self._models.add(norm)

    def total_norm(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """In the place of ``torch.nn.utils.get_total_norm``."""
        gradients = _listed(tensors)
        model = self._find(gradients, of_gradients=True)
        if model is None:
            return self._torch["_get_total_norm"](gradients, norm_type, error_if_nonfinite, foreach)
        return model.of_tensors(gradients, norm_type, error_if_nonfinite)

    def scale(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        total_norm: torch.Tensor,
        foreach: bool | None = None,
    ) -> None:
        """In the place of ``torch.nn.utils.clip_grads_with_norm_``."""
        listed = _listed(parameters)
        if self._is_ours(listed):
            scale_gradients(_gradients_of(listed), max_norm, total_norm)
        else:
            self._torch["_clip_grads_with_norm_"](listed, max_norm, total_norm, foreach)

    def clip_norm(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """In the place of ``torch.nn.utils.clip_grad_norm_``."""
        listed = _listed(parameters)
        model = self._find(listed, of_gradients=False)
        gradients = _gradients_of(listed)
        if model is None:  # torch's own two steps; its function would come back to this router
            norm = self._torch["_get_total_norm"](gradients, norm_type, error_if_nonfinite, foreach)
            self._torch["_clip_grads_with_norm_"](listed, max_norm, norm, foreach)
            return norm
        norm = model.of_tensors(gradients, norm_type, error_if_nonfinite)
        scale_gradients(gradients, max_norm, norm)
        return norm

    def clip_value(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        clip_value: float,
        foreach: bool | None = None,
    ) -> None:
        """In the place of ``torch.nn.utils.clip_grad_value_``."""
        listed = _listed(parameters)
        if listed and not self._is_ours(listed):  # torch does not take an empty list
            self._torch["clip_grad_value_"](listed, clip_value, foreach)
            return
        for gradient in _gradients_of(listed):
            local_part(gradient).clamp_(-float(clip_value), float(clip_value))

    def _is_ours(self, parameters: Sequence[torch.Tensor]) -> bool:
        return any(model.owns(parameters, of_gradients=False) for model in self._models)

    def _find(self, tensors: Sequence[torch.Tensor], *, of_gradients: bool) -> GradientNorm | None:
        if tensors:
            return next((m for m in self._alive() if m.owns(tensors, of_gradients)), None)
        # a rank without parameters: the others wait for it in the reduction
        if len(self._alive()) > 1:
            gc.collect()  # a dead model lives on in a cycle
        empty = [m for m in self._alive() if m.is_empty(of_gradients=of_gradients)]
        if len(empty) > 1:
            raise ConfigError(
                f"clip_grad_norm_ was given no gradients on rank {dist.get_rank()} and "
                f"{len(empty)} compiled models are alive; call model.clip_grad_norm_(max_norm)"
            )
        return empty[0] if empty else None

    def _alive(self) -> list[GradientNorm]:
        return [model for model in self._models if model.distributed]


_ROUTER = _Router()


def _listed(tensors: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
