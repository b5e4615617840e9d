"""Curves are recovered from points that were made with known ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import ConfigError
from cost_models.fit import (
    MatmulCurve,
    ascending,
    busy_factors,
    fit_link,
    fit_matmul,
    fit_memory,
    fit_operator,
    fit_optimizer,
    fit_sums,
    fit_waiting,
    hidden_share,
    least_squares,
)
from cost_models.measure_compute import FIRST_MATMULS, MORE_MATMULS
from cost_models.profile import Point, PointKind, Profile
from cost_models.profiled import fit_profile

K = PointKind
CURVE = MatmulCurve(peak_flops=9e10, half_k=6.0, half_edge=4.0, launch_s=2e-6)
DIMS = (*FIRST_MATMULS, *MORE_MATMULS)


def noisy(seconds: float, rng: random.Random, part: float) -> float:
    return seconds * (1 + rng.uniform(-part, part))


def matmuls(part: float = 0.0, dims=DIMS) -> list[Point]:
    rng = random.Random(1)
    return [Point(K.MATMUL, "float32", d, noisy(CURVE.time_s(d), rng, part)) for d in dims]


def test_a_matmul_curve_is_recovered_exactly():
    found = fit_matmul(matmuls(), CURVE.launch_s)
    assert found.peak_flops == pytest.approx(CURVE.peak_flops, rel=1e-6)
    assert found.half_k == pytest.approx(CURVE.half_k, rel=1e-4)
    assert found.half_edge == pytest.approx(CURVE.half_edge, rel=1e-4)


def test_noise_of_five_percent_moves_a_matmul_curve_by_less():
    found = fit_matmul(matmuls(0.05), CURVE.launch_s)
    assert found.peak_flops == pytest.approx(CURVE.peak_flops, rel=0.05)
    for dims in DIMS:
        assert found.time_s(dims) == pytest.approx(CURVE.time_s(dims), rel=0.08)


def test_a_longer_inner_size_costs_less_for_each_flop():
    per_flop = [CURVE.time_s((1, 256, 256, k)) / k for k in (8, 64, 512)]
    assert per_flop == sorted(per_flop, reverse=True)


@pytest.mark.parametrize("part", [0.0, 0.05])
def test_a_link_is_recovered(part: float):
    rng = random.Random(2)
    sizes = (2**10, 2**16, 2**20, 2**23)
    points = [
        Point(K.ALL_GATHER, "float32", (n, 4), noisy(3e-4 + n / 2e9, rng, part)) for n in sizes
    ]
    found = fit_link(points)
    assert found.alpha_s == pytest.approx(3e-4, rel=1e-6 + part)
    assert found.bandwidth_bytes_per_s == pytest.approx(2e9, rel=1e-6 + 2 * part)


def test_a_link_is_followed_through_the_payloads_that_were_measured():
    times = {2**10: 1e-4, 2**16: 0.8e-4, 2**20: 5e-4, 2**23: 8e-3}
    found = fit_link([Point(K.ALL_REDUCE, "float32", (n, 2), t) for n, t in times.items()])
    # a larger payload never costs less: two that do are taken for one another
    assert found.time_s(1) == found.time_s(2**10) == found.time_s(2**16) == pytest.approx(0.9e-4)
    assert found.time_s(2**20) == 5e-4
    assert found.time_s(2**22 + 2**19) == pytest.approx((5e-4 + 8e-3) / 2)
    assert found.time_s(2**24) == pytest.approx(8e-3 + 2**23 / found.bandwidth_bytes_per_s)
    priced = [found.time_s(2**n) for n in range(30)]
    assert priced == sorted(priced)


def test_times_are_made_to_ascend_by_means_of_neighbours():
    rng = random.Random(3)
    for _ in range(200):
        pairs = [(n, rng.choice([1.0, 2.0, 3.0, 5.0])) for n in range(rng.randint(1, 7))]
        found = ascending(rng.sample(pairs, len(pairs)))
        assert [n for n, _ in found] == [n for n, _ in pairs]
        times = [t for _, t in found]
        assert times == sorted(times)
        assert sum(times) == pytest.approx(sum(t for _, t in pairs))
        # no other ascending times are nearer, by the condition of Kuhn and Tucker
        left = 0.0
        for (_, given), time_s, after in zip(pairs, times, [*times[1:], float("inf")], strict=True):
            left += given - time_s
            assert left >= -1e-9
            assert time_s == after or left == pytest.approx(0.0, abs=1e-9)


def rounds(each_s: float, share: float, comm_s: float = 3e-4, name: str = "") -> list[Point]:
    points = []
    for count in (1, 4, 12):
        compute_s = count * 3e-4
        times = {
            "compute": compute_s, "comm": comm_s,
            "round": compute_s * (1 + share) + comm_s + each_s,
        }  # fmt: skip
        points += [
            Point(K.LOCKSTEP, "float32", (count, 2), t, name=f"{n} {name}".strip(), busy=2)
            for n, t in times.items()
        ]
    return points


def test_waiting_costs_by_time_and_by_what_is_computed_in_between():
    found = fit_waiting(rounds(7e-5, 0.04))
    assert found.each_s == pytest.approx(7e-5)
    assert found.share == pytest.approx(0.04)
    assert found.time_s(10, 0.1) == pytest.approx(7e-4 + 4e-3)
    # ranks that wait lend their cores to others: rounds may take less than their parts
    assert fit_waiting(rounds(-5e-5, -0.1)).time_s(10, 0.1) == 0.0
    # and where only one of three lengths takes longer, that is noise
    mixed = [
        Point(p.kind, p.dtype, p.sizes, p.time_s + (1e-5 if p.sizes[0] == 4 else 0.0),
              name=p.name, busy=2) if p.name == "round" else p
        for p in rounds(-5e-5, -0.01)
    ]  # fmt: skip
    assert fit_waiting(mixed).time_s(10, 0.1) == 0.0
    few = [p for p in rounds(1e-5, 0.1) if p.sizes[0] == 4]
    with pytest.raises(ConfigError, match="rounds of 2 ranks: has 1 different sizes in 3 points"):
        fit_waiting(few)


def test_sums_of_gradients_cost_by_tensor_and_by_byte_if_that_can_be_told():
    points = [
        Point(K.ACCUMULATE, "float32", (n, b), n * 3e-6 + b * 1e-10)
        for n, b in ((16, 2**24), (100, 2**20))
    ]
    assert fit_sums(points).time_s(10, 1e6) == pytest.approx(3e-5 + 1e-4)
    assert fit_sums(points[:1]).time_s(10, 2**23) == pytest.approx(points[0].time_s / 2)


def test_levels_of_the_caches_are_recovered():
    launch_s = 3e-6
    levels = {2**15: 80e9, 2**20: 40e9, 2**26: 8e9}
    points = [
        Point(K.STREAM, "float32", (n,), launch_s + n / b, name="add") for n, b in levels.items()
    ]
    found = fit_memory(points, launch_s)
    for size, bandwidth in levels.items():
        assert found.bandwidth_bytes_per_s(size) == pytest.approx(bandwidth)
        assert found.time_s(size) == pytest.approx(launch_s + size / bandwidth)
    assert found.bandwidth_bytes_per_s(1) == pytest.approx(80e9)
    assert found.bandwidth_bytes_per_s(2**40) == pytest.approx(8e9)
    between = [found.bandwidth_bytes_per_s(2**n) for n in range(15, 27)]
    assert between == sorted(between, reverse=True)


def test_an_optimizer_costs_by_tensor_and_by_byte():
    sizes = ((8, 2**17), (8, 2**23), (8, 2**26))
    points = [
        Point(K.OPTIMIZER, "float32", (n, b), n * 4e-5 + b * 1e-9, name="adamw") for n, b in sizes
    ]
    found = fit_optimizer(points)
    assert found.per_tensor_s == pytest.approx(4e-5)
    assert found.per_byte_s == pytest.approx(1e-9)
    assert found.time_s(100, 1e6) == pytest.approx(5e-3)


def test_an_operator_has_a_start_and_a_share_of_the_roofline():
    found = fit_operator([(x, 5e-6 + 1.5 * x) for x in (1e-6, 1e-5, 1e-3)])
    assert found.time_s(1e-4) == pytest.approx(155e-6)
    # at one size alone a share is all that can be told
    assert fit_operator([(1e-4, 3e-4)]).time_s(2e-4) == pytest.approx(6e-4)
    assert fit_operator([(0.0, 4e-6)]).time_s(0.0) == pytest.approx(4e-6)


def test_no_coefficient_is_negative():
    # the best line falls below 0 at x = 0
    assert least_squares([[1, 1], [1, 2], [1, 3]], [0.5, 2.0, 4.0])[0] == 0.0
    rows = [Point(K.ALL_REDUCE, "float32", (n, 2), n * n * 1e-12) for n in (1000, 10000, 100000)]
    found = fit_link(rows)
    assert found.alpha_s >= 0
    assert found.bandwidth_bytes_per_s > 0


def test_rows_that_tell_nothing_apart_are_refused():
    with pytest.raises(ConfigError, match="0 points do not tell 0 unknowns apart"):
        least_squares([], [])


@pytest.mark.parametrize(
    ("fit", "points", "message"),
    [
        (
            lambda p: fit_matmul(p, 0.0), matmuls(dims=DIMS[:3]) * 2,
            "matmuls in float32: has 3 different sizes in 6 points, needs at least 4; profile",
        ),
        (
            lambda p: fit_memory(p, 0.0), [Point(K.STREAM, "float32", (9,), 1.0, name="exp")],
            "memory passes 'exp': has 1 different sizes in 1 points, needs at least 2",
        ),
        (
            fit_link, [Point(K.P2P, "float32", (9, 2), 1.0), Point(K.P2P, "float32", (10, 2), 1.0)],
            "p2p of 2 ranks: has 2 different sizes in 2 points, needs at least 3",
        ),
        (
            fit_optimizer, [Point(K.OPTIMIZER, "float32", (1, 9), 1.0, name="sgd")],
            "optimizer 'sgd': has 1 different sizes in 1 points, needs at least 2",
        ),
        (fit_operator, [], "an operator: has 0 points, needs at least 1"),
    ],
)  # fmt: skip
def test_too_few_points_are_refused_with_both_numbers(fit, points, message):
    with pytest.raises(ConfigError, match=message):
        fit(points)


def test_a_profile_with_too_few_points_of_a_curve_is_refused():
    profile = Profile(machine="m", date="d", points=tuple(matmuls(dims=DIMS[:2])))
    with pytest.raises(ConfigError, match="has 2 different sizes in 2 points, needs at least 4"):
        fit_profile(profile)
    for is_complete in (True, False):
        with pytest.raises(
            ConfigError, match="the 0 points of .* hold 0 of them, needs at least 4"
        ):
            fit_profile(replace(profile, points=(), is_complete=is_complete))


def test_a_profile_that_ran_out_of_time_is_used_without_the_curves_that_lack_points():
    half = [Point(K.MATMUL, "float64", d, CURVE.time_s(d)) for d in DIMS[:2]]
    profile = Profile(machine="m", date="d", points=(*matmuls(), *half), is_complete=False)
    found = fit_profile(profile)
    assert set(found.matmul) == {"float32"}
    assert "matmuls in float64: has 2 different sizes" in found.left_out[0]
    with pytest.raises(ConfigError, match="matmuls in float64: has 2 different sizes"):
        fit_profile(replace(profile, is_complete=True))
    with pytest.raises(ConfigError, match="matmuls in float32: has 3 different sizes"):
        fit_profile(replace(profile, points=tuple(matmuls(dims=DIMS[:3]))))


def test_what_ranks_take_from_each_other_is_the_median_ratio():
    alone = [Point(K.STREAM, "float32", (n,), 1.0) for n in (1, 2, 3)]
    busy = [Point(K.STREAM, "float32", (n,), t, busy=2) for n, t in ((1, 1.1), (2, 1.5), (3, 9.0))]
    other = [Point(K.STREAM, "float32", (7,), 5.0, busy=2)]  # not measured alone
    assert busy_factors([*alone, *busy, *other]) == {(K.STREAM, 2): 1.5}


@pytest.mark.parametrize(
    ("comm_s", "compute_s", "both_s", "hidden"),
    [(1, 4, 4, 1), (4, 1, 5, 0), (2, 2, 3, 0.5), (2, 2, 9, 0), (2, 2, 1, 1)],
)
def test_what_is_hidden_of_the_shorter_lane(comm_s, compute_s, both_s, hidden):
    assert hidden_share(comm_s, compute_s, both_s) == hidden
