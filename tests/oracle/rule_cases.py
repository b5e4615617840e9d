"""Operators with concrete operands, one function per rule family, for the sharding oracle.

Values are float64 and seeded. Sizes are small, even where a dim may split over two ranks, and 10
where padding over 3 or 4 ranks is wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping

import torch

from tests.oracle.shard_oracle import Case, make_case

F64 = torch.float64


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64)


def _ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def _bool(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.5


def elementwise() -> Iterator[Case]:
    for op in ("abs", "exp", "relu", "silu", "tanh", "neg", "clone", "sigmoid", "erf", "cos",
               "sin", "gelu", "isnan", "sign", "floor"):  # fmt: skip
        yield make_case(f"aten.{op}.default", _r(4, 10))
    for op in ("log", "rsqrt", "sqrt", "reciprocal"):
        yield make_case(f"aten.{op}.default", _r(4, 10).abs() + 0.5)
    for shape in ((4, 10), (10,), (1, 10), (4, 1), ()):
        yield make_case("aten.add.Tensor", _r(4, 10), _r(*shape))
        yield make_case("aten.mul.Tensor", _r(*shape), _r(4, 10))
    yield make_case("aten.add.Tensor", _r(4, 10), 1.0)
    yield make_case("aten.add.Tensor", _r(4, 10), 0)
    yield make_case("aten.add.Tensor", _r(4, 10), _r(4, 10), alpha=2)
    yield make_case("aten.sub.Tensor", _r(4, 10), _r(4, 10))
    yield make_case("aten.rsub.Scalar", _r(4, 10), 1.0)
    yield make_case("aten.mul.Tensor", _r(4, 10), _bool(4, 10))
    yield make_case("aten.mul.Tensor", _r(4, 10), 2.0)
    yield make_case("aten.mul.Scalar", _r(4, 10), 2.0)
    yield make_case("aten.div.Tensor", _r(4, 10), _r(4, 10))
    yield make_case("aten.div.Tensor", _r(4, 10), 3.0)
    yield make_case("aten.div.Scalar", _r(4, 10), 3.0)
    yield make_case("aten.div.Tensor_mode", _r(4, 10), _r(4, 10), rounding_mode="floor")
    yield make_case(
        "aten.div.Tensor_mode", _ids(9, 4, 10), _ids(9, 4, 10) + 1, rounding_mode="floor"
    )
    yield make_case("aten.pow.Tensor_Scalar", _r(4, 10), 3.0)
    yield make_case("aten.pow.Tensor_Scalar", _r(4, 10), 1.0)
    yield make_case("aten.pow.Scalar", 2.0, _r(4, 10))
    yield make_case("aten.where.self", _bool(4, 10), _r(4, 10), _r(10))
    yield make_case("aten.where.self", _bool(4, 1), _r(4, 10), _r())
    yield make_case("aten.where.ScalarOther", _bool(4, 10), _r(4, 10), 0.0)
    yield make_case("aten.where.ScalarOther", _bool(4, 10), _r(4, 10), 1.0)
    yield make_case("aten.masked_fill.Scalar", _r(4, 10), _bool(10), 0)
    yield make_case("aten.masked_fill.Scalar", _r(4, 10), _bool(4, 10), 2.0)
    yield make_case("aten.masked_fill.Tensor", _r(4, 10), _bool(4, 10), _r())
    yield make_case("aten.minimum.default", _r(4, 10), _r(4, 10))
    yield make_case("aten.clamp.default", _r(4, 10), -1.0, 1.0)
    yield make_case("aten.eq.Scalar", _ids(3, 4, 10), 1)
    yield make_case("aten.lt.Tensor", _r(4, 10), _r(4, 10))
    yield make_case("aten.logical_and.default", _bool(4, 10), _bool(4, 10))
    yield make_case("aten.bitwise_and.Tensor", _bool(4, 10), _bool(4, 10))
    yield make_case("aten._to_copy.default", _r(4, 10), dtype=torch.int64)
    yield make_case("aten._to_copy.default", _ids(9, 4, 10), dtype=F64)
    yield make_case("aten._to_copy.default", _bool(4, 10), dtype=F64)
    yield make_case("aten._to_copy.default", _r(4, 10), dtype=torch.bool)
    yield make_case("aten.lerp.Scalar", _r(4, 10), _r(4, 10), 0.3)
    yield make_case("aten.lerp.Tensor", _r(4, 10), _r(4, 10), _r(4, 10))
    yield make_case("aten.addcmul.default", _r(4, 10), _r(4, 10), _r(10))
    yield make_case("aten.addcdiv.default", _r(4, 10), _r(4, 10), _r(10))
    for op in ("tanh", "sigmoid", "silu", "gelu"):
        yield make_case(f"aten.{op}_backward.default", _r(4, 10), _r(4, 10))
    yield make_case("aten.threshold_backward.default", _r(4, 10), _r(4, 10), 0)
    yield make_case("aten.hardtanh_backward.default", _r(4, 10), _r(4, 10), -1, 1)
    yield make_case("aten.leaky_relu_backward.default", _r(4, 10), _r(4, 10), 0.1, False)
    yield make_case("aten.conj_physical.default", torch.view_as_complex(_r(4, 6, 2)))
    yield make_case("aten.complex.default", _r(4, 6), _r(4, 6))
    yield make_case("aten.polar.default", _r(4, 6).abs(), _r(6))
    yield make_case("aten.angle.default", _r(4, 6))
    yield make_case("aten.view_as_complex.default", _r(4, 6, 2))
    yield make_case("aten.view_as_real.default", torch.view_as_complex(_r(4, 6, 2)))


def contraction() -> Iterator[Case]:
    yield make_case("aten.mm.default", _r(4, 10), _r(10, 6))
    yield make_case("aten.mm.default", _r(10, 1), _r(1, 10))
    yield make_case("aten.bmm.default", _r(4, 6, 10), _r(4, 10, 2))
    yield make_case("aten.mv.default", _r(4, 10), _r(10))
    yield make_case("aten.dot.default", _r(10), _r(10))
    square = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    for groups, transposed in ((1, False), (2, False), (4, False), (1, True), (2, True)):
        options = (*square[:3], transposed, [0, 0], groups)
        x, weight = _r(4, 8, 4, 4), _r(8, 8 // groups, 3, 3)
        for bias in (None, _r(8)):
            yield make_case("aten.convolution.default", x, weight, bias, *options)
        y = torch.ops.aten.convolution(x, weight, None, *options)
        for mask in ([True, True, True], [False, True, False]):
            yield make_case(
                "aten.convolution_backward.default",
                torch.randn_like(y), x, weight, [8] if mask[2] else None, *options, mask,
            )  # fmt: skip
    yield make_case("aten.convolution.default", _r(4, 10, 6), _r(6, 10, 3), None, [2], [0], [1],
                    False, [0], 1)  # fmt: skip


def grouped() -> Iterator[Case]:
    """Rows grouped by expert; transformers registers the operators."""
    importlib.import_module("transformers.integrations.moe")
    x, weight, y = _r(12, 10), _r(4, 10, 6), _r(12, 6)
    ends = torch.tensor([2, 7, 7, 12], dtype=torch.int32)
    yield make_case("transformers.grouped_mm_fallback.default", x, weight, ends)
    yield make_case("transformers.grouped_mm_fallback_backward.default", x, weight, ends, y)


def moe() -> Iterator[Case]:
    """Rows sorted by expert; splits of the rows have an oracle of their own."""
    for k in (1, 2):
        ids = _ids(4, 6 * k)
        yield make_case("autopar.moe_route", ids, 4, k)
        order, counts, splits = torch.ops.autopar.moe_route(ids, 4, k)
        rows = _r(6 * k, 10)
        yield make_case("autopar.moe_dispatch", _r(6, 10), order, splits, k)
        yield make_case("autopar.moe_combine", rows, order, splits, k, [6, 10])
        yield make_case("autopar.moe_spread", _r(4, 10), counts, order)
        yield make_case("autopar.moe_run_sums", rows, counts)
        yield make_case("autopar.grouped_mm", rows, _r(4, 10, 6), counts, 1.0)
        yield make_case("autopar.grouped_mm_weight", rows, _r(6 * k, 6), counts, 1.0)
    ends = torch.tensor([2, 7, 7, 12], dtype=torch.int32)
    x, weight, y = _r(12, 10), _r(4, 10, 6), _r(12, 6)
    yield make_case("autopar.grouped_mm_ends", x, weight, ends)
    yield make_case("autopar.grouped_mm_ends_backward", y, x, weight, ends)


def reduction() -> Iterator[Case]:
    x = _r(4, 10, 6)
    for dims, keep in (
        ([0], True),
        ([1], False),
        ([-1], False),
        ([0, 1], True),
        ([0, 1, 2], False),
    ):
        yield make_case("aten.sum.dim_IntList", x, dims, keep)
        yield make_case("aten.amax.default", x, dims, keep)
        yield make_case("aten.mean.dim", x, dims, keep)
    yield make_case("aten.sum.dim_IntList", x, None)
    yield make_case("aten.sum.dim_IntList", _bool(4, 10), [1])
    yield make_case("aten.sum.dim_IntList", _ids(9, 4, 10), [1])
    yield make_case("aten.sum.default", x)
    yield make_case("aten.amin.default", x, [1])
    yield make_case("aten.amax.default", _ids(9, 4, 10), [1])
    yield make_case("aten.max.default", x)
    yield make_case("aten.max.dim", x, 1)
    one = torch.zeros(4, 10, dtype=torch.bool)
    one[0, 0] = True
    yield make_case("aten.any.default", one)
    yield make_case("aten.any.dim", one, 1)
    yield make_case("aten.any.dim", one.to(F64), 1)
    yield make_case("aten.all.dim", ~one, 1)
    yield make_case("aten.var.correction", x, [1], correction=1)
    yield make_case("aten.logsumexp.default", x, [1])
    yield make_case("aten.linalg_vector_norm.default", x, 2.0, [1])
    yield make_case("aten.prod.default", x.abs() + 0.7)
    yield make_case("aten.argmax.default", x, 1)
    last = x.clone()
    last[-1, -1, -1] = 100.0
    yield make_case("aten.argmax.default", last)
    yield make_case("aten.histc.default", x, 4, -2, 2)
    yield make_case("aten.topk.default", x, 2, 1)
    yield make_case("aten.sort.default", x, 1)
    yield make_case("aten.cumsum.default", x, 1)
    yield make_case("aten.cumsum.default", _ids(5, 4, 10), -1)
    yield make_case("aten.tril.default", x)
    for dim in (0, 1, -1):
        for op in ("_softmax", "_log_softmax"):
            yield make_case(f"aten.{op}.default", x, dim, False)
            y = getattr(torch, op.removeprefix("_"))(x, dim)
            yield make_case(f"aten.{op}_backward_data.default", _r(4, 10, 6), y, dim, F64)
    half = torch.randn(4, 10).to(torch.bfloat16)
    yield make_case("aten._softmax.default", half, 1, False)


def normalization() -> Iterator[Case]:
    x = _r(4, 10, 6)
    for weight in (_r(6), None):
        y = torch.ops.aten.native_layer_norm(x, [6], weight, weight, 1e-5)
        yield make_case("aten.native_layer_norm.default", x, [6], weight, weight, 1e-5)
        mask = [True, weight is not None, weight is not None]
        yield make_case("aten.native_layer_norm_backward.default", _r(4, 10, 6), x, [6], *y[1:],
                        weight, weight, mask)  # fmt: skip
    yield make_case("aten.native_layer_norm.default", x, [10, 6], _r(10, 6), None, 1e-5)
    yield make_case("aten._fused_rms_norm.default", x, [6], _r(6), 1e-5)
    image = _r(8, 6, 4, 4)
    invstd = 1 / (image.var((0, 2, 3), correction=0) + 1e-5).sqrt()
    mean = image.mean((0, 2, 3))
    for weight in (_r(6), None):
        for running in ((_r(6), _r(6).abs()), (None, None)):
            yield make_case("autopar.batch_norm", image, weight, weight, *running, 0.1, 1e-5)
        yield make_case("autopar.batch_norm_backward", _r(8, 6, 4, 4), image, weight, mean, invstd,
                        1e-5)  # fmt: skip
        group = (8, 6, 16, 3)
        _, mean_g, rstd_g = torch.ops.aten.native_group_norm(image, weight, weight, *group, 1e-5)
        yield make_case("aten.native_group_norm.default", image, weight, weight, *group, 1e-5)
        mask = [True, weight is not None, weight is not None]
        yield make_case("aten.native_group_norm_backward.default", _r(8, 6, 4, 4), image, mean_g,
                        rstd_g, weight, *group, mask)  # fmt: skip
    yield make_case("autopar.batch_norm", _r(8, 6), _r(6), _r(6), _r(6), _r(6).abs(), 0.1, 1e-5)


def views() -> Iterator[Case]:
    x = _r(4, 10, 6)
    for before, after in (
        ((4, 10, 6), (40, 6)), ((40, 6), (4, 10, 6)), ((4, 6, 2, 8), (4, 6, 16)),
        ((2, 4, 3, 4, 2), (2, 4, 24)), ((2, 4, 24), (2, 4, 3, 4, 2)),  # (B, S, 3, H, d)
        ((2, 4, 24), (2, 4, 4, 3, 2)),  # (B, S, H, 3, d)
        ((4, 6), (6, 4)), ((4, 6), (8, 3)), ((4, 1, 6), (4, 6)), ((1,), ()), ((4, 6), (2, 12)),
        ((4, 10), (4, 10)), ((24,), (2, 3, 4)), ((6, 10), (10, 6)), ((4, 9), (6, 6)),
        ((4, 6, 1), (1, 24)),
    ):  # fmt: skip
        yield make_case("aten.view.default", _r(*before), list(after))
    yield make_case("aten.permute.default", x, [1, 0, 2])
    yield make_case("aten.permute.default", _r(4, 10), [-1, 0])
    for before, after in (((1, 10), (4, 10)), ((10,), (4, 10)), ((4, 1, 6), (4, 8, 6)), ((), (4,))):
        yield make_case("aten.expand.default", _r(*before), list(after))
    yield make_case("aten.slice.Tensor", x, 1, 2, 8)
    yield make_case("aten.slice.Tensor", x, 1, 0, 9223372036854775807)
    yield make_case("aten.slice.Tensor", x, -1, -3, 9223372036854775807)
    yield make_case("aten.slice.Tensor", x, 1, 0, 10, 2)
    yield make_case("aten.slice_backward.default", _r(4, 6, 6), [4, 10, 6], 1, 2, 8, 1)
    yield make_case("aten.slice_backward.default", x, [4, 10, 6], 1, 0, 9223372036854775807, 1)
    yield make_case("aten.slice_scatter.default", x, _r(4, 6, 6), 1, 2, 8)
    yield make_case("aten.select.int", x, 1, -1)
    yield make_case("aten.select_backward.default", _r(4, 6), [4, 10, 6], 1, 0)
    yield make_case("aten.select_scatter.default", x, _r(4, 6), 1, 0)
    for pad, value in (([0, 1], 0.0), ([0, 0, 1, 1], 0), ([0, 1], -100.0), ([1, -1], 0.0)):
        yield make_case("aten.constant_pad_nd.default", x, pad, value)
    yield make_case("aten.cat.default", [x, _r(4, 2, 6), _r(4, 4, 6)], 1)
    yield make_case("aten.cat.default", [_r(2, 6), _r(4, 6)])
    yield make_case("aten.cat.default", [torch.empty(0, dtype=F64), _r(4, 6)], -2)
    yield make_case("aten.stack.default", [x, x + 1], 1)
    yield make_case("aten.repeat.default", x, [1, 2, 1])
    yield make_case("aten.repeat.default", _r(4, 6), [2, 1, 1])
    yield make_case("aten.flip.default", x, [1])
    yield make_case("aten.roll.default", x, [2], [1])


def indexing() -> Iterator[Case]:
    yield make_case("aten.embedding.default", _r(10, 8), _ids(10, 4, 6))
    for padding in (-1, 3):
        yield make_case(
            "aten.embedding_dense_backward.default", _r(4, 6, 8), _ids(10, 4, 6), 10, padding, False
        )
    yield make_case(
        "aten.embedding_dense_backward.default", _r(4, 6, 8), _ids(10, 4, 6), 10, -1, True
    )
    yield make_case("aten.gather.default", _r(4, 10), 1, _ids(10, 4, 6))
    yield make_case("aten.gather.default", _r(4, 10), 1, _ids(10, 2, 6))
    yield make_case("aten.gather.default", _r(1, 10), 1, _ids(10, 1, 6))
    yield make_case("aten.scatter_add.default", _r(4, 10), 1, _ids(10, 4, 6), _r(4, 6))
    yield make_case("aten.scatter.src", _r(4, 10), 1, _ids(10, 4, 1), _r(4, 1))
    yield make_case("aten.scatter.value", _r(4, 10), 1, _ids(10, 4, 1), 1.0)
    yield make_case("aten.index_select.default", _r(4, 10), 1, _ids(10, 6))
    yield make_case("aten.index_add.default", _r(4, 10), 1, _ids(10, 6), _r(4, 6))
    x = _r(4, 10, 6)
    for indices in (
        [_ids(4, 6)], [None, _ids(10, 4, 2)], [_ids(4, 6, 1), _ids(10, 8)],
        [_ids(4, 8), None, _ids(6, 8)], [None, None, _ids(6, 4)], [_ids(4)],
    ):  # fmt: skip
        yield make_case("aten.index.Tensor", x, indices)
        picked = torch.ops.aten.index(x, indices)
        yield make_case("aten.index_put.default", x, indices, _r(*picked.shape), True)
    yield make_case("aten.index_put.default", x, [None, _ids(10, 4)], _r(1, 6), True)
    yield make_case("aten.index_put.default", x, [None, torch.randperm(10)[:4]], _r(4, 4, 6))


def attention() -> Iterator[Case]:
    key = torch.tensor(7)
    for dropout in (0.0, 0.2):
        for kv, causal in ((4, False), (2, True), (1, True)):
            yield from _attention(kv, None, key if dropout else None, causal, dropout)
        for mask in (
            _r(2, 1, 6, 6),
            _r(1, 4, 1, 6),
            _r(6, 6),
            _bool(2, 1, 1, 6) | _bool(1).new_ones(1),
        ):
            yield from _attention(2, mask, key if dropout else None, False, dropout)
        # blocks of query heads that end within a group, or hold a part of one
        yield from _attention(2, _r(1, 6, 1, 6), key if dropout else None, False, dropout, heads=6)
        yield from _attention(3, None, key if dropout else None, True, dropout, heads=6)
        yield from _attention(2, _r(1, 8, 6, 6), key if dropout else None, False, dropout, heads=8)


def _attention(
    kv: int,
    mask: torch.Tensor | None,
    key: torch.Tensor | None,
    causal: bool,
    dropout: float,
    heads: int = 4,
) -> Iterator[Case]:
    q, k, v = _r(2, heads, 6, 8), _r(2, kv, 6, 8), _r(2, kv, 6, 8)
    options = (mask, key, causal, 0, 0.3, dropout, 5, [2, heads, 6, 6], [0, 0, 0, 0])
    shape = mask if mask is None else mask.shape
    label = f"heads={heads} kv={kv} causal={causal} dropout={dropout} mask={shape}"
    case = make_case("autopar.attention", q, k, v, *options, label=f"attention {label}")
    yield case
    want = mask is not None and mask.is_floating_point()
    yield make_case(
        "autopar.attention_backward", _r(*q.shape), q, k, v, *case.results, *options, want,
        label=f"attention_backward {label}",
    )  # fmt: skip


def attention_for_misses() -> Iterator[Case]:
    """Shapes under which no pair of parts looks like equal head dims to the fused kernels."""
    for kv, mask in ((4, None), (2, None), (1, None), (2, _r(2, 1, 6, 6)), (2, _r(1, 4, 1, 6))):
        q, k, v = _r(2, 4, 6, 7), _r(2, kv, 6, 7), _r(2, kv, 6, 3)
        options = (mask, None, False, 0, 0.3, 0.0, 5, [2, 4, 6, 6], [0, 0, 0, 0])
        case = make_case("autopar.attention", q, k, v, *options)
        yield case
        if kv == 2 and mask is None:
            yield make_case(
                "autopar.attention_backward",
                _r(2, 4, 6, 3),
                q,
                k,
                v,
                *case.results,
                *options,
                False,
            )


def loss() -> Iterator[Case]:
    target = _ids(10, 8)
    target[1], target[3] = -100, 5
    for weight in (None, torch.rand(10, dtype=F64)):
        for ignored, labels in ((-100, target), (5, target.clamp_min(0))):
            logp = _r(8, 10).log_softmax(1)
            yield make_case("autopar.nll_loss_sum", logp, labels, weight, ignored)
            yield make_case("autopar.nll_count", labels, weight, ignored, F64)
            for shape in ((), (8,)):
                yield make_case(
                    "autopar.nll_loss_backward", _r(*shape), labels, weight, ignored, 10, F64
                )


def factories() -> Iterator[Case]:
    yield make_case("aten.full.default", [4, 10], 0.0, dtype=F64)
    yield make_case("aten.full.default", [4, 10], 2.0, dtype=F64)
    yield make_case("aten.full.default", [], 1, dtype=F64)
    yield make_case("aten.arange.start_step", 0, 10, 1)
    yield make_case("aten.triu_indices.default", 4, 6, 1)
    yield make_case("aten.tril_indices.default", 4, 6)
    yield make_case("autopar.constant", [1.0, 2.0], [2], F64)


def randomness() -> Iterator[Case]:
    key = torch.tensor(7)
    yield make_case("autopar.dropout", _r(4, 10, 6), key, 0.3, 3, [4, 10, 6], [0, 0, 0])
    yield make_case("autopar.dropout_backward", _r(4, 10), _bool(4, 10), 0.3)
    yield make_case("autopar.uniform", key, 3, [4, 10], [4, 10], [0, 0], F64)
    yield make_case("autopar.normal", key, 3, [4, 10], [4, 10], [0, 0], F64)


def pooling() -> Iterator[Case]:
    x = _r(4, 6, 8, 8)
    y, index = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    yield make_case("aten.max_pool2d_with_indices.default", x, [3, 3], [2, 2], [1, 1])
    yield make_case("aten.max_pool2d_with_indices_backward.default", torch.randn_like(y), x,
                    [3, 3], [2, 2], [1, 1], [1, 1], False, index)  # fmt: skip
    yield make_case("aten.avg_pool2d.default", x, [2, 2], [2, 2])
    yield make_case("aten.avg_pool2d_backward.default", _r(4, 6, 4, 4), x, [2, 2], [2, 2], [0, 0],
                    False, True, None)  # fmt: skip
    yield make_case("aten._adaptive_avg_pool2d.default", x, [2, 2])
    yield make_case("aten._adaptive_avg_pool2d_backward.default", _r(4, 6, 2, 2), x)
    yield make_case("aten.upsample_nearest2d.default", x, [16, 16])
    yield make_case("aten.upsample_nearest2d_backward.default", _r(4, 6, 16, 16), [16, 16],
                    [4, 6, 8, 8])  # fmt: skip
    yield make_case("aten.upsample_bilinear2d.default", x, [16, 16], False)


FAMILIES: Mapping[str, Callable[[], Iterator[Case]]] = {
    function.__name__: function
    for function in (
        elementwise, contraction, grouped, moe, reduction, normalization, views, indexing,
        attention, loss, factories, randomness, pooling,
    )
}  # fmt: skip
