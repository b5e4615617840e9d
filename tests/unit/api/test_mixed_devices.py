"""``compile`` for devices of several kinds: planned, saved, shown, planned again, not run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar
from autopar import api
from autopar.api.asking import questions_of
from autopar.errors import ConfigError, PlanError

DEVICES = "2x2:h100-sxm + 2:a100-80gb"


class Wide(nn.Module):
    """Layers that are worth splitting over a batch."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, y)


def build(layers: int, rows: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return Wide(layers), {"x": torch.empty(rows, 2048), "y": torch.empty(rows, 2048)}


def test_a_model_is_planned_for_two_kinds_and_again_without_a_machine(tmp_path):
    model, batch = build(layers=4, rows=1024)
    prices = {"h100-sxm": 3.0, "a100-80gb": 1.5}
    model = autopar.compile(model, devices=DEVICES, inputs=batch, cost_per_hour=prices)
    plan = model.plan
    assert plan.pipelines
    assert plan.cost_per_step == pytest.approx(
        plan.time_s / 3600 * sum(
            len(s.devices) * prices[s.device] for p in plan.pipelines for s in p.stages
        )
    )  # fmt: skip
    autopar.save_plan(plan, tmp_path / "plan.json")
    assert autopar.load_plan(tmp_path / "plan.json") == plan
    assert "Pipelines" in model.report()
    answer = model.replan(lost=[1])
    assert answer.plan.num_devices == 4
    assert answer.plan.time_s > plan.time_s
    assert answer.migration.kept_bytes > 0
    assert math.isinf(answer.saved_s) or answer.saved_s >= 0
    told = {price.what: price for price in model.explain().prices}
    link = told["10 % more bandwidth of the links between machines"]
    assert 0 < link.after_s <= link.before_s
    assert link.before_s == pytest.approx(plan.time_s, rel=0.05)
    slower = model.replan(slower={1: 0.5})
    assert slower.stay.time_s >= plan.time_s  # slower.stay: the same pipelines, one of them slow
    assert slower.stay_migration.moved_bytes == 0
    other = model.replan("4:h100-sxm")  # what the user said of the old cluster holds for the new
    assert other.plan.cost_per_step == pytest.approx(
        other.plan.time_s / 3600 * other.plan.num_ranks * prices["h100-sxm"]
    )
    with pytest.raises(PlanError, match=r"not run: .* \(devices='\d:"):
        model(**batch)


def test_a_memory_limit_holds_where_a_saved_plan_is_planned_again():
    model, batch = build(layers=4, rows=1024)
    free = api.plan(model, DEVICES, batch)
    limit = int(0.9 * free.peak_bytes)
    plan = api.plan(model, DEVICES, batch, memory_limit=limit)
    assert plan.pipelines
    assert plan.peak_bytes <= limit < free.peak_bytes
    asked = questions_of(model, batch, plan)
    assert asked.limit_bytes == limit
    answer = asked.replan(None, (), {0: 0.9}, thorough=False)
    assert answer.plan.peak_bytes <= limit
    assert "to run: not yet" in str(answer)
    assert questions_of(model, batch, free).limit_bytes is None


def test_the_cheapest_plan_may_leave_a_kind_idle():
    model, batch = build(layers=2, rows=1024)
    plan = api.plan(
        model, DEVICES, batch, objective="cost", cost_per_hour={"h100-sxm": 50.0, "a100-80gb": 1.0}
    )
    assert {s.device for p in plan.pipelines for s in p.stages} == {"a100-80gb"}
    with pytest.raises(ConfigError, match="needs prices"):
        api.plan(model, DEVICES, batch, objective="cost")
