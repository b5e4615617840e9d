"""The strict simulation finds what would hang or mix up values."""

from __future__ import annotations

import pytest

from autopar.errors import DeadlockError
from autopar.plan.actions import Action, ActionKind
from autopar.plan.schedule import action_lists, compute_order
from autopar.plan.schedule_check import check_actions
from autopar.plan.types import MeshShape, ScheduleKind

MESH = MeshShape(pp=2)
EDGES = {"forward_edges": {(0, 1)}, "backward_edges": {(1, 0)}}


def good_lists(num_microbatches=2):
    order = compute_order(ScheduleKind.ONE_F_ONE_B, 2, 1, num_microbatches)
    return [list(actions) for actions in action_lists(order, MESH, **EDGES)]


def check(lists, **edges):
    return check_actions(tuple(map(tuple, lists)), MESH, **{**EDGES, **edges})


def index(actions, text):
    return [str(a) for a in actions].index(text)


def test_a_good_list_gives_an_order_in_which_it_happens():
    done = [str(action) for _, action in check(good_lists())]
    assert done.index("0F0") < done.index("1F0") < done.index("1B0") < done.index("0B0")


def test_ranks_that_wait_for_each_other_are_named_with_their_positions():
    lists = good_lists(1)
    lists[0].insert(index(lists[0], "0F0"), lists[0].pop(index(lists[0], "0RECV_B0<1")))
    # rank 0 now wants a second forward value that rank 1 sends only after its backward
    edges = {"forward_edges": {(0, 1)}, "backward_edges": {(1, 0)}}
    lists[1].remove(Action(1, ActionKind.SEND_B, 0, 0))
    with pytest.raises(DeadlockError) as caught:
        check(lists, **edges)
    text = str(caught.value)
    assert "pipeline rank 0: action 5 of 8, 0B0, waits for the message 1B0>0" in text
    assert "pipeline rank 1: has ended" in text


def test_receives_out_of_the_senders_order_are_refused():
    lists = good_lists()
    first, second = (index(lists[1], f"1RECV_F{m}<0") for m in (0, 1))
    moved = lists[1].pop(second)
    lists[1].insert(first, moved)
    with pytest.raises(
        DeadlockError, match="is 0F0>1, but the receive posted for it expects 0F1>1"
    ):
        check(lists)


def test_a_message_that_nobody_receives_is_refused():
    lists = good_lists()
    lists[0].append(Action(0, ActionKind.SEND_F, 1, 1))
    with pytest.raises(DeadlockError, match=r"0F1>1 is sent but never received \(3 sends, 2 rec"):
        check(lists)


def test_a_compute_without_its_receive_is_refused():
    lists = good_lists()
    del lists[1][index(lists[1], "1RECV_F0<0")]
    with pytest.raises(DeadlockError, match="runs 1F0 but posted no receive of 0F0>1 before"):
        check(lists)


def test_a_backward_before_its_forward_is_refused():
    lists = good_lists()
    lists[0].insert(index(lists[0], "0F0"), Action(0, ActionKind.BACKWARD, 0))
    with pytest.raises(DeadlockError, match="runs 0B0 before its forward"):
        check(lists)


def test_a_compute_on_parameters_that_were_freed_is_refused():
    lists = good_lists()
    lists[0].insert(index(lists[0], "0F1"), Action(0, ActionKind.RESHARD))
    with pytest.raises(DeadlockError, match="runs 0F1 while it is not unsharded"):
        check(lists)


def test_a_send_before_its_compute_is_refused():
    lists = good_lists()
    lists[0].insert(index(lists[0], "0F0"), lists[0].pop(index(lists[0], "0SEND_F0>1")))
    with pytest.raises(DeadlockError, match="runs 0SEND_F0>1 before it is computed"):
        check(lists)


def test_a_value_of_the_same_rank_must_be_computed_before():
    mesh = MeshShape(virtual=2)
    actions = [Action(s, ActionKind.UNSHARD) for s in (0, 1)]
    actions += [Action(s, ActionKind.FORWARD, 0) for s in (1, 0)]
    with pytest.raises(DeadlockError, match="runs 1F0 before 0F0>1, which is its own"):
        check_actions((tuple(actions),), mesh, forward_edges={(0, 1)})


def test_a_tied_weight_that_the_owner_never_gives_is_a_deadlock():
    order = compute_order(ScheduleKind.GPIPE, 2, 1, 1)
    lists = [list(a) for a in action_lists(order, MESH, tied={(0, 1)}, **EDGES)]
    lists[0] = [a for a in lists[0] if a.kind is not ActionKind.FETCH_TIED]
    with pytest.raises(DeadlockError, match="1FETCH_TIED<0, waits for the tied weight 0FETCH_TIED"):
        check(lists, tied={(0, 1)})
