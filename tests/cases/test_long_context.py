"""One long sequence on several devices: positions are split where heads and samples can't be."""

from __future__ import annotations

import torch
from torch import nn

import autopar
from autopar.plan.types import Plan
from tests.cases.small_models import Block

HEADS, DEVICES, WIDTH = 3, 4, 48  # three heads do not divide over four devices
LENGTH = 1024  # of a sequence that is computed here


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).square().mean()


QUERIES = "S(2) R R -> S(2) S(2)"
"""Attention whose queries are split by position; keys and values are whole."""


def planned(length: int, device: str = "h100-sxm", **degrees: int) -> Plan:
    """A plan for one sequence of so many positions."""
    with torch.device("meta"):
        model, batch = Chain(), {"x": torch.zeros(1, length, WIDTH)}
    return autopar.compile(model, f"{DEVICES}:{device}", inputs=batch, pp=1, **degrees).plan


def attention_splits(plan: Plan) -> list[str]:
    splits = plan.splits.get("tp", {})
    return [text for name, text in splits.items() if name.startswith("attention")]


def test_a_long_sequence_is_spread_over_all_devices():
    plan = planned(32_768)
    assert (plan.mesh.dp, plan.mesh.tp) == (1, DEVICES)
    forward, backward = attention_splits(plan)
    assert forward.startswith(QUERIES)
    assert backward.startswith("S(2) S(2) R R S(2) S(2) -> S(2) P(sum) P(sum)")


def test_three_heads_are_split_over_three_devices_where_that_is_faster():
    plan, spread = planned(16_384), planned(16_384, tp=DEVICES)
    assert (plan.mesh.tp, len(plan.idle_ranks)) == (HEADS, DEVICES - HEADS)
    assert attention_splits(plan)[0].startswith("S(1) S(1) S(1)")
    assert plan.time_s < spread.time_s


def test_a_short_sequence_stays_on_one():
    assert planned(64).mesh.num_ranks == 1  # gathering keys would take longer than it saves


def test_split_positions_give_the_numbers_of_one_device():
    plan = planned(LENGTH, "cpu", tp=DEVICES)  # slow enough that splitting pays
    assert attention_splits(plan)[0].startswith(QUERIES)
    report = autopar.verify(Chain(), plan, {"x": torch.randn(1, LENGTH, WIDTH)})
    assert report.num_tensors > 10
