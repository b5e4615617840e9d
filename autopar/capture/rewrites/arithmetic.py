"""Rules for products, sums, scalars, casts and tensors made from numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from autopar.capture.rewrites.builder import Builder, Rule, Value
from autopar.capture.rewrites.views import identity, ints
from autopar.ir.graph import Arg, Dtype, Node, Ref, TensorMeta

_HALF = frozenset({"float16", "bfloat16"})


def _result(node: Node) -> TensorMeta:
    assert isinstance(node.meta, TensorMeta), node
    return node.meta


def _number(arg: Arg) -> float:
    assert isinstance(arg, bool | int | float), arg
    return arg


def _dtype_name(arg: Arg) -> str | None:
    assert arg is None or isinstance(arg, Dtype), arg
    return arg.name if arg is not None else None


def _addmm(b: Builder, node: Node) -> Value:
    """Addmm and baddbmm: the product and the addition of the bias are separate operators."""
    bias, left, right = node.args
    product = "aten.bmm.default" if node.op.startswith("aten.baddbmm") else "aten.mm.default"
    meta = _result(node)
    out = b.emit(product, (left, right), meta)
    alpha, beta = _number(node.kwarg("alpha", 1)), _number(node.kwarg("beta", 1))
    if alpha != 1:
        out = b.binary("mul", out, alpha)
    if beta == 0:
        return out
    if beta != 1:
        bias = b.binary("mul", bias, beta)
    return b.binary("add", out, bias, meta.dtype)


def _mv(b: Builder, node: Node) -> Value:
    matrix, vector = node.args
    rows, columns = b.shape(matrix)
    meta = replace(_result(node), shape=(rows, 1))
    out = b.emit("aten.mm.default", (matrix, b.view(vector, (columns, 1))), meta)
    return b.view(out, (rows,))


def _dot(b: Builder, node: Node) -> Value:
    return b.sum(b.binary("mul", node.args[0], node.args[1]), None, keepdim=False)


def _binary(name: str) -> Rule:
    """add, sub, mul, div with a tensor or a number: one operator name, no ``alpha``."""

    def rule(b: Builder, node: Node) -> Value:
        left, right, *rest = node.args
        meta = _result(node)
        alpha = _number(rest[0]) if rest else _number(node.kwarg("alpha", 1))
        if alpha != 1:
            is_tensor = isinstance(right, Ref)
            right = b.binary("mul", right, alpha) if is_tensor else _number(right) * alpha
        if not isinstance(left, Ref):  # a number on the left
            left = b.full((), _number(left), meta.dtype)
        if not isinstance(right, Ref) and b.meta(left) == meta:
            # x + 0 is not x for x = -0.0, so only integers
            exact = name in ("mul", "div") or not meta.is_float
            if exact and right == (1 if name in ("mul", "div") else 0):
                return left
        if name in ("add", "sub"):
            right = _addend(b, right, meta)
        return b.emit(f"aten.{name}.Tensor", (left, right), meta)

    return rule


def _addend(b: Builder, value: Arg, meta: TensorMeta) -> Arg:
    """What is added to a scalar, as a tensor: a number can't be added once to a pending sum."""
    if isinstance(value, Ref) or meta.shape or not meta.is_float or value == 0:
        return value
    return b.full((), _number(value), meta.dtype)


def _rsub(b: Builder, node: Node) -> Value:
    value, other, *rest = node.args
    meta = _result(node)
    alpha = _number(rest[0]) if rest else _number(node.kwarg("alpha", 1))
    assert isinstance(value, Ref)
    if alpha == 1 and isinstance(other, Ref):
        return b.emit("aten.sub.Tensor", (other, value), meta)
    scaled = b.unary("neg", value) if alpha == 1 else b.binary("mul", value, -alpha)
    return b.emit("aten.add.Tensor", (scaled, _addend(b, other, meta)), meta)


def _to_copy(b: Builder, node: Node) -> Value:
    return b.cast(node.args[0], _result(node).dtype)


def _dims(arg: Arg) -> tuple[int, ...] | None:
    if arg is None:
        return None
    return (arg,) if isinstance(arg, int) else ints(arg)


def _sum(b: Builder, node: Node) -> Value:
    dims = _dims(node.args[1]) if len(node.args) > 1 else None
    keepdim = bool(node.args[2]) if len(node.args) > 2 else False
    return b.sum(node.args[0], dims, keepdim=keepdim, dtype=_result(node).dtype)


