"""What a rank computes about its own rows, by hand."""

from __future__ import annotations

import torch

from autopar.runtime.collective_math import resolve
from autopar.runtime.requests import Collective
from passes.local_ops import group_runs, own_exchange, own_runs

# two ranks with two experts each; rank 0 has rows of experts 0, 0, 2, rank 1 of 0, 1, 3, 3
SENT = ([2, 0, 1, 0], [1, 1, 0, 2])
ARRIVE = ([2, 0, 1, 1], [1, 0, 0, 2])  # by sender, then expert of this rank


def test_own_runs_come_first() -> None:
    order = torch.tensor([7, 5, 0, 3, 2, 6])
    counts = torch.tensor([1, 2, 0, 3])
    turned, own, splits = own_runs(order, counts, 2, 2, 6)
    assert turned.tolist() == [3, 2, 6, 7, 5, 0]
    assert own.tolist() == [0, 3]
    assert splits.tolist() == [[0, 0, 0, 3]] * 2
    assert own_runs(order, counts, 2, 2, 4)[0].tolist() == [3, 2, 6, 7]


def test_an_exchange_keeps_the_senders_order_and_counts_what_comes() -> None:
    order, own, splits = own_exchange(
        torch.tensor([1, 0, 2]), torch.tensor(SENT[0]), torch.tensor(ARRIVE[0]), 2, 5
    )
    assert order.tolist() == [1, 0, 2, 0, 0]
    assert own.tolist() == [3, 1]
    assert splits.tolist() == [SENT[0], ARRIVE[0]]


def test_runs_are_grouped_by_expert_and_back() -> None:
    splits = torch.tensor([SENT[0], ARRIVE[0]])
    rows = torch.tensor([[10.0], [11.0], [12.0], [13.0], [99.0]])  # 10, 11 of rank 0, 12 of rank 1
    by_expert = group_runs(rows, splits, 2, by_expert=True)
    assert by_expert.flatten().tolist() == [10.0, 11.0, 12.0, 13.0, 0.0]
    splits = torch.tensor([[0] * 4, [1, 2, 1, 1]])  # sender 0: a, b b; sender 1: c, d
    rows = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 99.0])
    by_expert = group_runs(rows, splits, 2, by_expert=True)
    assert by_expert.tolist() == [1.0, 4.0, 2.0, 3.0, 5.0, 0.0]
    assert group_runs(by_expert, splits, 2, by_expert=False).tolist()[:5] == rows.tolist()[:5]


def test_rows_arrive_in_the_order_of_their_senders_and_go_back() -> None:
    rows = [torch.tensor([[1.0], [2.0], [3.0], [0.0]]), torch.tensor([[4.0], [5.0], [6.0], [7.0]])]
    splits = [torch.tensor([s, a]) for s, a in zip(SENT, ARRIVE, strict=True)]

    def exchanged(tensors: list[torch.Tensor], room: int, *, back: bool) -> list[torch.Tensor]:
        return resolve(
            [
                Collective("all_to_all_rows", t, "tp", out_size=room, splits=s, is_back=back)
                for t, s in zip(tensors, splits, strict=True)
            ]
        )

    arrived = exchanged(rows, 5, back=False)
    assert [a.flatten().tolist() for a in arrived] == [[1, 2, 4, 5, 0], [3, 6, 7, 0, 0]]
    returned = exchanged(arrived, 4, back=True)
    assert [r.flatten().tolist() for r in returned] == [r.flatten().tolist() for r in rows]
