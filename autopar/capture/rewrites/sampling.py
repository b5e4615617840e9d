"""Rules for draws from distributions: each is a function of counter-based uniform numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from autopar.capture.rewrites.builder import Builder, Rule, Value
from autopar.ir.graph import Arg, Dtype, Node, Ref, TensorMeta

_HALF = frozenset({"float16", "bfloat16"})
_LEAST = 2.0**-25  # half of the smallest step of a uniform number: no draw is 0


def _result(node: Node) -> TensorMeta:
    assert isinstance(node.meta, TensorMeta), node
    return node.meta


def _wide(dtype: str) -> str:
    return "float32" if dtype in _HALF else dtype


def _draw(b: Builder, op: str, shape: tuple[int, ...], dtype: str) -> Ref:
    zeros = (0,) * len(shape)
    args = (b.rng_key(), b.random_id(), shape, shape, zeros, Dtype(dtype))
    return b.emit(op, args, TensorMeta(shape, dtype))


def _normal(b: Builder, node: Node) -> Value:
    """``normal(mean, std)``, each a tensor or a number."""
    meta = _result(node)
    mean, std = node.args[:2]
    drawn = _draw(b, "autopar.normal", meta.shape, meta.dtype)
    return b.binary("add", b.binary("mul", drawn, std), mean)


def _randint_like(b: Builder, node: Node) -> Value:
    meta = _result(node)
    bounds = [int(a) for a in node.args[1:] if isinstance(a, int)]
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    drawn = b.binary("mul", _draw(b, "autopar.uniform", meta.shape, "float32"), high - low)
    whole = b.cast(b.unary("floor", drawn), meta.dtype)
    return b.binary("add", whole, low) if low else whole


def _unit_exponential(b: Builder, shape: tuple[int, ...], dtype: str) -> Ref:
    """Numbers of the exponential distribution with rate 1, above 0."""
    drawn = b.binary("add", _draw(b, "autopar.uniform", shape, _wide(dtype)), _LEAST)
    waited = b.unary("neg", b.unary("log", drawn))
    least = b.emit("aten.clamp_min.default", (waited, _LEAST), b.meta(waited))
    return b.cast(least, dtype)


def _exponential(b: Builder, node: Node) -> Value:
    meta = _result(node)
    rate = node.args[1] if len(node.args) > 1 else 1.0
    drawn = _unit_exponential(b, meta.shape, meta.dtype)
    return drawn if rate == 1.0 else b.binary("div", drawn, rate)


def _multinomial(b: Builder, node: Node) -> Value:
    """Indices by weight: the first of exponential waiting times with these rates to end."""
    weights, count, replacement = node.args[:3]
    assert isinstance(count, int)
    meta, result = b.meta(weights), _result(node)
    if replacement and count > 1:
        lead, classes = meta.shape[:-1], meta.shape[-1]
        shape = (*lead, count, classes)
        each: Arg = b.expand(b.view(weights, (*lead, 1, classes)), shape)
        score = b.binary("div", each, _unit_exponential(b, shape, meta.dtype))
        return b.emit("aten.argmax.default", (score, -1, False), result)
    score = b.binary("div", weights, _unit_exponential(b, meta.shape, meta.dtype))
    if count == 1:
        return b.emit("aten.argmax.default", (score, -1, True), result)
    best = b.emit_tuple(
        "aten.topk.default", (score, count, -1, True, True),
        (replace(meta, shape=result.shape), result),
    )  # fmt: skip
    picked = best[1]
    assert picked is not None
    return picked


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "aten.normal.float_float": _normal,
        "aten.normal.Tensor_float": _normal,
        "aten.normal.float_Tensor": _normal,
        "aten.normal.Tensor_Tensor": _normal,
        "aten.randint_like.default": _randint_like,
        "aten.randint_like.low_dtype": _randint_like,
        "aten.exponential.default": _exponential,
        "aten.multinomial.default": _multinomial,
    }
)
