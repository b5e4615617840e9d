"""Random operators: their bits are a hash of a key and the global element index."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.placement import Partial, Placement, R, Shard
from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.signature import AxisStrategy, OpSignature


def _dropout(call: OpCall) -> OpSignature:
    """``dropout(x, key, p, op_id, global_shape, offsets) -> (y, kept)``.

    Every dim splits, by a lowering that gives each rank the offsets of its block. The backward
    has no randomness; its rule is element-wise.
    """
    naming = Naming()
    shape = call.shape(0)
    dims = naming.dims(shape, whole=range(len(shape)))
    others: tuple[Placement, ...] = tuple(R for _ in call.operands[1:])
    extra = [
        AxisStrategy((Shard(i), *others), (Shard(i),) * len(call.results), f"d{i}", "dropout")
        for i, names in enumerate(dims)
        if names
    ]
    if call.operands[0] is not None and call.operands[0].is_float:
        # y is linear in x; which elements are kept does not depend on x
        extra.append(AxisStrategy((Partial(), *others), (Partial(), R)))
    return naming.build(
        [dims, *(() for _ in others)],
        [dims for _ in call.results],
        extra=extra,
        padded=naming.sizes,
    )


def _random(call: OpCall) -> OpSignature:
    """``uniform(key, op_id, shape, global_shape, offsets, dtype)``: each rank draws its block."""
    naming = Naming()
    shape = call.result_shape()
    dims = naming.dims(shape, whole=range(len(shape)))
    inputs: tuple[Placement, ...] = tuple(R for _ in call.operands)
    extra = [
        AxisStrategy(inputs, (Shard(i),), f"d{i}", "random")
        for i, names in enumerate(dims)
        if names
    ]
    return naming.build([() for _ in inputs], [dims], extra=extra, padded=naming.sizes)


RULES: Mapping[str, Rule] = {
    "autopar.dropout.default": _dropout,
    "autopar.uniform.default": _random,
    "autopar.normal.default": _random,
}
"""Rules by operator name."""
