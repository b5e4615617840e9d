"""Attention: batch and heads split without communication, query positions with keys whole.

q is (b, h, s, d), k and v (b, kv, t, d) with h a multiple of kv, the mask broadcastable to
(b, h, s, t). The arguments that name a block's place in the whole (``q_start`` for causality,
``offsets`` for dropout) are set by the lowering, which is left out where they do not matter.

Ranks that key heads do not divide over still split the query heads: keys and values are whole on
every rank, and the lowering takes the heads that a rank's queries read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import ShardingError
from autopar.sharding.placement import Partial, Placement, R, Shard
from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.signature import (
    AxisStrategy,
    Dims,
    OpSignature,
    factor_strategy,
)

LOWERING = "attention"
QUERY_HEADS = "heads"
"""Factor of the split of grouped query heads without their key heads."""

FORWARD_ARGS = (
    "q", "k", "v", "mask", "key", "causal", "q_start", "scale", "dropout_p", "op_id",
    "global_shape", "offsets",
)  # fmt: skip
"""Positional arguments of ``autopar.attention``, which returns (o, lse)."""

BACKWARD_ARGS = ("do", "q", "k", "v", "o", "lse", *FORWARD_ARGS[3:], "need_dmask")
"""Positional arguments of ``autopar.attention_backward``, which returns (dq, dk, dv, dmask)."""


def argument_names(op: str) -> tuple[str, ...]:
    """Names of the positional arguments of attention or its backward."""
    return BACKWARD_ARGS if "backward" in op else FORWARD_ARGS


def _attention(call: OpCall) -> OpSignature:
    naming = Naming()
    names = argument_names(call.op)
    at = {name: position for position, name in enumerate(names)}
    dims = _dims(call, naming, at)
    inputs: list[Dims | None] = [()] * len(call.operands)
    for name, position in at.items():
        number = call.operand(position)
        if number is not None:
            inputs[number] = dims.get(name, ())
    results = ("o", "lse") if "do" not in at else ("q", "k", "v", "mask")
    outputs = [
        dims[name] if meta is not None and meta.numel else None
        for name, meta in zip(results, call.results, strict=True)
    ]
    lost = ("b", "g", "s", "h", "kv") if "do" in at else ()
    signature = naming.build(
        inputs,
        outputs,
        reductions=dict.fromkeys(lost, "sum"),
        linear=call.linear_positions((0,)) if "do" in at else (),
    )
    dropout = call.arg(at["dropout_p"]) not in (None, 0, 0.0)
    causal = bool(call.arg(at["causal"]))
    lowered = {"b", "h", "kv", "g", "s"} if dropout else {"s"} if causal else set()
    signature = _lowered(signature, lowered & naming.sizes.keys(), LOWERING)
    return _with_query_heads(signature) if {"kv", "g"} <= naming.sizes.keys() else signature


def _with_query_heads(signature: OpSignature) -> OpSignature:
    """With the split of the query heads alone: each rank reads the key heads that it needs."""
    heads = ("kv", "g")

    def placement(dims: Dims | None, lost: Placement) -> Placement:
        return next((Shard(i) for i, names in enumerate(dims or ()) if names == heads), lost)

    strategy = AxisStrategy(
        tuple(placement(dims, R) for dims in signature.inputs),
        tuple(
            R if dims is None else placement(dims, Partial() if signature.reductions else R)
            for dims in signature.outputs
        ),
        QUERY_HEADS,
        LOWERING,
    )
    sizes = signature.sizes
    return replace(
        signature,
        sizes={**sizes, QUERY_HEADS: sizes["kv"] * sizes["g"]},
        whole=signature.whole | {QUERY_HEADS},
        extra=(*signature.extra, strategy),
        merged={QUERY_HEADS: heads},
    )


def _dims(call: OpCall, naming: Naming, at: Mapping[str, int]) -> dict[str, Dims]:
    """Dims of every tensor argument by name."""
    batch, heads, queries, width = call.shape_at(at["q"])
    _, kv_heads, keys, _ = call.shape_at(at["k"])
    if kv_heads == 0 or heads % kv_heads:
        raise ShardingError(
            f"{call.op}: {heads} query heads are no multiple of {kv_heads} key heads; "
            "repeat the keys"
        )
    b = naming.dim("b", batch)
    grouped = heads != kv_heads
    kv = naming.dim("kv" if grouped else "h", kv_heads)
    h = kv + naming.dim("g", heads // kv_heads)
    s = naming.dim("s", queries)
    t = naming.dim("t", keys, whole=True)
    d = naming.dim("d", width, whole=True)
    e = naming.dim("e", call.shape_at(at["v"])[3], whole=True)
    dims: dict[str, Dims] = {
        "q": (b, h, s, d),
        "k": (b, kv, t, d),
        "v": (b, kv, t, e),
        "o": (b, h, s, e),
        "do": (b, h, s, e),
        "lse": (b, h, s),
    }
    mask = call.shape_at(at["mask"])
    whole = (b, h, s, t)[4 - len(mask) :]
    sizes = (batch, heads, queries, keys)[4 - len(mask) :]
    dims["mask"] = tuple(
        names if size == full else () for size, full, names in zip(mask, sizes, whole, strict=True)
    )
    return dims


def _lowered(signature: OpSignature, factors: set[str], lowering: str) -> OpSignature:
    """The signature with the splits of some factors done by a lowering."""
    extra: list[AxisStrategy] = []
    for factor in signature.sizes:
        if factor in factors:
            strategy = factor_strategy(signature, factor)
            if strategy is not None:
                extra.append(replace(strategy, lowering=lowering))
    return replace(
        signature,
        whole=signature.whole | factors,
        extra=(*signature.extra, *extra),
    )


RULES: Mapping[str, Rule] = {
    "autopar.attention.default": _attention,
    "autopar.attention_backward.default": _attention,
}
"""Rules by operator name."""
