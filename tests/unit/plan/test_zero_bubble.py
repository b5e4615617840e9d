"""Split backwards and deeper warm-ups: orders, and their times against closed forms."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from autopar.errors import ConfigError
from autopar.plan.actions import ActionKind
from autopar.plan.orders import order_of
from autopar.plan.schedule import (
    action_lists,
    alive_together,
    all_in_flight,
    compute_order,
    in_flight,
)
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.plan.zero_bubble import eager_1f1b_order, zero_bubble_h1_order, zero_bubble_v_order
from cost_models.pipeline import (
    one_f_one_b_warmup,
    steady_period_s,
    zero_bubble_h1_step_time_s,
    zero_bubble_v_step_time_s,
)
from cost_models.simulate import StageSeconds, simulate

W = ActionKind.BACKWARD_WEIGHT


def run(order, stages, *, p2p_s=0.0):
    edges = [(s, s + 1) for s in range(len(stages) - 1)]
    lists = action_lists(
        order,
        MeshShape(pp=len(stages)),
        forward_edges=edges,
        backward_edges=[(t, s) for s, t in edges],
    )
    return simulate(lists, stages, p2p_s=p2p_s)


def test_the_depths_of_1f1b_give_1f1b():
    for pp, count in ((1, 3), (3, 7), (4, 2)):
        plain = compute_order(ScheduleKind.ONE_F_ONE_B, pp, 1, count)
        assert eager_1f1b_order(one_f_one_b_warmup(pp), count) == plain


def test_a_warm_up_depth_is_the_number_in_flight():
    order = eager_1f1b_order([5, 3, 1], 9)
    assert [in_flight(order, s) for s in range(3)] == [5, 3, 1]


@pytest.mark.parametrize("seed", range(12))
def test_the_steady_period_under_a_warm_up_vector_is_the_formula(seed):
    rng = random.Random(seed)
    num_stages, p2p_s = rng.randint(2, 4), rng.choice([0, 0.25, 0.5])
    stages = [
        StageSeconds(forward_s=rng.randint(6, 12) / 8, backward_s=rng.randint(12, 24) / 8)
        for _ in range(num_stages)
    ]
    warmup = [1]
    for _ in range(num_stages - 1):
        warmup.insert(0, warmup[0] + rng.choice([0, 1, 2]))
    # what repeats does so every w_i - w_j + 1 micro-batches, at most 7: 420 is a multiple of all
    short_s, long_s = (
        run(eager_1f1b_order(warmup, count), stages, p2p_s=p2p_s).makespan_s for count in (300, 720)
    )
    work = [s.forward_s + s.backward_s for s in stages]
    assert (long_s - short_s) / 420 == pytest.approx(steady_period_s(work, warmup, p2p_s=p2p_s))


def test_deeper_warm_ups_buy_back_the_time_of_messages():
    stages = [StageSeconds(forward_s=1, backward_s=2)] * 8
    taxes = []
    for warmup in (one_f_one_b_warmup(8), range(15, 0, -2)):
        free, taxed = (
            run(eager_1f1b_order(warmup, 32), stages, p2p_s=c).makespan_s for c in (0, 0.1)
        )
        taxes.append(taxed / free - 1)
    assert taxes[0] == pytest.approx(0.058, abs=0.002)
    assert taxes[1] == pytest.approx(0.012, abs=0.002)


@pytest.mark.parametrize("seed", range(10))
def test_zero_bubble_h1_takes_what_the_closed_form_says(seed):
    rng = random.Random(seed)
    pp = rng.randint(1, 8)
    count = rng.randint(pp, 3 * pp)
    forward_s, input_s = rng.uniform(0.5, 2), rng.uniform(0.5, 2)
    weight_s = rng.uniform(0, min(forward_s, input_s))
    stage = StageSeconds(forward_s=forward_s, backward_s=input_s + weight_s, weight_s=weight_s)
    result = run(zero_bubble_h1_order(pp, count), [stage] * pp)
    closed_s = zero_bubble_h1_step_time_s(
        num_ranks=pp, num_microbatches=count,
        forward_s=forward_s, input_s=input_s, weight_s=weight_s,
    )  # fmt: skip
    assert result.makespan_s == pytest.approx(closed_s)


@pytest.mark.parametrize(("pp", "count"), [(1, 1), (2, 3), (4, 7), (4, 20), (8, 16)])
def test_zero_bubble_v_takes_what_the_closed_form_says(pp, count):
    stage = StageSeconds(forward_s=0.5, backward_s=1.0, weight_s=0.5)
    result = run(zero_bubble_v_order(pp, count), [stage] * (2 * pp))
    closed_s = zero_bubble_v_step_time_s(num_ranks=pp, num_microbatches=count, unit_s=0.5)
    assert result.makespan_s == pytest.approx(closed_s)
    for rank in range(pp):  # no idle second between a rank's first and last work
        spans = [s for s in result.compute_spans(rank) if s.duration_s]
        assert spans[-1].end_s - spans[0].start_s == pytest.approx(6 * count * 0.5)


def test_split_backwards_hold_a_micro_batch_until_its_weights_are_done():
    order = zero_bubble_h1_order(4, 8)
    result = run(order, [StageSeconds(forward_s=1, backward_s=2, weight_s=1)] * 4)
    assert [result.peak_in_flight(s) for s in range(4)] == [in_flight(order, s) for s in range(4)]
    assert in_flight(order, 0) == 4  # as many as in 1F1B


def test_gradients_are_reduced_after_the_last_weights():
    order = zero_bubble_v_order(2, 3)
    lists = action_lists(order, MeshShape(pp=4), zero_levels=[0, 0, 2, 0])
    for row in lists:
        for position, action in enumerate(row):
            if action.kind is ActionKind.REDUCE_GRAD:
                before = [a for a in row[:position] if a.kind is W and a.stage == action.stage]
                assert before[-1].microbatch == (
                    2 if action.microbatch is None else action.microbatch
                )
    kinds = [a.kind for row in lists for a in row if a.stage == 2]
    assert kinds.count(ActionKind.REDUCE_GRAD) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: eager_1f1b_order([1, 2], 4), r"warm-up depths are \(1, 2\), must be at least 1"),
        (lambda: eager_1f1b_order([], 4), r"a schedule of 0 stages: the least is 1"),
        (lambda: zero_bubble_h1_order(2, 0), r"a schedule of 0 micro-batches"),
        (lambda: zero_bubble_v_order(0, 2), r"a schedule of 0 stages"),
        (
            lambda: zero_bubble_h1_step_time_s(
                num_ranks=4, num_microbatches=3, forward_s=1, input_s=1, weight_s=1
            ),
            r"ZB-H1: 3 micro-batches on 4 ranks .*: simulate others",
        ),
        (
            lambda: zero_bubble_v_step_time_s(num_ranks=4, num_microbatches=6, unit_s=1),
            r"ZB-V: 6 micro-batches on 4 ranks; the closed form needs at least 7",
        ),
    ],
)
def test_what_has_no_order_or_form_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("kind", [k for k in ScheduleKind if k is not ScheduleKind.FORWARD])
@pytest.mark.parametrize("count", [1, 2, 7, 9])
def test_what_is_alive_at_once_is_what_a_walk_through_the_order_finds(kind, count):
    virtual = 2 if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV) else 1
    placement = StagePlacement.V if kind is ScheduleKind.ZBV else StagePlacement.LOOP
    order = order_of(kind, MeshShape(pp=3, virtual=virtual, placement=placement), count)
    stages = 3 * virtual
    assert all_in_flight(order) == tuple(in_flight(order, s) for s in range(stages))
    for row, moments in zip(order, alive_together(order), strict=True):
        tables = [tuple(n for s in m for n in m[s]) for m in moments]
        before, between = Counter(), Counter()
        reached = set()
        for stage, action, _ in row:
            if action is W:
                between[stage] -= 1
            else:
                before[stage] += 1 if action is ActionKind.FORWARD else -1
                between[stage] += action is ActionKind.BACKWARD_INPUT
            now = tuple(n for s in moments[0] for n in (before[s], between[s]))
            reached.add(now)
            assert any(all(a >= b for a, b in zip(t, now, strict=True)) for t in tables)
        assert set(tables) <= reached