def _mean(b: Builder, node: Node) -> Value:
    value = node.args[0]
    dims = _dims(node.args[1]) if len(node.args) > 1 else None
    keepdim = bool(node.args[2]) if len(node.args) > 2 else False
    return _mean_of(b, value, dims, keepdim=keepdim, dtype=_result(node).dtype)


def _mean_of(
    b: Builder, value: Arg, dims: tuple[int, ...] | None, *, keepdim: bool, dtype: str
) -> Ref:
    """Sum over the static count; lower precisions accumulate in float32, as torch's mean does."""
    shape = b.shape(value)
    over = {d % len(shape) for d in dims} if dims and shape else set(range(len(shape)))
    work = "float32" if dtype in _HALF else dtype
    total = b.sum(value, dims, keepdim=keepdim, dtype=work)
    count = prod(shape[d] for d in over)
    return b.cast(b.binary("div", total, count), dtype)


def _var_parts(b: Builder, node: Node) -> tuple[Ref, Ref]:
    """Variance and mean, of var.correction, var.dim and their relatives."""
    value = node.args[0]
    dims = _dims(node.args[1]) if len(node.args) > 1 else None
    if node.op.endswith(".dim"):  # (x, dims, unbiased, keepdim)
        correction, keepdim = float(bool(node.args[2])), bool(node.args[3])
    else:
        given, keepdim = node.kwarg("correction"), bool(node.kwarg("keepdim", False))
        correction = 1.0 if given is None else _number(given)
    meta = b.meta(value)
    rank = len(meta.shape)
    over = tuple(sorted({d % rank for d in dims})) if dims else tuple(range(rank))
    work = "float32" if meta.dtype in _HALF else meta.dtype
    count = prod(meta.shape[d] for d in over)
    wide = b.cast(value, work)
    mean = b.binary("div", b.sum(wide, over, keepdim=True), count)
    centred = b.binary("sub", wide, mean)
    squares = b.sum(b.binary("mul", centred, centred), over, keepdim=keepdim)
    out = b.binary("div", squares, max(0.0, count - correction))
    return b.cast(out, meta.dtype), b.cast(b.view(mean, b.shape(out)), meta.dtype)


def _var(b: Builder, node: Node) -> Value:
    return _var_parts(b, node)[0]


def _var_mean(b: Builder, node: Node) -> Value:
    return _var_parts(b, node)


def _std(b: Builder, node: Node) -> Value:
    return b.unary("sqrt", _var_parts(b, node)[0])


def _filled(value: float) -> Rule:
    def rule(b: Builder, node: Node) -> Value:
        meta = _result(node)
        return b.full(meta.shape, value, meta.dtype)

    return rule


def _filled_with_argument(position: int) -> Rule:
    def rule(b: Builder, node: Node) -> Value:
        meta = _result(node)
        return b.full(meta.shape, _number(node.args[position]), meta.dtype)

    return rule


def _fill_tensor(b: Builder, node: Node) -> Value:
    meta = _result(node)
    source = b.producer(node.args[1])
    if source is not None and source.op == "aten.full.default":
        return b.full(meta.shape, _number(source.args[1]), meta.dtype)
    return b.expand(b.cast(node.args[1], meta.dtype), meta.shape)


def _copy(b: Builder, node: Node) -> Value:
    meta = _result(node)
    return b.expand(b.cast(node.args[1], meta.dtype), meta.shape)


def _constant(b: Builder, node: Node) -> Value:
    """Constants of one number are aten.full."""
    values = node.args[0]
    assert isinstance(values, tuple)
    meta = _result(node)
    if values and all(v == values[0] for v in values) and not isinstance(values[0], Ref | Dtype):
        return b.full(meta.shape, _number(values[0]), meta.dtype)
    if not values:
        return b.full(meta.shape, 0, meta.dtype)
    return b.keep(node)


def _arange(b: Builder, node: Node) -> Value:
    numbers = [_number(a) for a in node.args]
    start = numbers[0] if len(numbers) > 1 else 0
    end = numbers[1] if len(numbers) > 1 else numbers[0]
    step = numbers[2] if len(numbers) > 2 else 1
    meta = _result(node)
    return b.emit("aten.arange.start_step", (start, end, step), meta, dtype=Dtype(meta.dtype))


