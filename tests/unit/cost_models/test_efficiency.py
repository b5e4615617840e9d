"""Tiles and waves, attention by shape, kernels by name, the host, overlap: each by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Device, DeviceKind, EfficiencyCurve
from autopar.cluster.presets import PRESETS
from autopar.errors import ConfigError
from cost_models.compute import (
    HALF_REUSE,
    HALF_SEQUENCE,
    LARGEST_REUSE,
    attention_efficiency,
    matmul_efficiency,
    work_time_s,
)
from cost_models.constants import CONSTANTS, PriceConstants
from cost_models.flops import OpClass, Work
from cost_models.host import issued_s, with_host_s
from cost_models.kernels import (
    AttentionKernel,
    Backend,
    Float8,
    Kernels,
    attention_share,
    kernel_works,
)
from cost_models.overlap import overlapped_s

# 100 multiprocessors, all of the rate, no start-up of tiles
CURVE = EfficiencyCurve(matmul_fraction=1.0, half_k=0.0, num_units=100)
WAVES = replace(CURVE, wave_share=1.0)
DEVICE = Device(
    name="plain",
    kind=DeviceKind.CUDA,
    peak_flops=(("bfloat16", 1e14), ("float32", 1e13), ("float8", 2e14)),
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e12,
    launch_overhead_s=0.0,
    host_operator_s=1e-5,
    curve=replace(CURVE, memory_fraction=1.0, attention_fraction=0.5),
    source="made up",
)


def matmul(m: int, n: int, k: int, batch: int = 1) -> Work:
    return Work(
        op_class=OpClass.MATMUL,
        flops=2.0 * batch * m * n * k,
        moved_bytes=2.0 * batch * (m * k + k * n + m * n),
        dtype="bfloat16",
        dims=(batch, m, n, k),
    )


def test_full_waves_of_the_largest_tile_reach_the_fraction():
    # 10 x 10 tiles of 256 x 128 on 100 multiprocessors
    assert matmul_efficiency((1, 2560, 1280, 4096), CURVE) == pytest.approx(1.0)
    assert matmul_efficiency((1, 2560, 1280, 4096), WAVES) == pytest.approx(1.0)


def test_a_last_wave_that_is_not_full_costs_a_whole_one():
    # one more row: eleven rows of tiles are 110 tiles, two waves where tiles are not shared out;
    # smaller tiles waste less, so that the loss is below a half
    dims = (1, 2561, 1280, 4096)
    shared, whole = matmul_efficiency(dims, CURVE), matmul_efficiency(dims, WAVES)
    assert whole < shared < 1.0
    half = matmul_efficiency(dims, replace(CURVE, wave_share=0.5))
    assert whole < half < shared


def test_idle_multiprocessors_are_put_to_work_by_cuts_of_k():
    # 25 tiles of 256 x 128: a quarter of the device; four cuts of k fill it
    assert matmul_efficiency((1, 1280, 640, 4096), CURVE) == pytest.approx(1.0)
    # start-up of each tile counts twice for a cut: 1024 / (1024 + 2 * 64) with four cuts, so that
    # 50 tiles of 128 x 128 and two cuts are better: 2048 / (2048 + 2 * 64), at the smaller's rate
    started = replace(CURVE, half_k=64.0)
    rate = 64 / (64 + HALF_REUSE) * (LARGEST_REUSE + HALF_REUSE) / LARGEST_REUSE
    assert matmul_efficiency((1, 1280, 640, 4096), started) == pytest.approx(2048 / 2176 * rate)


def test_a_single_small_tile_has_the_rate_of_its_edge():
    # one tile of 16 x 16 with k cut by 32: 32 of 100 multiprocessors, reuse 8 of 85.3
    rate = 8 / (8 + HALF_REUSE) * (LARGEST_REUSE + HALF_REUSE) / LARGEST_REUSE
    assert matmul_efficiency((1, 16, 16, 4096), CURVE) == pytest.approx(rate * 32 / 100)


def test_sizes_count_as_the_next_multiple_of_the_alignment():
    aligned = replace(CURVE, alignment=64, num_units=1)
    ratio = matmul_efficiency((1, 256, 128, 65), aligned) / matmul_efficiency(
        (1, 256, 128, 128), aligned
    )
    assert ratio == pytest.approx(65 / 128)


@given(
    dims=st.tuples(
        st.integers(1, 64), st.integers(1, 6000), st.integers(1, 6000), st.integers(1, 20000)
    ),
    which=st.integers(0, 3),
    more=st.integers(1, 4000),
    share=st.sampled_from((0.0, 0.3, 1.0)),
    alignment=st.sampled_from((1, 8, 64)),
)
def test_longer_operands_never_cost_less(dims, which, more, share, alignment):
    curve = replace(CURVE, wave_share=share, alignment=alignment, half_k=20.0)
    larger = list(dims)
    larger[which] += more
    cost = [d[0] * d[1] * d[2] * d[3] / matmul_efficiency(tuple(d), curve) for d in (dims, larger)]
    assert cost[0] <= cost[1] * (1 + 1e-9)


def test_attention_by_its_shape():
    long = attention_efficiency((100, 128, 1 << 20, 128), CURVE)
    assert long == pytest.approx(CURVE.attention_fraction, rel=1e-3)
    # as many keys as HALF_SEQUENCE: half of the rate
    short = attention_efficiency((100, 128, int(HALF_SEQUENCE), 128), CURVE)
    assert short == pytest.approx(CURVE.attention_fraction / 2)
    # 50 blocks of rows on 100 multiprocessors
    assert attention_efficiency((50, 128, 1 << 20, 128), CURVE) == pytest.approx(long / 2)
    widths = [attention_efficiency((100, 128, 4096, w), CURVE) for w in (32, 64, 128, 256)]
    assert all(a <= b for a, b in pairwise(widths))
    assert widths[2] == widths[3]  # beyond 128 the matmul units are full
    back = attention_efficiency((100, 128, 1 << 20, 128), CURVE, is_backward=True)
    assert back == pytest.approx(CURVE.attention_backward_fraction, rel=1e-3)


@given(
    dims=st.tuples(
        st.integers(1, 300), st.integers(1, 9000), st.integers(1, 9000), st.integers(1, 300)
    ),
    which=st.integers(0, 3),
    more=st.integers(1, 4000),
)
def test_longer_attention_never_costs_less(dims, which, more):
    larger = list(dims)
    larger[which] += more
    cost = [
        d[0] * d[1] * d[2] * d[3] / attention_efficiency(tuple(d), CURVE) for d in (dims, larger)
    ]
    assert cost[0] <= cost[1] * (1 + 1e-9)


def test_a_slower_attention_kernel_takes_its_share_of_the_rate():
    work = Work(op_class=OpClass.ATTENTION, flops=6e12, dtype="bfloat16")
    times = {
        kernel: sum(work_time_s(w, DEVICE) for w in kernel_works(work, Kernels(attention=kernel)))
        for kernel in AttentionKernel
    }
    # 6e12 FLOP at half of 1e14 per second
    assert times[AttentionKernel.FLASH_2] == pytest.approx(0.12)
    for kernel, time_s in times.items():
        assert time_s == pytest.approx(0.12 / attention_share(kernel))
    halved = PriceConstants(flash_1_share=0.5)
    (slow,) = kernel_works(work, Kernels(attention=AttentionKernel.FLASH_1), halved)
    assert work_time_s(slow, DEVICE) == pytest.approx(0.24)


def test_an_eight_bit_matmul_is_two_casts_and_a_matmul_at_the_other_rate():
    work = matmul(25600, 25600, 25600)
    assert kernel_works(work, Kernels()) == (work,)
    compiled = Kernels(backend=Backend.COMPILED, float8=Float8.TENSORWISE)
    cast, product = kernel_works(work, compiled)
    assert cast.moved_bytes == 5 * 2 * 25600**2
    assert work_time_s(product, DEVICE) == pytest.approx(work_time_s(work, DEVICE) / 2)
    _, rows = kernel_works(work, replace(compiled, float8=Float8.ROWWISE))
    assert work_time_s(rows, DEVICE) == pytest.approx(
        work_time_s(product, DEVICE) / CONSTANTS.rowwise_share
    )
    # scores of attention stay as they are
    scores = matmul(128, 128, 64, batch=8)
    assert kernel_works(scores, compiled) == (scores,)


def test_a_step_of_short_kernels_takes_as_long_as_the_host():
    # 300 operators of 10 us
    assert issued_s(300, DEVICE) == pytest.approx(3e-3)
    assert with_host_s(1e-3, 300, DEVICE) == pytest.approx(3e-3)
    assert with_host_s(5e-3, 300, DEVICE) == 5e-3
    constants = PriceConstants(compiled_host_share=0.5)
    assert with_host_s(0.0, 300, DEVICE, Backend.COMPILED, constants) == pytest.approx(1.5e-3)
    with pytest.raises(ConfigError, match="num_operators is -1"):
        issued_s(-1, DEVICE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slowdown": 1.5}, r"slowdown is 1\.5, must be in \[0, 1\]"),
        ({"flash_1_share": 0.0}, r"flash_1_share is 0\.0, must be in \(0, 1\]"),
        ({"collective_call_s": -1.0}, r"collective_call_s is -1\.0, must be at least 0"),
    ],
)
def test_impossible_constants_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        PriceConstants(**wrong)


def test_overlap_by_hand():
    assert overlapped_s(10.0, 0.0) == 10.0
    assert overlapped_s(0.0, 3.0) == 3.0
    assert overlapped_s(10.0, 4.0, slowdown=0.5) == 12.0  # 4 seconds at two thirds of the speed
    assert overlapped_s(10.0, 20.0, slowdown=0.5) == 20.0
    with pytest.raises(ConfigError, match=r"slowdown 1\.5"):
        overlapped_s(1.0, 1.0, slowdown=1.5)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))
def test_overlap_is_between_the_longer_and_the_sum(compute_s, comm_s, slowdown):
    both = overlapped_s(compute_s, comm_s, slowdown=slowdown)
    assert max(compute_s, comm_s) <= both <= compute_s + comm_s + 1e-12


def test_every_gpu_preset_has_a_host_and_multiprocessors():
    for name, preset in PRESETS.items():
        if preset.device.kind is DeviceKind.CUDA:
            assert preset.device.host_operator_s > 0, name
            assert preset.device.curve.num_units > 0, name
