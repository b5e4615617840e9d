"""Matrix products and convolutions: output dims split, the contracted dim leaves a pending sum."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.sharding.placement import Partial, Placement, R, Shard
from autopar.sharding.rules.call import Naming, OpCall, Rule
from autopar.sharding.rules.template import Template, template
from autopar.sharding.signature import AxisStrategy, Dims, OpSignature

_BOTH = ((0,), (1,))


def _convolution(call: OpCall) -> OpSignature:
    """``convolution(x, weight, bias?, stride, padding, dilation, transposed, out_pad, groups)``.

    x is (n, c, spatial), weight (o, c, kernel) or, transposed, (c, o, kernel). With groups, only
    whole groups split: the channel dims are (g, c) and (g, o). Spatial dims are whole: a split
    would need halos.
    """
    naming = Naming()
    groups, transposed = call.integer(8, 1), bool(call.arg(6))
    x, weight, y = call.shape(0), call.shape(1), call.result_shape()
    n = naming.dim("n", x[0])
    c, o = _channels(naming, x[1], y[1], groups)
    inputs: list[Dims | None] = [
        (n, c, *naming.dims(x[2:], prefix="x", whole=range(len(x)))),
        _weight(naming, weight, c, o, groups, transposed=transposed),
    ]
    bias = call.operand(2)
    if bias is not None:
        inputs.append((o,))
    linear = [(0, 2), (1, 2)] if bias is not None else [(0,), (1,)]
    extra: list[AxisStrategy | None] = []
    if bias is not None and groups == 1 and "c" in naming.sizes:
        # Added once per rank, the bias must be a pending sum where the channels are.
        naming.whole.add("c")
        shard = Shard(0) if transposed else Shard(1)
        extra.append(AxisStrategy((Shard(1), shard, Partial()), (Partial(),), "c"))
    if "g" in naming.sizes:
        naming.whole.add("g")
        sharded: tuple[Placement, ...] = (Shard(1), Shard(0), Shard(0))
        extra.append(AxisStrategy(sharded[: len(inputs)], (Shard(1),), "g", "grouped_convolution"))
    return naming.build(
        inputs,
        [(n, o, *naming.dims(y[2:], prefix="y", whole=range(len(y))))],
        reductions={"c": "sum"},
        linear=call.linear_positions(*linear),
        extra=extra,
        padded=("n", "o") if bias is not None else ("n", "o", "c"),
    )


def _convolution_backward(call: OpCall) -> OpSignature:
    """``convolution_backward(dy, x, weight, bias_sizes, ..., groups, mask) -> (dx, dw, db)``."""
    naming = Naming()
    groups, transposed = call.integer(9, 1), bool(call.arg(7))
    dy, x, weight = call.shape(0), call.shape(1), call.shape(2)
    n = naming.dim("n", x[0])
    c, o = _channels(naming, x[1], dy[1], groups)
    x_dims: Dims = (n, c, *naming.dims(x[2:], prefix="x", whole=range(len(x))))
    w_dims = _weight(naming, weight, c, o, groups, transposed=transposed)
    results: list[Dims | None] = [x_dims, w_dims, (o,)]
    extra: list[AxisStrategy | None] = [
        _pending(call, x_pending, w_pending)
        for x_pending, w_pending in ((True, False), (False, True), (True, True))
    ]
    if "g" in naming.sizes:
        naming.whole.add("g")
        placements: tuple[Placement, ...] = (Shard(1), Shard(0), Shard(0))
        outputs = tuple(
            R if meta is None else p for p, meta in zip(placements, call.results, strict=True)
        )
        extra.append(
            AxisStrategy((Shard(1), Shard(1), Shard(0)), outputs, "g", "grouped_convolution")
        )
    return naming.build(
        [(n, o, *naming.dims(dy[2:], prefix="y", whole=range(len(dy)))), x_dims, w_dims],
        [None if m is None else d for m, d in zip(call.results, results, strict=True)],
        reductions={"n": "sum", "o": "sum"},
        linear=call.linear_positions((0,)),
        extra=extra,
        padded=("n", "o", "c"),
        shape_arg=3 if call.results[2] is not None else None,
        shape_result=2,
    )


def _pending(call: OpCall, x_pending: bool, w_pending: bool) -> AxisStrategy:
    """Dw is linear in x, dx in the weight, db in neither."""
    wanted = (w_pending, x_pending, False)
    outputs = tuple(
        Partial() if pending and meta is not None else R
        for pending, meta in zip(wanted, call.results, strict=True)
    )
    return AxisStrategy((R, Partial() if x_pending else R, Partial() if w_pending else R), outputs)


def _channels(
    naming: Naming, inner: int, outer: int, groups: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Factors of the input's and the output's channel dim."""
    if groups == 1:
        return naming.dim("c", inner), naming.dim("o", outer)
    g = naming.dim("g", groups)
    return (
        g + naming.dim("c", inner // groups, whole=True),
        g + naming.dim("o", outer // groups, whole=True),
    )


def _weight(
    naming: Naming,
    weight: tuple[int, ...],
    c: tuple[str, ...],
    o: tuple[str, ...],
    groups: int,
    *,
    transposed: bool,
) -> Dims:
    """Dims of the weight: the group is the outer factor of dim 0 in either form."""
    first, second = (c, o) if transposed else (o, c)
    inner = second if groups == 1 else second[1:]
    return (first, inner, *naming.dims(weight[2:], prefix="k", whole=range(len(weight))))


def _grouped(rule: Template) -> Rule:
    """A product of rows grouped by expert: only the form with 2-D rows and one weight each."""

    def bind(call: OpCall) -> OpSignature | None:
        ranks = [len(m.shape) for m in call.operands if m is not None]
        fits = ranks == [0 if p is None else len(p) for p in rule.inputs]
        return rule(call) if fits else None

    return bind


_GROUPED_MM = template("(t!, k+), (e!, k+, n), (e!) -> (t!, n)", linear=_BOTH, padded="k n")
# Products whose runs follow from a sort are `autopar.grouped_mm`, which splits over experts too.

RULES: Mapping[str, Rule] = {
    "aten.mm.default": template("(m, k+), (k+, n) -> (m, n)", linear=_BOTH, padded="m k n"),
    "aten.bmm.default": template(
        "(b, m, k+), (b, k+, n) -> (b, m, n)", linear=_BOTH, padded="b m k n"
    ),
    "aten.mv.default": template("(m, k+), (k+) -> (m)", linear=_BOTH, padded="m k"),
    "aten.dot.default": template("(k+), (k+) -> ()", linear=_BOTH, padded="k"),
    "aten._grouped_mm.default": _grouped(_GROUPED_MM),
    "autopar.grouped_mm_ends.default": _grouped(_GROUPED_MM),
    "autopar.grouped_mm_ends_backward.default": template(
        "(t!, n+), (t!, k), (e!, k, n+), (e!) -> (t!, k), (e!, k, n)", linear=[(0,)], padded="k n"
    ),
    "transformers.grouped_mm_fallback.default": _grouped(_GROUPED_MM),
    "transformers.grouped_mm_fallback_backward.default": _grouped(
        template(
            "(t!, k), (e!, k, n+), (e!), (t!, n+) -> (t!, k), (e!, k, n)",
            linear=[(3,)],
            padded="k n",
        )
    ),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
}
"""Rules by operator name."""
