"""Which operator runs in which precision: data, read by :mod:`autopar.ir.precision` and the report.

An operator is listed under its name without the overload. What is not listed runs as the model's
own code says. The lists are ours and hold on every device: torch's autocast has one list for CPUs
and another for GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

PRECISIONS: Mapping[str, str] = MappingProxyType(
    {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
)
"""Words of ``precision=`` -> dtype of the operators of the family ``low``."""

LARGEST: Mapping[str, float] = MappingProxyType(
    {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
)
"""Largest finite number of each dtype: an operator with a larger one does not run in it."""

WIDE = "float32"
HALVES = frozenset({"float16", "bfloat16"})


def sum_dtype(dtype: str) -> str:
    """Dtype in which gradients of parameters of ``dtype`` are summed."""
    return WIDE if dtype in HALVES else dtype


class Family(StrEnum):
    """How the precision of an operator is chosen."""

    LOW = "low"
    FLOAT32 = "float32"
    FOLLOW = "follow"


FAMILY_WORDS: Mapping[Family, str] = MappingProxyType(
    {
        Family.LOW: "products, convolutions, attention, lookups: in the low precision",
        Family.FLOAT32: "softmax, norms, losses, sums, exponentials: in float32",
        Family.FOLLOW: "all else that is element-wise or moves data: in the widest of its operands",
    }
)


@dataclass(frozen=True, slots=True)
class PrecisionRule:
    """Precision of one operator.

    Attributes:
        family: How it is chosen.
        operands: Positions of the arguments that are cast; None for every float tensor. Others
            are read as they are.
        wide_results: Numbers of the results that are in float32 all the same.
        has_dtype: Whether it takes ``dtype=``, which widens without a copy of the operand.
        mirrors: (result, argument): the result has the dtype of that argument.
    """

    family: Family
    operands: tuple[int, ...] | None = None
    wide_results: tuple[int, ...] = ()
    has_dtype: bool = False
    mirrors: tuple[tuple[int, int], ...] = ()


_LOW = (
    "aten.mm", "aten.bmm", "aten.matmul", "aten._grouped_mm", "aten.convolution",
    "aten.embedding",
)  # fmt: skip

_SUMS = ("aten.sum", "aten.prod", "aten.cumsum", "aten.cumprod")
"""They take ``dtype=``."""

_FLOAT32 = (
    # softmax, norms
    "aten._softmax", "aten._softmax_backward_data", "aten._log_softmax",
    "aten._log_softmax_backward_data", "aten.logsumexp", "aten.log_sigmoid_forward",
    "aten.log_sigmoid_backward", "aten.native_layer_norm", "aten.native_layer_norm_backward",
    "aten._fused_rms_norm", "aten._fused_rms_norm_backward", "aten.native_group_norm",
    "aten.native_group_norm_backward", "autopar.batch_norm", "autopar.batch_norm_backward",
    "aten.linalg_vector_norm", "aten.native_batch_norm", "aten.native_batch_norm_backward",
    # losses
    "autopar.nll_loss_sum", "autopar.nll_loss_backward", "aten.mse_loss",
    "aten.mse_loss_backward", "aten.smooth_l1_loss", "aten.smooth_l1_loss_backward",
    "aten.huber_loss", "aten.huber_loss_backward", "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_backward", "aten.binary_cross_entropy_with_logits",
    # sums into few places, many terms each
    "aten.embedding_dense_backward", "aten.scatter_add", "aten.index_add", "aten.index_put",
    "aten._unsafe_index_put", "aten.scatter_reduce", "aten.std", "aten.var", "aten.logcumsumexp",
    # functions whose values or slopes grow large
    "aten.acos", "aten.acosh", "aten.asin", "aten.asinh", "aten.atanh", "aten.cos", "aten.cosh",
    "aten.digamma", "aten.erfinv", "aten.exp", "aten.exp2", "aten.expm1", "aten.lgamma", "aten.log",
    "aten.log10", "aten.log1p", "aten.log2", "aten.logaddexp", "aten.logaddexp2", "aten.logit",
    "aten.pow", "aten.reciprocal", "aten.rsqrt", "aten.sin", "aten.sinh", "aten.softplus",
    "aten.softplus_backward", "aten.sqrt", "aten.tan", "aten.xlogy",
)  # fmt: skip

_FOLLOW = (
    # views and moves
    "aten.view", "aten.permute", "aten.expand", "aten.slice", "aten.select", "aten.cat",
    "aten.stack", "aten.constant_pad_nd", "aten.index", "aten.index_select", "aten.gather",
    "aten.flip", "aten.roll", "aten.repeat", "aten.clone", "aten.unfold", "aten.unfold_backward",
    "aten.tril", "aten.triu", "aten.im2col", "aten.col2im", "aten.select_scatter",
    "aten.slice_scatter", "aten.scatter", "aten.index_fill", "aten.diagonal", "aten.sort",
    "aten.topk", "aten.squeeze", "aten.unsqueeze", "aten.repeat_interleave",
    # element-wise
    "aten.add", "aten.sub", "aten.mul", "aten.div", "aten.neg", "aten.abs", "aten.sign",
    "aten.relu", "aten.relu6", "aten.gelu", "aten.silu", "aten.mish", "aten.elu", "aten.celu",
    "aten.selu", "aten.leaky_relu", "aten.tanh", "aten.sigmoid", "aten.erf", "aten.hardtanh",
    "aten.hardswish", "aten.hardsigmoid", "aten._prelu_kernel", "aten.threshold",
    "aten.maximum", "aten.minimum", "aten.clamp", "aten.clamp_min", "aten.clamp_max",
    "aten.where", "aten.masked_fill", "aten.floor", "aten.ceil", "aten.round", "aten.trunc",
    "aten.lerp", "aten.addcmul", "aten.addcdiv", "aten.nan_to_num",
    "aten.eq", "aten.ne", "aten.lt", "aten.le", "aten.gt", "aten.ge", "aten.isnan", "aten.isinf",
    "aten.isfinite", "aten.logical_not",
    "aten.gelu_backward", "aten.silu_backward", "aten.mish_backward", "aten.elu_backward",
    "aten.leaky_relu_backward", "aten.tanh_backward", "aten.sigmoid_backward",
    "aten.threshold_backward", "aten.hardtanh_backward", "aten.hardswish_backward",
    "aten.hardsigmoid_backward", "aten._prelu_kernel_backward",
    "autopar.dropout", "autopar.dropout_backward",
    # the largest or smallest, and pools
    "aten.amax", "aten.amin", "aten.argmax", "aten.argmin", "aten.max", "aten.min",
    "aten.max_pool2d_with_indices", "aten.max_pool2d_with_indices_backward", "aten.avg_pool2d",
    "aten.avg_pool2d_backward", "aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool2d_backward",
    "aten.upsample_nearest2d", "aten.upsample_nearest2d_backward", "aten.upsample_bilinear2d",
    "aten.upsample_bilinear2d_backward",
)  # fmt: skip

RULES: Mapping[str, PrecisionRule] = MappingProxyType(
    {
        **dict.fromkeys(_LOW, PrecisionRule(Family.LOW)),
        **dict.fromkeys(_SUMS, PrecisionRule(Family.FLOAT32, has_dtype=True)),
        **dict.fromkeys(_FLOAT32, PrecisionRule(Family.FLOAT32)),
        **dict.fromkeys(_FOLLOW, PrecisionRule(Family.FOLLOW)),
        "aten.convolution_backward": PrecisionRule(Family.LOW, operands=(0, 1, 2)),
        # the mask keeps its dtype: its least numbers have no place in float16
        "autopar.attention": PrecisionRule(Family.LOW, operands=(0, 1, 2), wide_results=(1,)),
        "autopar.attention_backward": PrecisionRule(
            Family.LOW, operands=(0, 1, 2, 3, 4), mirrors=((3, 6),)
        ),
    }
)
"""By operator name without the overload."""

PROMOTING = frozenset(
    f"aten.{name}"
    for name in ("add", "sub", "mul", "div", "where", "maximum", "minimum", "eq", "ne", "lt", "le",
                 "gt", "ge", "cat")
)  # fmt: skip
"""Operators whose kernels take operands of several dtypes and give the widest: no cast needed."""

VIEWS = frozenset(
    f"aten.{name}" for name in ("view", "permute", "expand", "slice", "select", "squeeze",
                                "unsqueeze")
)  # fmt: skip
"""Operators that only look at a tensor: of a parameter they are read in the reader's precision."""

WHOLE_VIEWS = VIEWS - {"aten.slice", "aten.select"}
"""Views of all elements: a cast to a narrower type is made below them, once for all of them."""


def rule_of(op: str) -> PrecisionRule | None:
    """The rule of ``"aten.<name>.<overload>"`` or ``"autopar.<name>"``; None if there is none.

    >>> rule_of("aten.mm.default").family.value
    'low'
    """
    return RULES.get(short_name(op))


def short_name(op: str) -> str:
    """An operator's name without the overload."""
    return ".".join(op.split(".")[:2])
