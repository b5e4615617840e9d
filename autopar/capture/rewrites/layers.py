"""Rules for operators with randomness, statistics or labels: the neutral operators take over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from autopar.capture.checks import random_refusal
from autopar.capture.rewrites.builder import Builder, Rule, Value
from autopar.ir.graph import Arg, Dtype, Node, Ref, TensorMeta

_HALF = frozenset({"float16", "bfloat16"})
_MEAN, _SUM = 1, 2  # torch's codes of reductions; 0 is none


def _meta_at(node: Node, index: int) -> TensorMeta:
    assert isinstance(node.meta, tuple)
    meta = node.meta[index]
    assert meta is not None
    return meta


def _result(node: Node) -> TensorMeta:
    assert isinstance(node.meta, TensorMeta), node
    return node.meta


def _float(arg: Arg) -> float:
    assert isinstance(arg, int | float), arg
    return float(arg)


def _stat_dtype(dtype: str) -> str:
    return "float32" if dtype in _HALF else dtype


def _dropout(b: Builder, node: Node) -> Value:
    x, p_arg, train = node.args
    p = _float(p_arg)
    meta = b.meta(x)
    if p == 0 or train is False:
        assert isinstance(x, Ref)
        return x, b.full(meta.shape, True, "bool")
    zeros = (0,) * len(meta.shape)
    args: tuple[Arg, ...] = (x, b.rng_key(), p, b.random_id(), meta.shape, zeros)
    return b.emit_tuple("autopar.dropout", args, (meta, replace(meta, dtype="bool")))


def _dropout_backward(b: Builder, node: Node) -> Value:
    dy, kept, scale = node.args
    assert isinstance(dy, Ref)
    source = b.producer(kept)
    if source is not None and source.op == "aten.full.default":
        return dy
    factor = _float(scale)
    p = 1.0 - 1.0 / factor if factor else 1.0
    origin = b.producer(source.args[0]) if source is not None else None
    if origin is not None and origin.op == "autopar.dropout":
        p = _float(origin.args[2])  # exactly the number of the forward
    return b.emit("autopar.dropout_backward", (dy, kept, p), _result(node))


def _uniform(b: Builder, meta: TensorMeta, op: str = "autopar.uniform") -> Ref:
    zeros = (0,) * len(meta.shape)
    args = (b.rng_key(), b.random_id(), meta.shape, meta.shape, zeros, Dtype(meta.dtype))
    return b.emit(op, args, meta)


def _rand(b: Builder, node: Node) -> Value:
    return _uniform(b, _result(node))


def _randn(b: Builder, node: Node) -> Value:
    return _uniform(b, _result(node), "autopar.normal")


def _uniform_between(b: Builder, node: Node) -> Value:
    low, high = _float(node.args[1]), _float(node.args[2])
    return b.binary("add", b.binary("mul", _uniform(b, _result(node)), high - low), low)


def _normal_around(b: Builder, node: Node) -> Value:
    mean, std = _float(node.args[1]), _float(node.args[2])
    drawn = _uniform(b, _result(node), "autopar.normal")
    return b.binary("add", b.binary("mul", drawn, std), mean)


def _bernoulli(b: Builder, node: Node) -> Value:
    meta = _result(node)
    drawn = _uniform(b, TensorMeta(meta.shape, "float32"))
    truth = replace(meta, dtype="bool")
    if len(node.args) > 1 and not isinstance(node.args[1], Ref):
        below = b.emit("aten.lt.Scalar", (drawn, _float(node.args[1])), truth)
    else:
        below = b.emit("aten.lt.Tensor", (drawn, node.args[-1]), truth)
    return b.cast(below, meta.dtype)


def _randint(b: Builder, node: Node) -> Value:
    meta = _result(node)
    bounds = [int(_float(a)) for a in node.args if isinstance(a, int | float)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    drawn = b.binary("mul", _uniform(b, TensorMeta(meta.shape, "float32")), high - low)
    whole = b.cast(b.unary("floor", drawn), meta.dtype)
    return b.binary("add", whole, low) if low else whole


def unknown_random(_: Builder, node: Node) -> Value:
    """Refuse an operator whose random numbers would depend on the plan."""
    raise random_refusal(node)


def _batch_norm(b: Builder, node: Node) -> Value:
    if node.op.endswith("no_stats"):
        x, w, bias, train, momentum, eps = node.args
        mean: Arg = None
        var: Arg = None
    else:
        x, w, bias, mean, var, train, momentum, eps = node.args
    if not train:
        return _normalised_by_running(b, x, w, bias, mean, var, eps)
    meta = b.meta(x)
    stat = TensorMeta((meta.shape[1],), _stat_dtype(meta.dtype))
    running = b.meta(mean) if mean is not None else None
    args = (x, w, bias, mean, var, momentum, eps)
    return b.emit_tuple("autopar.batch_norm", args, (meta, stat, stat, running, running))


def _batch_norm_inference(b: Builder, node: Node) -> Value:
    x, w, bias, mean, var, _, eps = node.args
    return _normalised_by_running(b, x, w, bias, mean, var, eps)


def _per_channel(b: Builder, value: Arg, rank: int) -> Ref:
    return b.view(value, (b.shape(value)[0], *(1,) * (rank - 2)))


def _inverse_deviation(b: Builder, var: Arg, eps: Arg) -> Ref:
    shifted = b.binary("add", var, _float(eps))
    return b.unary("rsqrt", shifted)


def _normalised_by_running(
    b: Builder, x: Arg, w: Arg, bias: Arg, mean: Arg, var: Arg, eps: Arg
) -> Value:
    """Evaluation mode: element-wise."""
    meta = b.meta(x)
    rank = len(meta.shape)
    inverse = _inverse_deviation(b, var, eps)
    wide = b.meta(inverse).dtype
    out = b.binary("sub", b.cast(x, wide), _per_channel(b, mean, rank))
    out = b.binary("mul", out, _per_channel(b, inverse, rank))
    if w is not None:
        out = b.binary("mul", out, _per_channel(b, w, rank))
    if bias is not None:
        out = b.binary("add", out, _per_channel(b, bias, rank))
    assert isinstance(mean, Ref)
    assert isinstance(var, Ref)
    return b.cast(out, meta.dtype), mean, inverse, mean, var


def _batch_norm_backward(b: Builder, node: Node) -> Value:
    dy, x, w, running_mean, running_var, mean, invstd, train, eps, _ = node.args
    meta = b.meta(x)
    affine = b.meta(w) if w is not None else None
    if train:
        args = (dy, x, w, mean, invstd, eps)
        return b.emit_tuple("autopar.batch_norm_backward", args, (meta, affine, affine))
    rank = len(meta.shape)
    inverse = _inverse_deviation(b, running_var, eps)
    wide = b.meta(inverse).dtype
    grad = b.cast(dy, wide)
    dx = b.binary("mul", grad, _per_channel(b, inverse, rank))
    if w is None:
        return b.cast(dx, meta.dtype), None, None
    dx = b.binary("mul", dx, _per_channel(b, w, rank))
    others = [d for d in range(rank) if d != 1]
    centred = b.binary("sub", b.cast(x, wide), _per_channel(b, running_mean, rank))
    scaled = b.binary("mul", centred, _per_channel(b, inverse, rank))
    dw = b.sum(b.binary("mul", grad, scaled), others, keepdim=False)
    db = b.sum(grad, others, keepdim=False)
    dtype = b.meta(w).dtype
    return b.cast(dx, meta.dtype), b.cast(dw, dtype), b.cast(db, dtype)


def _flat_classes(b: Builder, logp: Arg, target: Arg) -> tuple[Ref, Ref]:
    """Log-probabilities as (N, C) and labels as (N,), from (C), (N, C) or (N, C, H, W)."""
    shape = b.shape(logp)
    if len(shape) == 1:
        return b.view(logp, (1, *shape)), b.view(target, (1,))
    if len(shape) > 2:
        last = b.permute(logp, (0, *range(2, len(shape)), 1))
        return b.view(last, (-1, shape[1])), b.view(target, (-1,))
    assert isinstance(logp, Ref)
    assert isinstance(target, Ref)
    return logp, target


def _nll_forward(b: Builder, node: Node) -> Value:
    logp, target, weight, reduction, ignore_index = node.args
    flat, labels = _flat_classes(b, logp, target)
    meta = _meta_at(node, 0)
    if reduction not in (_MEAN, _SUM):
        each = _nll_each(b, flat, labels, weight, ignore_index)
        return b.view(each, meta.shape), b.full((), 0, _meta_at(node, 1).dtype)
    wide = _stat_dtype(meta.dtype)
    scalar = TensorMeta((), wide)
    total = b.emit("autopar.nll_loss_sum", (flat, labels, weight, ignore_index), scalar)
    count = b.emit("autopar.nll_count", (labels, weight, ignore_index, Dtype(wide)), scalar)
    loss = b.binary("div", total, count) if reduction == _MEAN else total
    return b.cast(loss, meta.dtype), count


def _nll_each(b: Builder, logp: Ref, labels: Ref, weight: Arg, ignore_index: Arg) -> Ref:
    (rows, _), dtype = b.shape(logp), b.meta(logp).dtype
    counts = b.emit("aten.ne.Scalar", (labels, ignore_index), TensorMeta((rows,), "bool"))
    zero = b.full((), 0, b.meta(labels).dtype)
    label = b.emit("aten.where.self", (counts, labels, zero), b.meta(labels))
    column = b.view(label, (rows, 1))
    picked = b.emit("aten.gather.default", (logp, 1, column), TensorMeta((rows, 1), dtype))
    each = b.unary("neg", b.view(picked, (rows,)))
    if weight is not None:
        scale = b.emit(
            "aten.index_select.default", (weight, 0, label),
            TensorMeta((rows,), b.meta(weight).dtype),
        )  # fmt: skip
        each = b.binary("mul", each, scale)
    none = b.full((), 0.0, dtype)
    return b.emit("aten.where.self", (counts, each, none), TensorMeta((rows,), dtype))


def _nll_backward(b: Builder, node: Node) -> Value:
    grad, _, target, weight, reduction, ignore_index, count = node.args
    meta = _result(node)
    shape = meta.shape
    flat_shape = (1, *shape) if len(shape) == 1 else (prod(shape) // shape[1], shape[1])
    labels = b.view(target, (flat_shape[0],))
    wide = b.cast(grad, _stat_dtype(b.meta(grad).dtype))
    if reduction == _MEAN:
        wide = b.binary("div", wide, b.cast(count, b.meta(wide).dtype))
    elif reduction != _SUM:
        wide = b.view(wide, (flat_shape[0],))
    args = (wide, labels, weight, ignore_index, flat_shape[1], Dtype(meta.dtype))
    dlogp = b.emit("autopar.nll_loss_backward", args, TensorMeta(flat_shape, meta.dtype))
    if len(shape) > 2:
        last = b.view(dlogp, (shape[0], *shape[2:], shape[1]))
        return b.permute(last, (0, len(shape) - 1, *range(1, len(shape) - 1)))
    return b.view(dlogp, shape)


def _weight_norm(b: Builder, node: Node) -> Value:
    """``(v g / |v|, |v|)``, with the norm over every dim but one."""
    v, g, dim = node.args
    meta, norm_meta = b.meta(v), _meta_at(node, 1)
    wide = norm_meta.dtype  # norms are taken in float32 at least
    x = b.cast(v, wide)
    squares = b.sum(b.binary("mul", x, x), _other_dims(meta, dim), keepdim=True)
    norm = b.unary("sqrt", squares)
    scale = b.binary("div", b.cast(g, wide), norm)
    return b.cast(b.binary("mul", x, scale), meta.dtype), norm


def _weight_norm_backward(b: Builder, node: Node) -> Value:
    """``dg = sum(dw v) / |v|`` and ``dv = g / |v| (dw - v dg / |v|)``."""
    grad, v, g, norm, dim = node.args
    wide = b.meta(norm).dtype
    dw, x = b.cast(grad, wide), b.cast(v, wide)
    dot = b.sum(b.binary("mul", dw, x), _other_dims(b.meta(v), dim), keepdim=True)
    length = b.binary("div", dot, norm)
    along = b.binary("mul", x, b.binary("div", length, norm))
    scale = b.binary("div", b.cast(g, wide), norm)
    direction = b.binary("mul", b.binary("sub", dw, along), scale)
    return b.cast(direction, b.meta(v).dtype), b.cast(length, b.meta(g).dtype)


def _other_dims(meta: TensorMeta, dim: Arg) -> tuple[int, ...]:
    assert isinstance(dim, int), dim
    rank = len(meta.shape)
    return tuple(d for d in range(rank) if d != dim % rank)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten._weight_norm_interface.default": _weight_norm,
        "aten._weight_norm_interface_backward.default": _weight_norm_backward,
        "aten.native_dropout.default": _dropout,
        "aten.native_dropout_backward.default": _dropout_backward,
        "aten.rand.default": _rand,
        "aten.rand_like.default": _rand,
        "aten.randn.default": _randn,
        "aten.randn_like.default": _randn,
        "aten.uniform.default": _uniform_between,
        "aten.normal_functional.default": _normal_around,
        "aten.bernoulli.p": _bernoulli,
        "aten.bernoulli.default": _bernoulli,
        "aten.bernoulli.Tensor": _bernoulli,
        "aten.randint.default": _randint,
        "aten.randint.low": _randint,
        "aten._native_batch_norm_legit_functional.default": _batch_norm,
        "aten._native_batch_norm_legit.default": _batch_norm,
        "aten._native_batch_norm_legit.no_stats": _batch_norm,
        "aten.native_batch_norm.default": _batch_norm,
        "aten._native_batch_norm_legit_no_training.default": _batch_norm_inference,
        "aten.native_batch_norm_backward.default": _batch_norm_backward,
        "aten.nll_loss_forward.default": _nll_forward,
        "aten.nll_loss2d_forward.default": _nll_forward,
        "aten.nll_loss_backward.default": _nll_backward,
        "aten.nll_loss2d_backward.default": _nll_backward,
        **dict.fromkeys(
            ("aten.randperm.default", "aten.geometric.default", "aten.poisson.default",
             "aten.cauchy.default", "aten.log_normal.default", "aten.binomial.default"),
            unknown_random,
        ),
    }
)  # fmt: skip
