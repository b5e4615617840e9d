"""Orders of forwards and backwards, and the actions around them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ConfigError
from autopar.plan.actions import ActionKind
from autopar.plan.order_codes import round_sizes
from autopar.plan.schedule import (
    Compute,
    action_lists,
    compute_order,
    forward_order,
    in_flight,
)
from autopar.plan.schedule_check import check_actions
from autopar.plan.schedule_text import unit_spans
from autopar.plan.types import MeshShape, ScheduleKind

GPIPE, ONE_F_ONE_B = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B
INTERLEAVED, FORWARD = ScheduleKind.INTERLEAVED, ScheduleKind.FORWARD
TRAINING = (GPIPE, ONE_F_ONE_B, INTERLEAVED)


def rows(order):
    return [" ".join(map(str, row)) for row in order]


def test_1f1b_golden():
    assert rows(compute_order(ONE_F_ONE_B, 3, 1, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_gpipe_golden():
    assert rows(compute_order(GPIPE, 2, 1, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_gpipe_with_two_stages_per_rank_goes_stage_by_stage():
    assert rows(compute_order(GPIPE, 2, 2, 2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


def test_interleaved_golden():
    # rank 0 warms up (2 - 1) * 2 + 2 * 1 = 4 forwards, rank 1 warms up 2
    assert rows(compute_order(INTERLEAVED, 2, 2, 4)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_one_microbatch_runs_forward_then_backward_everywhere():
    for kind in TRAINING:
        assert rows(compute_order(kind, 2, 1, 1)) == ["0F0 0B0", "1F0 1B0"]


def test_forward_order_has_no_backward():
    assert rows(forward_order(2, 2, 2)) == ["0F0 0F1 2F0 2F1", "1F0 1F1 3F0 3F1"]


def test_rounds_are_never_smaller_than_the_pipeline_unless_alone():
    assert round_sizes(4, 8) == [4, 4]
    assert round_sizes(4, 9) == [5, 4]
    assert round_sizes(4, 7) == [7]
    assert round_sizes(4, 3) == [3]


def test_1f1b_keeps_at_most_the_ranks_behind_alive():
    order = compute_order(ONE_F_ONE_B, 4, 1, 16)
    assert [in_flight(order, stage) for stage in range(4)] == [4, 3, 2, 1]


def test_gpipe_keeps_every_microbatch_alive():
    assert in_flight(compute_order(GPIPE, 4, 1, 16), 3) == 16


def test_few_microbatches_bound_what_is_alive():
    assert in_flight(compute_order(ONE_F_ONE_B, 4, 1, 2), 0) == 2


def test_counts_below_one_are_refused():
    with pytest.raises(ConfigError, match="num_microbatches is 0, the least is 1"):
        compute_order(GPIPE, 2, 1, 0)


def test_1f1b_refuses_several_stages_per_rank_and_names_the_remedy():
    with pytest.raises(ConfigError, match="not 2; use 'interleaved'"):
        compute_order(ONE_F_ONE_B, 2, 2, 4)


def text_lists(order, mesh, **options):
    return [" ".join(map(str, actions)) for actions in action_lists(order, mesh, **options)]


def test_action_lists_golden():
    order = compute_order(ONE_F_ONE_B, 2, 1, 2)
    lists = text_lists(
        order,
        MeshShape(pp=2),
        forward_edges={(0, 1)},
        backward_edges={(1, 0)},
        tied={(0, 1)},
        zero_levels=(0, 2),
    )
    assert lists == [
        "0PROLOGUE 0FETCH_TIED<1 0UNSHARD 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 "
        "0RECV_B1<1 0B1 0RESHARD 0REDUCE_GRAD 0SYNC_TIED<1",
        "1PROLOGUE 1FETCH_TIED<0 1UNSHARD 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1REDUCE_GRAD0 "
        "1RECV_F1<0 1F1 1B1 1SEND_B1>0 1RESHARD 1REDUCE_GRAD1 1SYNC_TIED<0",
    ]


def test_zero_3_unshards_for_each_run_of_computes():
    order = compute_order(GPIPE, 1, 2, 2)
    (text,) = text_lists(order, MeshShape(virtual=2), zero_levels=(3, 3))
    assert text == (
        "0PROLOGUE 1PROLOGUE 0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 1F1 1B0 1REDUCE_GRAD0 1B1 "
        "1RESHARD 1REDUCE_GRAD1 0UNSHARD 0B0 0REDUCE_GRAD0 0B1 0RESHARD 0REDUCE_GRAD1"
    )


def test_values_between_stages_of_one_rank_need_no_message():
    order = compute_order(GPIPE, 1, 2, 1)
    (text,) = text_lists(
        order, MeshShape(virtual=2), forward_edges={(0, 1)}, backward_edges={(1, 0)}
    )
    assert "SEND" not in text
    assert "RECV" not in text


def test_a_skip_edge_is_received_in_the_order_in_which_it_was_sent():
    # Stages 0 and 2 are on rank 0, 1 and 3 on rank 1.  Rank 0 sends to stage 1 and to stage 3
    # after its first forward; the second is needed later, but posted second all the same.
    mesh = MeshShape(pp=2, virtual=2)
    order = compute_order(INTERLEAVED, 2, 2, 2)
    edges = {(0, 1), (1, 2), (2, 3), (0, 3)}
    lists = action_lists(order, mesh, forward_edges=edges)
    sent = [(a.stage, a.peer, a.microbatch) for a in lists[0] if a.kind is ActionKind.SEND_F]
    received = [(a.peer, a.stage, a.microbatch) for a in lists[1] if a.kind is ActionKind.RECV_F]
    assert sent == received
    assert (0, 3, 0) in sent
    check_actions(lists, mesh, forward_edges=edges)


def test_prefetch_posts_a_receive_one_compute_earlier():
    order = compute_order(ONE_F_ONE_B, 2, 1, 2)
    late, early = (
        text_lists(order, MeshShape(pp=2), forward_edges={(0, 1)}, prefetch=n)[1] for n in (0, 1)
    )
    assert "1B0 1RECV_F1<0 1F1" in late
    assert "1RECV_F1<0 1B0 1F1" in early


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ({"forward_edges": {(1, 0)}}, r"forward edge \(1, 0\) points the wrong way"),
        ({"backward_edges": {(0, 1)}}, r"backward edge \(0, 1\) points the wrong way"),
        ({"tied": {(1, 1)}}, r"tied edge \(1, 1\) points the wrong way"),
        ({"forward_edges": {(0, 2)}}, r"\(0, 2\) names a stage that does not exist; there are 2"),
        ({"zero_levels": (1,)}, "1 ZeRO levels for 2 stages"),
    ],
)
def test_bad_edges_are_refused(edges, message):
    with pytest.raises(ConfigError, match=message):
        action_lists(compute_order(GPIPE, 2, 1, 1), MeshShape(pp=2), **edges)


shapes = st.tuples(
    st.sampled_from(TRAINING), st.integers(1, 6), st.integers(1, 3), st.integers(1, 15)
).filter(lambda s: s[0] is not ONE_F_ONE_B or s[2] == 1)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, data=st.data())
def test_any_shape_with_any_skip_edges_runs_to_its_end(shape, data):
    kind, pp, virtual, num_microbatches = shape
    mesh = MeshShape(pp=pp, virtual=virtual)
    last = mesh.num_stages - 1
    pairs = st.tuples(st.integers(0, last), st.integers(0, last)).filter(lambda p: p[0] < p[1])
    skips = data.draw(st.sets(pairs, max_size=6)) if last else set()
    edges = {(s, s + 1) for s in range(last)} | skips
    options = {
        "forward_edges": edges,
        "backward_edges": {(t, s) for s, t in edges},
        "tied": {(0, last)} if last else set(),
    }
    order = compute_order(kind, pp, virtual, num_microbatches)
    lists = action_lists(
        order,
        mesh,
        zero_levels=(data.draw(st.integers(0, 3)),) * mesh.num_stages,
        prefetch=data.draw(st.integers(0, 3)),
        **options,
    )
    assert len(check_actions(lists, mesh, **options)) == sum(map(len, lists))
    unit_spans(order)  # raises if the computes alone can't be ordered
    wanted = {
        Compute(s, kind_, m)
        for s in range(mesh.num_stages)
        for kind_ in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for m in range(num_microbatches)
    }
    assert {c for row in order for c in row} == wanted


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(1, 8), num_microbatches=st.integers(1, 40))
def test_1f1b_takes_the_time_of_the_closed_form(pp, num_microbatches):
    # (m + p - 1) (f + b) with f = 1 and b = 2
    spans = unit_spans(compute_order(ONE_F_ONE_B, pp, 1, num_microbatches))
    assert max(end for _, end in spans.values()) == (num_microbatches + pp - 1) * 3


def test_forwards_alone_keep_nothing_in_flight():
    order = compute_order(FORWARD, 2, 1, 3)
    assert order == forward_order(2, 1, 3)
    assert all(compute.kind is ActionKind.FORWARD for row in order for compute in row)
    assert [in_flight(order, stage) for stage in range(2)] == [1, 1]
