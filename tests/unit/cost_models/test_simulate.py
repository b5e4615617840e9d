from __future__ import annotations

import random

import pytest

from autopar.errors import ConfigError, DeadlockError
from autopar.plan.actions import Action, ActionKind
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.types import MeshShape, ScheduleKind
from cost_models.pipeline import (
    balanced_step_time_s,
    bubble_fraction,
    one_f_one_b_warmup,
    steady_period_s,
    step_time_s,
)
from cost_models.simulate import Simulation, StageSeconds, simulate

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
ONE_TWO = StageSeconds(forward_s=1.0, backward_s=2.0)


def run(
    kind: ScheduleKind,
    stages: list[StageSeconds],
    num_microbatches: int,
    *,
    pp: int,
    p2p_s: float = 0.0,
    **options: object,
) -> Simulation:
    virtual = len(stages) // pp
    edges = [(s, s + 1) for s in range(len(stages) - 1)]
    lists = action_lists(
        compute_order(kind, pp, virtual, num_microbatches),
        MeshShape(pp=pp, virtual=virtual),
        forward_edges=edges,
        backward_edges=[(t, s) for s, t in edges],
        **options,
    )
    return simulate(lists, stages, p2p_s=p2p_s)


@pytest.mark.parametrize("pp", [1, 2, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 4, 8, 28])
@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
def test_balanced_stages_are_simulated_as_the_closed_form_says(kind, pp, num_microbatches):
    result = run(kind, [ONE_TWO] * pp, num_microbatches, pp=pp)
    closed_s = balanced_step_time_s(
        kind, num_ranks=pp, num_microbatches=num_microbatches, forward_s=1.0, backward_s=2.0
    )
    assert result.makespan_s == pytest.approx(closed_s)
    assert result.bubble_fraction == pytest.approx(bubble_fraction(pp, num_microbatches))
    estimate_s = step_time_s(
        kind, [1.0] * pp, [2.0] * pp, num_ranks=pp, num_microbatches=num_microbatches
    )
    assert estimate_s == pytest.approx(closed_s)


@pytest.mark.parametrize(("pp", "virtual", "rounds"), [(2, 2, 1), (4, 2, 3), (4, 3, 2), (3, 4, 5)])
def test_balanced_interleaving_is_simulated_as_the_closed_form_says(pp, virtual, rounds):
    result = run(ScheduleKind.INTERLEAVED, [ONE_TWO] * (pp * virtual), pp * rounds, pp=pp)
    closed_s = balanced_step_time_s(
        ScheduleKind.INTERLEAVED, num_ranks=pp, num_microbatches=pp * rounds,
        forward_s=1.0, backward_s=2.0, virtual=virtual,
    )  # fmt: skip
    assert result.makespan_s == pytest.approx(closed_s)
    assert result.bubble_fraction == pytest.approx(bubble_fraction(pp, pp * rounds, virtual))


def test_two_stages_by_hand():
    # rank 0: F0 0-1, F1 1-2, waits, B0 4-6, F2 6-7, B1 7-9, B2 10-12
    # rank 1:         F0 1-2, B0 2-4, F1 4-5, B1 5-7, F2 7-8, B2 8-10
    result = run(ScheduleKind.ONE_F_ONE_B, [ONE_TWO] * 2, 3, pp=2)
    text = [
        " ".join(f"{s.action}:{s.start_s:.0f}" for s in result.compute_spans(rank) if s.duration_s)
        for rank in range(2)
    ]
    assert text == [
        "0F0:0 0F1:1 0B0:4 0F2:6 0B1:7 0B2:10",
        "1F0:1 1B0:2 1F1:4 1B1:5 1F2:7 1B2:8",
    ]
    assert result.makespan_s == 12


