"""Sums, maxima, scans, softmax and sorting.

A sum over a split dim is a pending sum, a maximum a pending maximum. Where the result is no
simple reduction of the parts' results the dim is whole; softmax has a lowering instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from autopar.sharding.placement import Shard
from autopar.sharding.rules.call import Naming, OpCall, Rule, normal_dim
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature

_IDENTITY = {"sum": 0.0, "max": -inf, "min": inf}


def _reduce(call: OpCall, dims: Sequence[int] | None, op: str | None) -> OpSignature:
    """A reduction of ``dims``, all if None or empty.

    Args:
        call: The call.
        dims: Dims that are reduced.
        op: Reduction that completes the parts' results; None keeps the dims whole.
    """
    naming = Naming()
    shape, target = call.shape(0), call.result_shape()
    gone = {normal_dim(d, len(shape)) for d in dims or range(len(shape))}
    inputs = naming.dims(shape, whole=gone if op is None else ())
    kept = len(target) == len(shape) and len(shape) > 0
    outputs: Dims = tuple(
        () if i in gone else names for i, names in enumerate(inputs) if kept or i not in gone
    )
    lost = {f"d{i}" for i in gone}
    fill, maskable = _fill(call, op)
    return naming.build(
        [inputs],
        [outputs for _ in call.results],
        reductions=dict.fromkeys(sorted(lost), op) if op is not None else {},
        padded=naming.sizes.keys() - (set() if maskable else lost),
        pad_fill=fill,
    )


def _fill(call: OpCall, op: str | None) -> tuple[float, bool]:
    """Value that leaves a reduction unchanged, and whether the operand's dtype can hold it."""
    meta, result = call.operands[0], call.results[0]
    if op is None or meta is None:
        return 0.0, False
    if meta.dtype == "bool" or (result is not None and result.dtype == "bool"):
        return float(op == "min"), True
    return _IDENTITY[op], op == "sum" or meta.is_float


def _with_linear(signature: OpSignature, call: OpCall) -> OpSignature:
    return Naming(dict(signature.sizes), set(signature.whole)).build(
        signature.inputs,
        signature.outputs,
        reductions=signature.reductions,
        linear=call.linear_positions((0,)),
        padded=signature.padded,
        pad_fill=signature.pad_fill,
    )


def _sum(call: OpCall) -> OpSignature:
    """``sum(x, dims?, keepdim)``: linear, and its parts add up."""
    return _with_linear(_reduce(call, call.integers(1), "sum"), call)


def _mean(call: OpCall) -> OpSignature:
    """``mean``: its dims are whole (capture writes it as a sum over a static count)."""
    return _with_linear(_reduce(call, call.integers(1), None), call)


def _over_dims(op: str | None, position: int = 1) -> Rule:
    """Rule of ``f(x, dims?, ...)`` with the dims at ``position``."""
    return lambda call: _reduce(call, call.integers(position), op)


def _over_all(op: str | None) -> Rule:
    """Rule of ``f(x)`` over every dim."""
    return lambda call: _reduce(call, None, op)


def _along_dim(position: int, default: int = -1, *, linear: bool = False) -> Rule:
    """Rule of ``f(x, ..., dim, ...)`` whose results keep the dim, which is whole.

    The results may be longer or shorter along the dim (``topk``).
    """

    def rule(call: OpCall) -> OpSignature:
        naming = Naming()
        shape = call.shape(0)
        dim = normal_dim(call.integer(position, default), len(shape))
        inputs = naming.dims(shape, whole=(dim,))
        size = call.result_shape()[dim] if shape else 1
        along = inputs[dim : dim + 1] if size == (*shape, 1)[dim] else ((),)
        outputs = (*inputs[:dim], *along, *inputs[dim + 1 :]) if shape else ()
        return naming.build(
            [inputs],
            [outputs for _ in call.results],
            linear=call.linear_positions((0,)) if linear else (),
            padded=naming.sizes.keys() - naming.whole,
        )

    return rule


def _argument(call: OpCall) -> OpSignature:
    """``argmax(x, dim?, keepdim)``: an index has no meaning within a part."""
    return _reduce(call, call.integers(1), None)


