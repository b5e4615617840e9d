"""Bytes of parameters, gradients and optimizer state on one rank, by dtype and ZeRO level.

===== ==================== =================== ==================== ===========
level stored parameter     compute copy        gradient accumulator optimizer
===== ==================== =================== ==================== ===========
0     whole                only to cast        whole                whole
1     1/dp                 whole               whole                1/dp
2     1/dp                 whole               1/dp                 1/dp
3     1/dp                 while it is used    1/dp                 1/dp
===== ==================== =================== ==================== ===========

*Stored* parameters are what ``parameters()`` returns: in the master dtype. Gradients are
accumulated in the master dtype, in float32 for lower ones. A share is the largest one: dim 0 is
cut into blocks of ``ceil(size / dp)``. What activations take is in :mod:`cost_models.liveness`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from autopar.errors import ConfigError
from autopar.ir.graph import ITEM_BYTES, TensorMeta
from autopar.ir.precision_rules import sum_dtype
from cost_models.liveness import (
    Liveness,
    host_bytes,
    liveness,
    peak_transient_bytes,
    saved_bytes,
    saved_storages,
)

__all__ = [
    "Liveness",
    "OptimizerKind",
    "StateBytes",
    "host_bytes",
    "liveness",
    "optimizer_kind",
    "optimizer_state_bytes",
    "parameter_state_bytes",
    "peak_transient_bytes",
    "saved_bytes",
    "saved_storages",
    "shard_meta",
]


class OptimizerKind(StrEnum):
    """Optimizers by what they keep per parameter."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"
    ADAFACTOR = "adafactor"
    NONE = "none"


def optimizer_kind(text: str) -> OptimizerKind:
    """The optimizer called ``text``.

    Raises:
        ConfigError: It is not known.
    """
    try:
        return OptimizerKind(text.lower())
    except ValueError:
        raise ConfigError(
            f"optimizer is {text!r}; its state can be priced for {', '.join(OptimizerKind)}: "
            "take the one that keeps as much per parameter"
        ) from None


def optimizer_state_bytes(optimizer: str, parameter: TensorMeta) -> int:
    """Bytes of the state of one parameter (or of a rank's share of it).

    The state has the parameter's dtype, as in ``torch.optim``: two tensors of its shape for Adam
    and AdamW, one for SGD with momentum, none for SGD; Adafactor keeps a row and a column for each
    matrix, and a whole tensor for vectors. Step counters (4 bytes each) are left out.

    >>> optimizer_state_bytes("adamw", TensorMeta((10, 4), "float32"))
    320
    >>> optimizer_state_bytes("adafactor", TensorMeta((10, 4), "float32"))
    56
    """
    item_bytes = ITEM_BYTES[parameter.dtype]
    match optimizer_kind(optimizer):
        case OptimizerKind.ADAMW | OptimizerKind.ADAM:
            return 2 * parameter.bytes
        case OptimizerKind.SGD_MOMENTUM:
            return parameter.bytes
        case OptimizerKind.ADAFACTOR:
            if len(parameter.shape) < 2:
                return parameter.bytes
            *batch, rows, columns = parameter.shape
            return prod(batch) * (rows + columns) * item_bytes
        case OptimizerKind.SGD | OptimizerKind.NONE:
            return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """What one parameter takes on one rank.

    Attributes:
        stored_bytes: As ``parameters()`` returns it.
        compute_bytes: A separate copy in compute dtype and layout; 0 if the stored one serves.
        is_compute_lasting: Whether that copy lives through the whole step (levels 0 to 2) or only
            while its stage or layer runs (level 3).
        grad_bytes: Gradient accumulator; 0 if frozen.
        optimizer_bytes: Optimizer state; 0 if frozen.
    """

    stored_bytes: int = 0
    compute_bytes: int = 0
    is_compute_lasting: bool = True
    grad_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the parts, the compute copy included."""
        return self.stored_bytes + self.compute_bytes + self.grad_bytes + self.optimizer_bytes


def parameter_state_bytes(
    parameter: TensorMeta,
    *,
    optimizer: str = "adamw",
    zero_level: int = 0,
    dp: int = 1,
    master_dtype: str | None = None,
    requires_grad: bool = True,
) -> StateBytes:
    """Bytes of one parameter's state on one rank.

    Args:
        parameter: Shape on the tensor-parallel rank (whole over dp) and compute dtype.
        optimizer: An :class:`OptimizerKind` or its text.
        zero_level: 0 to 3.
        dp: Ranks that the state may be spread over.
        master_dtype: Of stored parameter, gradient and state; the compute dtype if left out.
        requires_grad: Frozen parameters have neither gradient nor state. They are spread over dp
            at level 3 only.

    Raises:
        ConfigError: ``zero_level`` or ``dp`` is out of range, or the optimizer is not known.
    """
    if zero_level not in (0, 1, 2, 3):
        raise ConfigError(f"zero_level is {zero_level}, must be 0, 1, 2 or 3")
    if dp < 1:
        raise ConfigError(f"dp is {dp}, must be at least 1")
    master = TensorMeta(parameter.shape, master_dtype or parameter.dtype)
    share = shard_meta(master, dp)
    is_spread = dp > 1 and zero_level >= (1 if requires_grad else 3)
    needs_copy = is_spread or master.dtype != parameter.dtype
    stored = share if is_spread else master
    summed = TensorMeta(master.shape, sum_dtype(master.dtype))
    if zero_level >= 2:
        summed = shard_meta(summed, dp)
    return StateBytes(
        stored_bytes=stored.bytes,
        compute_bytes=parameter.bytes if needs_copy else 0,
        is_compute_lasting=zero_level < 3 or not is_spread,
        grad_bytes=summed.bytes if requires_grad else 0,
        optimizer_bytes=optimizer_state_bytes(optimizer, stored) if requires_grad else 0,
    )


def shard_meta(meta: TensorMeta, parts: int) -> TensorMeta:
    """The largest of ``parts`` blocks of dim 0; a scalar is not cut.

    >>> str(shard_meta(TensorMeta((10, 4), "float32"), 4))
    'float32[3, 4]'
    """
    if not meta.shape or parts == 1:
        return meta
    return TensorMeta((-(-meta.shape[0] // parts), *meta.shape[1:]), meta.dtype)