def test_gpipe_with_uneven_stages_is_the_closed_form():
    rng = random.Random(1)
    for _ in range(20):
        stages = [
            StageSeconds(forward_s=rng.uniform(0.5, 1.5), backward_s=rng.uniform(1, 3))
            for _ in range(rng.randint(1, 6))
        ]
        count = rng.randint(1, 12)
        result = run(ScheduleKind.GPIPE, stages, count, pp=len(stages))
        estimate_s = step_time_s(
            ScheduleKind.GPIPE,
            [s.forward_s for s in stages],
            [s.backward_s for s in stages],
            num_ranks=len(stages),
            num_microbatches=count,
        )
        assert result.makespan_s == pytest.approx(estimate_s)


def test_the_steady_period_of_1f1b_is_the_formula():
    rng = random.Random(2)
    for _ in range(10):
        count = rng.randint(2, 8)
        p2p_s = rng.choice([0.0, 0.1, 0.5])
        stages = [
            StageSeconds(forward_s=rng.uniform(0.7, 1.3), backward_s=rng.uniform(1.4, 2.6))
            for _ in range(count)
        ]
        long_s, short_s = (
            run(ScheduleKind.ONE_F_ONE_B, stages, m, pp=count, p2p_s=p2p_s).makespan_s
            for m in (120, 60)
        )
        period_s = steady_period_s(
            [s.forward_s + s.backward_s for s in stages], one_f_one_b_warmup(count), p2p_s=p2p_s
        )
        assert (long_s - short_s) / 60 == pytest.approx(period_s, rel=2e-3)


def test_messages_tax_every_micro_batch_of_1f1b():
    # two stages: the cycle down and up takes 6 + 2 c for two micro-batches, 3 + c each
    assert steady_period_s([3.0, 3.0], (2, 1), p2p_s=0.5) == 3.5
    free, taxed = (
        run(ScheduleKind.ONE_F_ONE_B, [ONE_TWO] * 2, 101, pp=2, p2p_s=c).makespan_s
        for c in (0.0, 0.5)
    )
    # 100 periods and the fill, down and up, each longer
    assert taxed - free == pytest.approx(100 * 0.5 + 2 * 0.5)


def test_micro_batches_in_flight():
    gpipe = run(ScheduleKind.GPIPE, [ONE_TWO] * 3, 5, pp=3)
    assert [gpipe.peak_in_flight(s) for s in range(3)] == [5, 5, 5]
    result = run(ScheduleKind.ONE_F_ONE_B, [ONE_TWO] * 3, 5, pp=3)
    assert [result.peak_in_flight(s) for s in range(3)] == [3, 2, 1]
    steps = result.in_flight(2)
    assert steps[0] == (2.0, 1)
    assert steps[-1][1] == 0


def test_saved_bytes_of_all_stages_of_a_rank_are_alive_together():
    result = run(ScheduleKind.INTERLEAVED, [ONE_TWO] * 4, 4, pp=2)
    sizes = [100, 10, 1, 1000]
    # rank 1 has the stages 1 and 3
    per_stage = [result.peak_in_flight(s) * sizes[s] for s in (1, 3)]
    assert max(per_stage) <= result.peak_saved_bytes(1, sizes) <= sum(per_stage)
    assert run(ScheduleKind.GPIPE, [ONE_TWO], 3, pp=1).peak_saved_bytes(0, [7]) == 21


def test_once_per_step_work_takes_the_compute_lane():
    stage = StageSeconds(
        forward_s=1.0,
        backward_s=2.0,
        once_s={
            ActionKind.PROLOGUE: 0.5,
            ActionKind.UNSHARD: 0.25,
            ActionKind.REDUCE_GRAD: 4.0,
        },
    )
    result = run(ScheduleKind.GPIPE, [stage], 2, pp=1)
    # prologue 0.5, gathering 0.25, two micro-batches of 1 + 2, reduction 4
    assert result.makespan_s == pytest.approx(10.75)
    # from level 2 on gradients are reduced after every backward
    assert run(ScheduleKind.GPIPE, [stage], 2, pp=1, zero_levels=[2]).makespan_s == 14.75


