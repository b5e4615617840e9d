"""Our orders against those of torch.distributed.pipelining, where torch has one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autopar.plan.schedule import compute_order
from autopar.plan.types import ScheduleKind
from autopar.plan.zero_bubble import eager_1f1b_order, zero_bubble_h1_order, zero_bubble_v_order

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def needs(owner, *names):
    """Skip where this torch has renamed a private function that is our oracle."""
    for name in names:
        if not hasattr(owner, name):
            pytest.skip(f"this torch has no {name}")


def texts(actions):
    found = [str(a) for a in actions if a is not None]
    return [text for text in found if "REDUCE_GRAD" not in text]


@pytest.mark.parametrize(
    ("pp", "virtual", "num_microbatches"),
    [(2, 2, 4), (4, 2, 8), (2, 3, 6), (4, 3, 6), (4, 2, 3), (3, 2, 5), (1, 2, 3)],
)
def test_interleaved_equals_torch(pp, virtual, num_microbatches):
    needs(schedules.ScheduleInterleaved1F1B, "_calculate_single_rank_operations")
    ours = compute_order(ScheduleKind.INTERLEAVED, pp, virtual, num_microbatches)
    rounds = max(1, num_microbatches // pp)
    theirs = SimpleNamespace(  # what torch's method reads of its schedule; the stages need ranks
        n_local_stages=virtual,
        pp_group_size=pp,
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_microbatches // rounds,
    )
    for rank in range(pp):
        ops = schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations(theirs, rank)
        assert [str(c) for c in ours[rank]] == texts(ops)


@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (2, 2), (4, 8), (4, 2), (3, 7)])
def test_1f1b_equals_torch(pp, num_microbatches):
    # torch's Schedule1F1B prints an order that it does not run (its last rank would begin with
    # micro-batch 1), so its generator is called with what that schedule runs.
    needs(schedules, "_get_1f1b_rank_ops")
    ours = compute_order(ScheduleKind.ONE_F_ONE_B, pp, 1, num_microbatches)
    for rank in range(pp):
        warmup = min(num_microbatches, pp - 1 - rank)

        def own_stage(_step, rank=rank):
            return rank

        ops = schedules._get_1f1b_rank_ops(
            1, pp, warmup, num_microbatches - warmup, warmup, rank, own_stage, own_stage
        )
        assert [str(c) for c in ours[rank]] == texts(ops)


@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 3), (4, 2), (3, 7)])
def test_gpipe_equals_torch(pp, num_microbatches):
    needs(schedules.ScheduleGPipe, "_get_pipeline_order")
    theirs = SimpleNamespace(_num_stages=pp, _n_microbatches=num_microbatches)
    orders = schedules.ScheduleGPipe._get_pipeline_order(theirs)
    ours = compute_order(ScheduleKind.GPIPE, pp, 1, num_microbatches)
    assert [[str(c) for c in row] for row in ours] == [texts(orders[r]) for r in range(pp)]


@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.INTERLEAVED])
def test_torch_finds_uneven_rounds_valid(kind):
    needs(schedules, "_validate_schedule", "_Action")
    order = compute_order(kind, 4, 2, 9)
    table = {
        rank: [schedules._Action.from_str(str(c)) for c in row] for rank, row in enumerate(order)
    }
    assert len(schedules._validate_schedule(table, 4, 8, 9)) == 8


@pytest.mark.parametrize(
    ("pp", "num_microbatches"), [(1, 3), (2, 2), (4, 8), (4, 4), (3, 7), (4, 2)]
)
def test_zero_bubble_h1_equals_torch(pp, num_microbatches):
    needs(schedules.ScheduleInterleavedZeroBubble, "_calculate_single_rank_operations")
    ours = zero_bubble_h1_order(pp, num_microbatches)
    rounds = max(1, num_microbatches // pp)
    theirs = SimpleNamespace(
        n_local_stages=1,
        pp_group_size=pp,
        _n_microbatches=num_microbatches,
        microbatches_per_round=num_microbatches // rounds,
    )
    for rank in range(pp):
        ops = schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations(
            theirs, rank
        )
        assert [str(c) for c in ours[rank]] == texts(ops)


@pytest.mark.parametrize(
    ("pp", "num_microbatches"), [(1, 1), (2, 3), (2, 2), (4, 8), (4, 5), (3, 9)]
)
def test_zero_bubble_v_equals_torch(pp, num_microbatches):
    needs(schedules.ScheduleZBVZeroBubble, "_calculate_single_rank_operations")
    ours = zero_bubble_v_order(pp, num_microbatches)
    theirs = SimpleNamespace(pp_group_size=pp, num_stages=2 * pp, _n_microbatches=num_microbatches)
    for rank in range(pp):
        ops = schedules.ScheduleZBVZeroBubble._calculate_single_rank_operations(theirs, rank)
        assert [str(c) for c in ours[rank]] == texts(ops)


def test_torch_finds_split_backwards_and_deep_warm_ups_valid():
    needs(schedules, "_validate_schedule", "_Action")
    cases = [
        (zero_bubble_h1_order(4, 9), 4),
        (zero_bubble_v_order(4, 9), 8),
        (eager_1f1b_order([7, 5, 3, 1], 9), 4),
    ]
    for order, num_stages in cases:
        table = {
            rank: [schedules._Action.from_str(str(c)) for c in row]
            for rank, row in enumerate(order)
        }
        assert len(schedules._validate_schedule(table, 4, num_stages, 9)) == num_stages
