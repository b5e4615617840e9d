"""What the papers on pipelines claim, from simulations alone: idle shares, memory, gains."""

from __future__ import annotations

import pytest

from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.plan.zero_bubble import zero_bubble_h1_order, zero_bubble_v_order
from cost_models.memory_timeline import StageMemory, memory_timelines
from cost_models.simulate import StageSeconds, simulate

GPIPE, PLAIN = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B
INTERLEAVED = ScheduleKind.INTERLEAVED
UNIT = StageSeconds(forward_s=1, backward_s=2, weight_s=1)
PIPELINES = [(2, 4), (4, 8), (8, 8), (8, 64), (32, 128)]


def stepped(order, num_stages, stage=UNIT, *, p2p_s=0.0):
    edges = [(s, s + 1) for s in range(num_stages - 1)]
    lists = action_lists(
        order,
        MeshShape(pp=num_stages),
        forward_edges=edges,
        backward_edges=[(t, s) for s, t in edges],
    )
    return simulate(lists, [stage] * num_stages, p2p_s=p2p_s)


def of_kind(kind, p, m, v=1, **options):
    """A step of a model that takes 3 seconds per micro-batch and rank whatever ``v`` is."""
    stage = StageSeconds(forward_s=1 / v, backward_s=2 / v)
    return stepped(compute_order(kind, p, v, m), p * v, stage, **options)


@pytest.mark.parametrize(("p", "m"), PIPELINES)
@pytest.mark.parametrize("kind", [GPIPE, PLAIN])
def test_gpipe_and_1f1b_idle_p_minus_1_of_m_plus_p_minus_1(kind, p, m):
    # Huang et al. 2019; Narayanan et al. 2021, section 2.2
    assert of_kind(kind, p, m).bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), PIPELINES[:4])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p, m, v):
    # Narayanan et al. 2021: idle over ideal time is (p - 1) / (m v)
    result = of_kind(INTERLEAVED, p, m, v)
    ideal_s = 3 * m
    assert (result.makespan_s - ideal_s) / ideal_s == pytest.approx((p - 1) / (m * v))


@pytest.mark.parametrize(("p", "m"), PIPELINES[:4])
def test_zero_bubble_h1_idles_a_third_of_1f1b(p, m):
    # Qi et al. 2024, with F = I = W
    plain = of_kind(PLAIN, p, m).makespan_s - 3 * m
    split = stepped(zero_bubble_h1_order(p, m), p).makespan_s - 3 * m
    assert split == pytest.approx(plain / 3)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_v_idles_only_at_its_ends(p, m):
    # Qi et al. 2024: no bubble once a rank has begun; the last rank begins p - 1 forwards late
    stage = StageSeconds(forward_s=0.5, backward_s=1, weight_s=0.5)
    result = stepped(zero_bubble_v_order(p, m), 2 * p, stage)
    assert result.makespan_s - 3 * m == pytest.approx(0.5 * (p - 1))


@pytest.mark.parametrize(("p", "m"), PIPELINES[:4])
def test_memory_of_activations_by_schedule(p, m):
    # GPipe keeps all micro-batches, 1F1B and ZB-H1 as many as there are ranks ahead
    saved = [StageMemory(saved_bytes=12)] * p
    first = [
        memory_timelines(stepped(order, p), saved)[0].peak_bytes
        for order in (
            compute_order(GPIPE, p, 1, m),
            compute_order(PLAIN, p, 1, m),
        )
    ]
    assert first == [12 * m, 12 * p]
    kept = [StageMemory(saved_bytes=12, weight_saved_bytes=12)] * p
    split = memory_timelines(stepped(zero_bubble_h1_order(p, m), p), kept)
    assert [t.peak_bytes for t in split] == [12 * p] * p


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 4)])
def test_interleaving_takes_more_activations(p, m, v):
    # Korthikanti et al. 2023, section 4.2.3: 1 + (p - 1) / (p v) of a model's activations
    result = of_kind(INTERLEAVED, p, m, v)
    whole = 96
    stages = [StageMemory(saved_bytes=whole // (p * v))] * (p * v)
    peak = memory_timelines(result, stages)[0].peak_bytes
    assert peak == pytest.approx(whole * (1 + (p - 1) / (p * v)))


def test_interleaving_gains_more_than_a_tenth_at_small_batches():
    # Narayanan et al. 2021, figure 12: 12 ranks, two stages each, batches of 12 to 60
    gains = []
    for m in (12, 24, 36, 48, 60):
        plain = of_kind(PLAIN, 12, m, p2p_s=0.01).makespan_s
        woven = of_kind(INTERLEAVED, 12, m, 2, p2p_s=0.01).makespan_s
        gains.append(plain / woven - 1)
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.25
    assert gains[1] > 0.1
    assert gains[-1] > 0.05


def test_messages_tax_1f1b():
    for p2p_s, tax in ((0.1, 0.058), (0.5, 0.29)):
        for m in (32, 128):
            free = of_kind(PLAIN, 8, m).makespan_s
            assert of_kind(PLAIN, 8, m, p2p_s=p2p_s).makespan_s / free - 1 == pytest.approx(
                tax, abs=0.01
            )