def test_tied_stages_wait_for_each_other():
    stage = StageSeconds(
        forward_s=1.0, backward_s=2.0, once_s={ActionKind.SYNC_TIED: 1.0, ActionKind.FETCH_TIED: 3}
    )
    result = run(ScheduleKind.ONE_F_ONE_B, [stage] * 2, 1, pp=2, tied=[(0, 1)])
    # 3 to fetch, 1 + 1 + 2 + 2 to compute, 1 to return the gradient
    assert result.makespan_s == pytest.approx(10.0)
    ends = [s.end_s for s in result.spans if s.action.kind is ActionKind.SYNC_TIED]
    assert ends == [10.0, 10.0]


def test_sends_do_not_hold_the_sender_and_share_a_lane():
    lists = [
        [Action(0, F, 0), Action(0, ActionKind.SEND_F, 0, 1),
         Action(0, F, 1), Action(0, ActionKind.SEND_F, 1, 1)],
        [Action(1, ActionKind.RECV_F, 0, 0), Action(1, F, 0),
         Action(1, ActionKind.RECV_F, 1, 0), Action(1, F, 1)],
    ]  # fmt: skip
    result = simulate(lists, [ONE_TWO, ONE_TWO], p2p_s={(0, 1): 5.0})
    # F0 0-1, F1 1-2; messages 1-6 and 6-11; then F0 6-7 and F1 11-12
    assert [s.start_s for s in result.compute_spans(0)] == [0, 1]
    assert [(s.start_s, s.end_s) for s in result.spans if s.lane == "send 0>1"] == [(1, 6), (6, 11)]
    assert [s.start_s for s in result.compute_spans(1)] == [6, 11]


def test_simulation_is_deterministic():
    one, two = (run(ScheduleKind.INTERLEAVED, [ONE_TWO] * 8, 8, pp=4) for _ in range(2))
    assert one == two


def test_a_schedule_that_cannot_finish_says_how_far_it_came():
    lists = [
        [Action(0, ActionKind.RECV_B, 0, 1), Action(0, B, 0)],
        [Action(1, F, 0), Action(1, ActionKind.RECV_F, 1, 0), Action(1, F, 1)],
    ]
    message = (
        r"simulate: the schedule can't finish; rank 0 has done 1 of 2 actions and waits at 0B0 for "
        r"1B0 from stage 1 to stage 0; rank 1 has done 2 of 3 actions and waits at 1F1 for 0F1 from"
    )
    with pytest.raises(DeadlockError, match=message):
        simulate(lists, [ONE_TWO, ONE_TWO])


def test_a_stage_without_seconds_is_refused():
    with pytest.raises(ConfigError, match=r"rank 0 has 3F0, but seconds are given for 2 stages"):
        simulate([[Action(3, F, 0)]], [ONE_TWO, ONE_TWO])


def test_an_empty_step_has_no_bubble():
    assert simulate([[], []], []).bubble_fraction == 0.0


@pytest.mark.parametrize(
    ("stages", "warmup", "message"),
    [
        ([1.0], [1, 1], r"1 stages and 2 warm-up depths; give one each"),
        ([1.0, 1.0], [1, 2], r"warm-up depths are \(1, 2\), must be at least 1 and must not incr"),
        ([1.0, 1.0], [1, 0], r"warm-up depths are \(1, 0\)"),
    ],
)
def test_bad_warm_up_depths_are_refused(stages, warmup, message):
    with pytest.raises(ConfigError, match=message):
        steady_period_s(stages, warmup)


def test_stages_must_be_dealt_evenly():
    with pytest.raises(ConfigError, match=r"3 forwards and 3 backwards on 2 pipeline ranks"):
        step_time_s(ScheduleKind.INTERLEAVED, [1.0] * 3, [1.0] * 3, num_ranks=2, num_microbatches=4)
