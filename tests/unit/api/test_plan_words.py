from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import ConfigError, ConstraintError
from autopar.report.text import render_plan
from tests.zoo import build


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu()).square().sum()


def test_a_saved_plan_is_reported_in_the_user_s_names(tmp_path: Path) -> None:
    model, batch = build("llama")
    placements = {"*mlp.gate_proj.weight": "S(0)"}
    model = autopar.compile(model, "4:cpu", batch, tp=2, dp=2, pp=1, placements=placements)
    autopar.save_plan(model.plan, tmp_path / "plan.json")
    text = render_plan(autopar.load_plan(tmp_path / "plan.json"))
    assert "input_ids, labels: dim 0" in text
    assert "model.layers.*.mlp" in text
    assert "over tp" in text


def test_outputs_beside_a_loss_function_are_refused() -> None:
    with pytest.raises(ConfigError, match="returns the loss alone"):
        autopar.compile(Two(), 1, torch.randn(4, 8), loss=lambda o, b: o, outputs=["output"])


def test_more_stages_than_blocks_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConstraintError, match=r"8 stages, but the model can be cut into \d blocks"):
        autopar.compile(Two(), "8:h100-sxm", torch.randn(4, 8), pp=8)


def test_a_boundary_at_the_first_module_is_refused() -> None:
    with pytest.raises(ConstraintError, match="'a' begins the model"):
        autopar.compile(Two(), "2:cpu", torch.randn(4, 8), pp=2, stages=["a"])


def test_an_operator_s_name_may_have_colons() -> None:
    torch.library.define("autopar_words::op", "(Tensor x) -> Tensor")
    autopar.register_op("autopar_words::op", "(a, b) -> (a, b)")
    from autopar.sharding.rules import default_registry

    assert "autopar_words.op.default" in default_registry()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("autopar_close::scale_", r"'autopar_close::scale_'; did you mean 'autopar_close.scale'\?"),
        ("autopar_close.scale.out", r"no operator 'autopar_close.scale.out'; did you mean"),
        ("autopar_nowhere.zzzzqqqq", r"'autopar_nowhere.zzzzqqqq'; Import the library"),
        ("aten.ad.Tensor", r"did you mean 'aten.add.Tensor'"),
    ],
)
def test_a_rule_for_an_operator_that_torch_does_not_know_names_the_closest(name, text) -> None:
    if not hasattr(torch.ops.autopar_close, "scale"):
        torch.library.define("autopar_close::scale", "(Tensor x) -> Tensor")
    with pytest.raises(ConfigError, match=text):
        autopar.register_op(name, "(a, b) -> (a, b)")
    autopar.register_op("autopar_close.scale.default", "(a, b) -> (a, b)")
