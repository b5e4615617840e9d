"""Operators that work element by element, with broadcasting.

Every dim of the result is a factor of its own. An operator is linear in an argument alone
(``mul``), or in two together (``add``: both must be pending sums, because a whole value that is
added on every rank is added several times).
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Dtype, Ref
from autopar.sharding.rules.call import Naming, OpCall, Rule, broadcast_dims
from autopar.sharding.signature import OpSignature

Groups = tuple[tuple[int, ...], ...]

_UNARY = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "cos",
    "cosh", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac", "gelu",
    "hardsigmoid", "hardswish", "hardtanh", "isfinite", "isinf", "isnan", "lgamma", "log",
    "log10", "log1p", "log2", "logical_not", "logit", "mish", "nan_to_num", "reciprocal", "relu",
    "relu6", "round", "rsqrt", "selu", "sgn", "sigmoid", "sign", "silu", "sin", "sinc", "sinh",
    "softplus", "sqrt", "square", "tan", "tanh", "trunc", "elu", "celu", "leaky_relu",
    "threshold", "clamp", "clamp_min", "clamp_max", "hardshrink", "softshrink", "signbit",
    "log_sigmoid", "angle",
)  # fmt: skip
"""Operators of aten with the overload ``default``."""

_OTHER = (
    "add.Scalar", "sub.Scalar", "rsub.Scalar", "mul.Scalar", "div.Scalar", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "round.decimals", "clamp.Tensor", "clamp_min.Tensor",
    "clamp_max.Tensor", "maximum.default", "minimum.default", "fmax.default", "fmin.default",
    "atan2.default", "hypot.default", "logaddexp.default", "logaddexp2.default", "xlogy.Tensor",
    "copysign.Tensor", "copysign.Scalar", "fmod.Tensor", "fmod.Scalar", "remainder.Tensor",
    "remainder.Scalar", "floor_divide.default", "floor_divide.Scalar", "eq.Tensor", "eq.Scalar",
    "ne.Tensor", "ne.Scalar", "lt.Tensor", "lt.Scalar", "le.Tensor", "le.Scalar", "gt.Tensor",
    "gt.Scalar", "ge.Tensor", "ge.Scalar", "logical_and.default", "logical_or.default",
    "logical_xor.default", "bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_or.Tensor",
    "bitwise_or.Scalar", "bitwise_xor.Tensor", "bitwise_xor.Scalar", "bitwise_left_shift.Tensor",
    "bitwise_left_shift.Tensor_Scalar", "bitwise_right_shift.Tensor",
    "bitwise_right_shift.Tensor_Scalar", "__and__.Tensor", "__or__.Tensor", "__xor__.Tensor",
    "_prelu_kernel.default",
)  # fmt: skip
"""Further operators of aten, with their overload."""

_LINEAR: Mapping[str, Groups] = {
    "aten.add.Tensor": ((0, 1),),
    "aten.sub.Tensor": ((0, 1),),
    "aten.rsub.Tensor": ((0, 1),),
    "aten.mul.Tensor": ((0,), (1,)),
    "aten.mul.Scalar": ((0,),),
    "aten.div.Tensor": ((0,),),
    "aten.div.Scalar": ((0,),),
    "aten.true_divide.Tensor": ((0,),),
    "aten.neg.default": ((0,),),
    "aten.positive.default": ((0,),),
    "aten.conj_physical.default": ((0,),),
    "aten.complex.default": ((0, 1),),
    "aten.polar.default": ((0,),),
    "aten.clone.default": ((0,),),
    "aten.contiguous.default": ((0,),),
    "aten._to_copy.default": ((0,),),
    "aten.where.self": ((1, 2),),
    "aten.lerp.Scalar": ((0, 1),),
    "aten.lerp.Tensor": ((0, 1),),
    "aten.addcmul.default": ((0, 1), (0, 2)),
    "aten.addcdiv.default": ((0, 1),),
    "aten.masked_fill.Tensor": ((0, 2),),
    "aten.copy.default": ((1,),),
    "aten.tanh_backward.default": ((0,),),
    "aten.sigmoid_backward.default": ((0,),),
    "aten.gelu_backward.default": ((0,),),
    "aten.silu_backward.default": ((0,),),
    "aten.mish_backward.default": ((0,),),
    "aten.elu_backward.default": ((0,),),
    "aten.leaky_relu_backward.default": ((0,),),
    "aten.softplus_backward.default": ((0,),),
    "aten.threshold_backward.default": ((0,),),
    "aten.hardtanh_backward.default": ((0,),),
    "aten.hardsigmoid_backward.default": ((0,),),
    "aten.hardswish_backward.default": ((0,),),
    "aten.logit_backward.default": ((0,),),
    "autopar.dropout_backward.default": ((0,),),
}
"""Argument positions that pass pending sums; a tuple of two must be pending together."""

_INTEGER_DIVISIONS = frozenset(
    f"aten.{name}"
    for name in (
        "div.Tensor_mode", "div.Scalar_mode", "floor_divide.default", "floor_divide.Scalar",
        "fmod.Tensor", "fmod.Scalar", "remainder.Tensor", "remainder.Scalar",
    )
)  # fmt: skip


def elementwise(call: OpCall, linear: Groups = ()) -> OpSignature:
    """Named dims of an element-wise operator.

    Args:
        call: The call; every result has the broadcast shape of the operands.
        linear: Argument positions that pass pending sums.
    """
    naming = Naming()
    target = call.result_shape()
    outputs = naming.dims(target)
    inputs = [
        None if meta is None else broadcast_dims(naming, meta.shape, target)
        for meta in call.operands
    ]
    return naming.build(
        inputs,
        [None if meta is None else outputs for meta in call.results],
        linear=call.linear_positions(*linear),
        padded=() if _may_trap(call) else naming.sizes,
    )


def _may_trap(call: OpCall) -> bool:
    """Whether garbage in padding can stop the program: an integer division by zero does."""
    return call.op in _INTEGER_DIVISIONS and not any(m and m.is_float for m in call.results)


def _linear_rule(groups: Groups) -> Rule:
    return lambda call: elementwise(call, groups)


def _add(call: OpCall) -> OpSignature:
    """Addition or subtraction; adding the number 0 passes a pending sum, any other does not."""
    if call.operand(0) is not None and call.operand(1) is not None:
        return elementwise(call, ((0, 1),))
    return elementwise(call, tuple((i,) for i in (0, 1) if call.arg(1 - i) == 0))


def _div_mode(call: OpCall) -> OpSignature:
    """Division; rounding ends linearity."""
    return elementwise(call, ((0,),) if call.kwarg("rounding_mode") is None else ())


def _where_scalar(x: int, other: int) -> Rule:
    """A choice between a tensor at ``x`` and a number at ``other``: linear if the number is 0."""
    return lambda call: elementwise(call, ((x,),) if call.arg(other) == 0 else ())


def _to_copy(call: OpCall) -> OpSignature:
    """A cast. Parts of a sum keep their value under a cast to a float, not to an int or bool."""
    dtype = call.kwarg("dtype")
    narrows = isinstance(dtype, Dtype) and call.operands[0] is not None and dtype.name == "bool"
    return elementwise(call, () if narrows else ((0,),))


def _pow(call: OpCall) -> OpSignature:
    """A power; the first one is the identity."""
    exponent = call.arg(1)
    first = not isinstance(exponent, Ref) and exponent == 1
    return elementwise(call, ((0,),) if first else ())


def _log_sigmoid(call: OpCall) -> OpSignature | None:
    """Log-sigmoid; its second result is a buffer whose shape depends on the device."""
    same = len(call.results) == 1 or call.result_shape(0) == call.result_shape(1)
    return elementwise(call) if same else None


def _complex_view(call: OpCall) -> OpSignature:
    """Real pairs to complex numbers or back: the last dim of the real side is whole."""
    naming = Naming()
    shape, target = call.shape(0), call.result_shape()
    common = min(len(shape), len(target))
    tail: tuple[tuple[str, ...], ...] = (naming.dim("pair", 2, whole=True),)
    dims = naming.dims(shape[:common])
    return naming.build(
        [dims + (tail if len(shape) > common else ())],
        [dims + (tail if len(target) > common else ())],
        linear=(frozenset({0}),),
        padded=naming.sizes.keys() - naming.whole,
        free=True,
    )


RULES: Mapping[str, Rule] = {
    **{f"aten.{name}.default": elementwise for name in _UNARY},
    **{f"aten.{name}": elementwise for name in _OTHER},
    **{name: _linear_rule(groups) for name, groups in _LINEAR.items()},
    "aten.add.Tensor": _add,
    "aten.add.Scalar": _add,
    "aten.sub.Tensor": _add,
    "aten.sub.Scalar": _add,
    "aten.rsub.Scalar": _add,
    "aten.div.Tensor_mode": _div_mode,
    "aten.div.Scalar_mode": _div_mode,
    "aten.pow.Tensor_Scalar": _pow,
    "aten._to_copy.default": _to_copy,
    "aten.where.ScalarOther": _where_scalar(1, 2),
    "aten.where.ScalarSelf": _where_scalar(2, 1),
    "aten.masked_fill.Scalar": _where_scalar(0, 2),
    "aten.log_sigmoid_forward.default": _log_sigmoid,
    "aten.view_as_complex.default": _complex_view,
    "aten.view_as_real.default": _complex_view,
}
"""Rules by operator name."""
