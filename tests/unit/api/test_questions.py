"""What a compiled module answers about its plan."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.errors import ConfigError, InfeasibleError
from autopar.plan.answers import ParamExplanation, PlanExplanation, WhyNot


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


BATCH = {"x": torch.zeros(8, 16)}


@pytest.fixture(scope="module")
def model() -> Net:
    return autopar.compile(Net(), devices="2:h100-sxm", inputs=BATCH, tp=2)


def test_a_compiled_module_explains_its_plan(model):
    told = model.explain()
    assert isinstance(told, PlanExplanation)
    assert {p.method for p in told.prices} == {"re-solved", "re-simulated"}
    assert told.binding == model.plan.explain().binding
    assert isinstance(model.explain("*.weight"), ParamExplanation)


def test_a_compiled_module_says_why_not(model):
    answer = model.why_not(tp=1)
    assert isinstance(answer, WhyNot)
    assert answer.reasons[0] == "this sets aside the constraint tp=2"
    forced = autopar.compile(Net(), devices="2:h100-sxm", inputs=BATCH, tp=1).plan
    assert answer.after_s == forced.time_s
    assert model.why_not(stages=["down"], tp=1).after_s > 0
    with pytest.raises(ConfigError, match="has no option 'tpp'; did you mean 'tp'"):
        model.why_not(tpp=1)
    with pytest.raises(ConfigError, match="asks for nothing"):
        model.why_not()


def test_there_is_nothing_to_explain_before_there_is_a_plan():
    waiting = autopar.compile(Net(), devices="2:h100-sxm")
    for ask in (waiting.explain, lambda: waiting.why_not(tp=2)):
        with pytest.raises(ConfigError, match="there is no plan yet"):
            ask()


def test_a_lower_precision_is_tried_where_nothing_fits():
    with pytest.raises(InfeasibleError) as caught:
        autopar.compile(
            Net(), devices="1:h100-sxm", inputs=BATCH, memory_limit="1KiB", recompute="none"
        )
    told = str(caught.value)
    assert "compute in precision='bf16' (float32 masters stay)" in told
    assert any(way.what.startswith("give each device") for way in caught.value.relaxations)