def _where_scalar(b: Builder, node: Node) -> Value:
    condition, yes, no = node.args
    meta = _result(node)
    yes, no = (
        b.cast(x, meta.dtype) if isinstance(x, Ref) else b.full((), _number(x), meta.dtype)
        for x in (yes, no)
    )
    return b.emit("aten.where.self", (condition, yes, no), meta)


def _masked_fill_tensor(b: Builder, node: Node) -> Value:
    value, mask, fill = node.args
    source = b.producer(fill)
    if source is not None and source.op == "aten.full.default":
        return b.emit("aten.masked_fill.Scalar", (value, mask, source.args[1]), _result(node))
    return b.emit(
        "aten.where.self", (mask, b.cast(fill, _result(node).dtype), value), _result(node)
    )


def _nansum(b: Builder, node: Node) -> Value:
    value = node.args[0]
    meta = b.meta(value)
    is_nan = b.emit("aten.isnan.default", (value,), replace(meta, dtype="bool"))
    zero = b.full((), 0.0, meta.dtype)
    kept = b.emit("aten.where.self", (is_nan, zero, value), meta)
    dims = _dims(node.args[1]) if len(node.args) > 1 else None
    keepdim = bool(node.args[2]) if len(node.args) > 2 else False
    return b.sum(kept, dims, keepdim=keepdim, dtype=_result(node).dtype)


def _norm(b: Builder, node: Node) -> Value:
    """The older names of the vector norm."""
    value, *rest = node.args
    order = rest[0] if rest and rest[0] is not None else 2
    dims = _dims(rest[1]) if len(rest) > 1 else None
    keepdim = bool(rest[2]) if len(rest) > 2 else False
    args: tuple[Arg, ...] = (value, order, dims or None, keepdim)
    return b.emit("aten.linalg_vector_norm.default", args, _result(node))


def _conj(builder: Builder, node: Node) -> Value:
    """The conjugate as values: a view with a flag would be sent to other ranks without it."""
    source = node.args[0]
    meta = builder.meta(source)
    if not meta.dtype.startswith("complex"):
        return identity(builder, node)
    return builder.emit("aten.conj_physical.default", (source,), meta)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.addmm.default": _addmm,
        "aten.baddbmm.default": _addmm,
        "aten.mv.default": _mv,
        "aten.dot.default": _dot,
        **{
            f"aten.{name}.{overload}": _binary(name)
            for name in ("add", "sub", "mul", "div")
            for overload in ("Tensor", "Scalar")
        },
        "aten.rsub.Scalar": _rsub,
        "aten.rsub.Tensor": _rsub,
        "aten._to_copy.default": _to_copy,
        "aten.sum.default": _sum,
        "aten.sum.dim_IntList": _sum,
        "aten.mean.default": _mean,
        "aten.mean.dim": _mean,
        "aten.nansum.default": _nansum,
        "aten.norm.Scalar": _norm,
        "aten.norm.ScalarOpt_dim": _norm,
        "aten.var.correction": _var,
        "aten.var.dim": _var,
        "aten.var_mean.correction": _var_mean,
        "aten.var_mean.dim": _var_mean,
        "aten.std.correction": _std,
        "aten.std.dim": _std,
        **dict.fromkeys(
            ("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default",
             "aten.zero.default", "aten.empty.memory_format", "aten.empty_like.default",
             "aten.new_empty.default", "aten.empty_strided.default",
             "aten.new_empty_strided.default"),
            _filled(0),
        ),
        **dict.fromkeys(
            ("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default"), _filled(1)
        ),
        "aten.full.default": _filled_with_argument(1),
        "aten.full_like.default": _filled_with_argument(1),
        "aten.new_full.default": _filled_with_argument(2),
        "aten.fill.Scalar": _filled_with_argument(1),
        "aten.scalar_tensor.default": _filled_with_argument(0),
        "aten.fill.Tensor": _fill_tensor,
        "aten.copy.default": _copy,
        "autopar.constant": _constant,
        "aten.arange.default": _arange,
        "aten.arange.start": _arange,
        "aten.arange.start_step": _arange,
        "aten.where.ScalarSelf": _where_scalar,
        "aten.where.ScalarOther": _where_scalar,
        "aten.where.Scalar": _where_scalar,
        "aten.masked_fill.Tensor": _masked_fill_tensor,
        **dict.fromkeys(
            ("aten.conj.default", "aten._conj.default", "aten.conj_physical.default"), _conj
        ),
        "aten.resolve_conj.default": identity,
    }
)  # fmt: skip