def _histogram(call: OpCall) -> OpSignature | None:
    """``histc(x, bins, low, high)``: counts add up, unless the range is taken from the values."""
    if call.arg(2, 0) == call.arg(3, 0):
        return None
    naming = Naming()
    dims = naming.dims(call.shape(0))
    lost = dict.fromkeys(sorted(naming.sizes), "sum")
    return naming.build(
        [dims], [(naming.dim("bins", call.result_shape()[0], whole=True),)], reductions=lost
    )


def _softmax(lowering: str) -> Rule:
    """Rule of ``softmax(x, dim, half_to_float)``."""

    def rule(call: OpCall) -> OpSignature:
        naming = Naming()
        rank = len(call.shape(0))
        dim = normal_dim(call.integer(1), rank)
        dims = naming.dims(call.shape(0), whole=(dim,))
        return naming.build(
            [dims],
            [dims],
            extra=_sharded_dim(naming, dim, 1, lowering),
            padded=naming.sizes,
        )

    return rule


def _softmax_backward(lowering: str) -> Rule:
    """Rule of ``softmax_backward(dy, y, dim, dtype)``; linear in dy."""

    def rule(call: OpCall) -> OpSignature:
        naming = Naming()
        rank = len(call.shape(0))
        dim = normal_dim(call.integer(2), rank)
        dims = naming.dims(call.shape(0), whole=(dim,))
        return naming.build(
            [dims, dims],
            [dims],
            linear=call.linear_positions((0,)),
            extra=_sharded_dim(naming, dim, 2, lowering),
            padded=naming.sizes,
        )

    return rule


def _sharded_dim(
    naming: Naming, dim: int, operands: int, lowering: str
) -> tuple[AxisStrategy, ...]:
    """The special split with every tensor sharded on ``dim``."""
    factor = f"d{dim}"
    if factor not in naming.sizes:
        return ()
    return (AxisStrategy((Shard(dim),) * operands, (Shard(dim),), factor, lowering),)


def _whole_dims(count: int, *, linear: bool) -> Rule:
    """Rule of operators that mix only the last ``count`` dims (``tril``)."""

    def rule(call: OpCall) -> OpSignature:
        naming = Naming()
        rank = len(call.shape(0))
        dims = naming.dims(call.shape(0), whole=range(max(rank - count, 0), rank))
        return naming.build(
            [dims],
            [dims],
            linear=call.linear_positions((0,)) if linear else (),
            padded=naming.sizes.keys() - naming.whole,
        )

    return rule


RULES: Mapping[str, Rule] = {
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
    "aten.mean.dim": _mean,
    "aten.mean.default": _mean,
    "aten.amax.default": _over_dims("max"),
    "aten.amin.default": _over_dims("min"),
    "aten.max.default": _over_all("max"),
    "aten.min.default": _over_all("min"),
    "aten.any.default": _over_all("max"),
    "aten.any.dim": _over_dims("max"),
    "aten.any.dims": _over_dims("max"),
    "aten.all.default": _over_all("min"),
    "aten.all.dim": _over_dims("min"),
    "aten.all.dims": _over_dims("min"),
    "aten.max.dim": _over_dims(None),
    "aten.min.dim": _over_dims(None),
    "aten.prod.default": _over_all(None),
    "aten.prod.dim_int": _over_dims(None),
    "aten.var.correction": _over_dims(None),
    "aten.std.correction": _over_dims(None),
    "aten.var_mean.correction": _over_dims(None),
    "aten.logsumexp.default": _over_dims(None),
    "aten.linalg_vector_norm.default": _over_dims(None, 2),
    "aten.argmax.default": _argument,
    "aten.argmin.default": _argument,
    "aten.histc.default": _histogram,
    "aten.topk.default": _along_dim(2),
    "aten.sort.default": _along_dim(1),
    "aten.cumsum.default": _along_dim(1, linear=True),
    "aten.cumprod.default": _along_dim(1),
    "aten.logcumsumexp.default": _along_dim(1),
    "aten.tril.default": _whole_dims(2, linear=True),
    "aten.triu.default": _whole_dims(2, linear=True),
    "aten._softmax.default": _softmax("softmax"),
    "aten._log_softmax.default": _softmax("log_softmax"),
    "aten._softmax_backward_data.default": _softmax_backward("softmax_backward"),
    "aten._log_softmax_backward_data.default": _softmax_backward("log_softmax_backward"),
}
"""Rules by operator name."""
