from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Device, DeviceKind, EfficiencyCurve, parse_devices
from autopar.cluster.presets import PRESETS
from autopar.ir.graph import Arg, Meta, Ref, TensorMeta
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel
from cost_models.compute import matmul_efficiency, work_time_s
from cost_models.flops import OpClass, flops, score_matrix_bytes, work_of

PLAIN = Device(
    name="plain",
    kind=DeviceKind.CPU,
    peak_flops=(("float32", 1e12),),
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e9,
    launch_overhead_s=1e-6,
    curve=EfficiencyCurve(matmul_fraction=0.5, memory_fraction=0.5, tile=1, half_tiles=0, half_k=0),
    source="made up",
)


def meta(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(shape, dtype)


def refs(count: int) -> tuple[Arg, ...]:
    return tuple(Ref(f"x{i}") for i in range(count))


def mm(m: int, k: int, n: int, dtype: str = "bfloat16") -> tuple[list[Meta], TensorMeta]:
    return [meta(m, k, dtype=dtype), meta(k, n, dtype=dtype)], meta(m, n, dtype=dtype)


def test_matmul_flops_and_bytes_by_hand():
    # 2 * 4 * 8 * 2 = 128 FLOP; (32 + 16 + 8) * 4 bytes = 224
    operands, result = mm(4, 8, 2, "float32")
    work = work_of("aten.mm.default", refs(2), operands, result)
    assert (work.flops, work.moved_bytes, work.dims) == (128, 224, (1, 4, 2, 8))


def test_batched_matmul_flops_by_hand():
    # 3 * 2 * 4 * 8 * 2
    operands = [meta(3, 4, 8), meta(3, 8, 2)]
    assert flops("aten.bmm.default", refs(2), operands, meta(3, 4, 2)) == 384


def test_roofline_by_hand():
    # 2e9 FLOP at half of 1e12/s: 4 ms; 12 MB at half of 1 GB/s: 24 ms; and 1 us to launch
    operands, result = mm(1000, 1000, 1000, "float32")
    work = work_of("aten.mm.default", refs(2), operands, result)
    assert work_time_s(work, PLAIN) == pytest.approx(24e-3 + 1e-6)
    fast_memory = replace(PLAIN, memory_bandwidth_bytes_per_s=1e12)
    assert work_time_s(work, fast_memory) == pytest.approx(4e-3 + 1e-6)


def test_causal_attention_is_half_of_the_work():
    q, o, lse = meta(2, 4, 8, 16), meta(2, 4, 8, 16), meta(2, 4, 8)
    head = (*refs(3), None, None)
    tail = (0, 0.25, 0.0, 0, (2, 4, 8, 16), (0, 0, 0, 0))
    # 4 * B H S T D = 4 * 2 * 4 * 8 * 8 * 16
    assert flops("autopar.attention", (*head, False, *tail), [q, q, q], (o, lse)) == 32768
    assert flops("autopar.attention", (*head, True, *tail), [q, q, q], (o, lse)) == 16384


def test_attention_backward_is_two_and_a_half_forwards():
    q, lse = meta(2, 4, 8, 16), meta(2, 4, 8)
    args = (*refs(6), None, None, True, 0, 0.25, 0.0, 0, (2, 4, 8, 16), (0, 0, 0, 0), False)
    assert flops("autopar.attention_backward", args, [q] * 5 + [lse], (q, q, q, None)) == 40960


def test_grouped_heads_do_the_work_of_all_query_heads():
    q, kv = meta(1, 8, 16, 4), meta(1, 2, 16, 4)
    args = (*refs(3), None, None, False, 0, 0.5, 0.0, 0, (1, 8, 16, 4), (0, 0, 0, 0))
    # 4 * 8 * 16 * 16 * 4
    assert flops("autopar.attention", args, [q, kv, kv], (q, meta(1, 8, 16))) == 32768


def test_attention_without_a_fused_kernel_holds_its_scores():
    q = meta(1, 2, 8, 4)
    head, tail = (*refs(3), None, None), (0, (1, 2, 8, 4), (0, 0, 0, 0))
    # 1 * 2 * 8 * 8 scores: 4 copies of 4 bytes, and 24 bytes of random bits
    fused = (*head, True, 0, 0.5, 0.0, *tail)
    later = (*head, True, 4, 0.5, 0.0, *tail)
    dropped = (*head, False, 0, 0.5, 0.1, *tail)
    sizes = [score_matrix_bytes("autopar.attention", a, [q] * 3) for a in (fused, later, dropped)]
    assert sizes == [0, 128 * 16, 128 * 40]


def test_convolution_flops_by_hand():
    # each of 2 * 6 * 5 * 5 outputs: 3 channels / 1 group * 9 taps, twice
    x, w, y = meta(2, 3, 7, 7), meta(6, 3, 3, 3), meta(2, 6, 5, 5)
    args = (*refs(2), None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    assert flops("aten.convolution.default", args, [x, w], y) == 300 * 27 * 2
    back = (*refs(3), (0,), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, False))
    one = (*back[:-1], (False, True, False))
    name = "aten.convolution_backward.default"
    assert flops(name, back, [y, x, w], (x, w, None)) == 2 * 300 * 27 * 2
    assert flops(name, one, [y, x, w], (None, w, None)) == 300 * 27 * 2


def test_transposed_convolution_counts_its_inputs():
    x, w, y = meta(2, 3, 5, 5), meta(3, 6, 2, 2), meta(2, 6, 10, 10)
    args = (*refs(2), None, (2, 2), (0, 0), (1, 1), True, (0, 0), 1)
    # each of 150 inputs meets 6 * 4 weights
    assert flops("aten.convolution.default", args, [x, w], y) == 150 * 24 * 2


def test_an_embedding_reads_the_rows_it_needs_and_not_the_table():
    table, ids, out = meta(50_000, 64), meta(2, 8, dtype="int64"), meta(2, 8, 64)
    work = work_of("aten.embedding.default", refs(2), [table, ids], out)
    # 4096 bytes read and written, 128 bytes of indices
    assert work.moved_bytes == 4096 + 4096 + 128


def test_its_backward_writes_the_whole_table():
    grad, ids, out = meta(2, 8, 64), meta(2, 8, dtype="int64"), meta(50_000, 64)
    args = (*refs(2), 50_000, -1, False)
    work = work_of("aten.embedding_dense_backward.default", args, [grad, ids], out)
    assert work.moved_bytes >= out.bytes
    assert work.op_class is OpClass.MEMORY


def test_anything_else_moves_its_operands_and_results_once():
    x = meta(10, 10)
    work = work_of("aten.add.Tensor", refs(2), [x, x], x)
    assert (work.moved_bytes, work.op_class) == (1200, OpClass.MEMORY)
    assert work_of("mystery.op", refs(1), [x], (x, None, x)).moved_bytes == 1200
    assert work_of("aten.full.default", ((10, 10), 0), [], x).moved_bytes == 400


@pytest.mark.parametrize(
    "op", ["aten.view.default", "aten.permute.default", "aten.slice.Tensor", "getitem"]
)
def test_views_are_free(op):
    model = AnalyticCostModel(parse_devices(1))
    assert model.op_time_s(op, (Ref("x"), (4,)), [meta(2, 2)], meta(4)) == 0.0


def test_integers_among_the_operands_weigh_nothing():
    x = meta(4, 4)
    assert (
        work_of("local.shard", (Ref("x"), 0, Ref("c"), 2), [x, None], meta(2, 4)).moved_bytes == 64
    )


@pytest.mark.parametrize(
    ("device", "low", "high"), [("h100-sxm", 0.65, 0.75), ("a100-80gb", 0.7, 0.8), ("l4", 0.4, 0.6)]
)
def test_a_large_matmul_reaches_a_plausible_share_of_the_peak(device, low, high):
    # the MLP of Llama 8B on 8,192 tokens
    model = AnalyticCostModel(parse_devices(f"1:{device}"))
    operands, result = mm(8192, 4096, 14336)
    time_s = model.op_time_s("aten.mm.default", refs(2), operands, result)
    share = 2 * 8192 * 4096 * 14336 / time_s / model.device.peak_flops_for("bfloat16")
    assert low < share < high


def test_a_smaller_matmul_reaches_less_of_the_peak():
    curve = PRESETS["h100-sxm"].device.curve
    shares = [matmul_efficiency((1, n, n, n), curve) for n in (64, 128, 512, 1024, 4096, 16384)]
    assert all(a < b for a, b in pairwise(shares))
    assert shares[-1] < curve.matmul_fraction


def test_one_token_is_bound_by_reading_the_weights():
    model = AnalyticCostModel(parse_devices("1:h100-sxm"))
    operands, result = mm(1, 4096, 4096)
    device = model.device
    read_s = 2 * 4096**2 / (device.memory_bandwidth_bytes_per_s * device.curve.memory_fraction)
    time_s = model.op_time_s("aten.mm.default", refs(2), operands, result)
    assert time_s == pytest.approx(read_s + device.launch_overhead_s, rel=0.01)


@given(
    m=st.integers(1, 5000), n=st.integers(1, 5000), k=st.integers(1, 20000),
    which=st.integers(0, 2), more=st.integers(1, 5000), name=st.sampled_from(sorted(PRESETS)),
)  # fmt: skip
def test_a_larger_matmul_never_takes_less_time(m, n, k, which, more, name):
    device = PRESETS[name].device
    larger = [m, k, n]
    larger[which] += more
    times = []
    for sizes in ([m, k, n], larger):
        operands, result = mm(*sizes)
        times.append(work_time_s(work_of("aten.mm.default", refs(2), operands, result), device))
    assert times[0] <= times[1] * (1 + 1e-9)


def test_gelu_on_a_cpu_is_bound_by_arithmetic_and_on_a_gpu_by_memory():
    x = meta(1024, 1024)
    work = work_of("aten.gelu.default", refs(1), [x], x)
    for name, is_arithmetic in (("cpu", True), ("h100-sxm", False)):
        device = PRESETS[name].device
        moved_s = work.moved_bytes / (
            device.memory_bandwidth_bytes_per_s * device.curve.memory_fraction
        )
        exceeds = work_time_s(work, device) - device.launch_overhead_s > moved_s * 1.0001
        assert exceeds == is_arithmetic


def test_the_analytic_model_is_a_cost_model_and_says_its_source():
    model: CostModel = AnalyticCostModel(parse_devices("2x8:a100-80gb + 4x4:l4"))
    assert "NVIDIA L4 [data sheet]" in model.source  # the slowest of the mix
