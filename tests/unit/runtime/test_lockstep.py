"""The lockstep simulator is as strict as NCCL, and says where every rank stands."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import DeadlockError
from autopar.plan.types import MeshShape
from autopar.runtime.lockstep import group_of, run_lockstep
from autopar.runtime.messages import receive
from autopar.runtime.requests import Collective, PostRecv, Send, WaitRecv, WaitSends

TP2 = MeshShape(tp=2)
PP2 = MeshShape(pp=2)
F32 = torch.float32


def all_reduce(rank: int, axis: str = "tp", *, shape=(2,), op="sum", node="ar", dtype=F32):
    value = torch.full(shape, float(rank + 1), dtype=dtype)
    return Collective("all_reduce", value, axis, op=op, node=node)


def one(request, into=None):
    answer = yield request
    if into is not None:
        into.append(answer.wait())


def test_groups_of_a_mesh_by_hand():
    mesh = MeshShape(pp=2, dp=2, tp=2)  # rank = (pp * 2 + dp) * 2 + tp
    assert group_of(mesh, 5, "tp") == (4, 5)
    assert group_of(mesh, 5, "dp") == (5, 7)
    assert group_of(mesh, 5, "pp") == (1, 5)
    with pytest.raises(DeadlockError, match="axis 'mb' has no ranks to talk to"):
        group_of(mesh, 0, "mb")


def test_a_collective_is_answered_on_all_ranks_and_counted():
    answers: list[torch.Tensor] = []
    traffic = run_lockstep([one(all_reduce(0), answers), one(all_reduce(1), answers)], TP2)
    assert [a.tolist() for a in answers] == [[3.0, 3.0], [3.0, 3.0]]
    assert traffic.collectives == {("all_reduce", "tp"): 1}
    assert traffic.collective_bytes == {("all_reduce", "tp"): 8}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (all_reduce(1, op="max"), r"rank 1: all_reduce\(max\) of float32\[2\] over tp at ar"),
        (all_reduce(1, shape=(3,)), r"rank 1: all_reduce\(sum\) of float32\[3\]"),
        (all_reduce(1, dtype=torch.float64), r"rank 1: all_reduce\(sum\) of float64\[2\]"),
        (all_reduce(1, node="other"), r"over tp at other"),
        (
            Collective("all_gather", torch.ones(2), "tp", out_size=4, node="ar"),
            "rank 1: all_gather of",
        ),
    ],
)
def test_collectives_that_differ_are_an_error_with_both_sides(other, text):
    with pytest.raises(DeadlockError, match=text) as caught:
        run_lockstep([one(all_reduce(0)), one(other)], TP2, lambda rank: f"0F{rank}")
    assert "the collectives of ranks [0, 1] over 'tp' differ" in str(caught.value)
    assert "rank 0 at 0F0: waits in all_reduce(sum)" in str(caught.value)


def test_a_rank_that_skips_a_collective_is_a_deadlock():
    def nothing():
        yield WaitSends()

    with pytest.raises(DeadlockError) as caught:
        run_lockstep([one(all_reduce(0)), nothing()], TP2, lambda rank: f"action {rank}")
    assert str(caught.value) == (
        "the ranks wait for each other\n"
        "  - rank 0 at action 0: waits in all_reduce(sum) of float32[2] over tp at ar\n"
        "  - rank 1 at action 1: waits for nothing"
    )


def test_two_groups_in_opposite_orders_deadlock():
    # tp groups (0, 1), (2, 3); dp groups (0, 2), (1, 3): rank 0 starts with tp, its partner with dp
    mesh = MeshShape(dp=2, tp=2)

    def both(rank, first, second):
        yield all_reduce(rank, first)
        yield all_reduce(rank, second)

    order = [("tp", "dp"), ("dp", "tp"), ("dp", "tp"), ("tp", "dp")]
    with pytest.raises(DeadlockError, match="the ranks wait for each other"):
        run_lockstep([both(r, *axes) for r, axes in enumerate(order)], mesh)


def sender(*labels, shapes=None):
    for i, label in enumerate(labels):
        shape = shapes[i] if shapes else (2,)
        yield Send(torch.full(shape, float(i)), 1, label)
    yield WaitSends()


def receiver(*labels, into=None):
    tickets = {}
    for label in labels:
        tickets[label] = yield PostRecv((2,), F32, 0, label)
    for label, ticket in tickets.items():
        value = yield WaitRecv(ticket, 0, label)
        if into is not None:
            into.append(float(value[0]))


def test_messages_arrive_in_order():
    got: list[float] = []
    traffic = run_lockstep([sender("a", "b"), receiver("a", "b", into=got)], PP2)
    assert got == [0.0, 1.0]
    assert (traffic.messages, traffic.message_bytes) == (2, 16)


def test_receives_in_another_order_are_an_error_although_the_shapes_agree():
    with pytest.raises(DeadlockError) as caught:
        run_lockstep([sender("a", "b"), receiver("b", "a")], PP2)
    assert (
        "message 0 from rank 0 to rank 1 differs at its ends: sent is 'a' float32[2], the receive "
        "posted is for 'b' float32[2]"
    ) in str(caught.value)


def test_a_message_of_another_shape_is_an_error():
    with pytest.raises(DeadlockError, match=r"sent is 'a' float32\[3\], .* 'a' float32\[2\]"):
        run_lockstep([sender("a", shapes=[(3,)]), receiver("a")], PP2)


def test_a_missing_send_is_a_deadlock_that_names_the_value():
    with pytest.raises(DeadlockError, match=r"rank 1 at \?: waits for 'b' from rank 0"):
        run_lockstep([sender("a"), receiver("a", "b")], PP2)


def test_a_send_is_complete_only_when_its_receive_is_posted():
    with pytest.raises(DeadlockError, match="waits until its sends arrive: 'b' to rank 1"):
        run_lockstep([sender("a", "b"), receiver("a")], PP2)


def test_a_message_that_nobody_waits_for_is_found_at_the_end():
    def careless():
        yield Send(torch.ones(2), 1, "a")

    with pytest.raises(DeadlockError, match=r"from rank 0 to rank 1 left over: \['a'\]"):
        run_lockstep([careless(), one(WaitSends())], PP2)


def test_crossing_messages_do_not_block_each_other():
    def cross(rank):
        yield Send(torch.full((2,), float(rank)), 1 - rank, f"from {rank}")
        value = yield from receive((2,), F32, 1 - rank, f"from {1 - rank}")
        assert float(value[0]) == 1 - rank
        yield WaitSends()

    assert run_lockstep([cross(0), cross(1)], PP2).messages == 2


def test_a_received_tensor_is_a_copy():
    sent = torch.ones(2)

    def first():
        yield Send(sent, 1, "a")
        yield WaitSends()

    def second():
        value = yield from receive((2,), F32, 0, "a")
        value.zero_()

    run_lockstep([first(), second()], PP2)
    assert sent.tolist() == [1.0, 1.0]


def test_sums_are_in_rank_order_so_that_two_runs_give_the_same_bits():
    values = [1e16, 1.0, -1e16, 1.0]
    answers: list[torch.Tensor] = []
    ranks = [
        one(Collective("all_reduce", torch.tensor(v, dtype=torch.float64), "tp", op="sum"), answers)
        for v in values
    ]
    run_lockstep(ranks, MeshShape(tp=4))
    assert [float(a) for a in answers] == [1.0] * 4  # ((1e16 + 1) - 1e16) + 1: the first 1 is lost
