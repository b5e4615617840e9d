"""Autocast, the precision in plans and their words, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.cli import main
from autopar.errors import ConfigError, PlanError
from autopar.plan.io import load_plan, plan_from_json, plan_to_json, save_plan
from tests.equivalence.harness import problem_of
from tests.precision_models import Mlp, check_plan, distance, mlp_batch
from tests.zoo import build


# -- autocast ------------------------------------------------------------------------------------
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}, {"pp": 2}], ids=["tp2", "dp2", "pp2"])
def test_plans_under_autocast_equal_one_device(degrees: dict[str, int]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        problem = problem_of(*build("llama", layers=1))
    assert any(n.op == "aten._to_copy.default" for n in problem.graph.nodes)
    check_plan(problem, num_microbatches=2, **degrees)


def test_forward_under_autocast_and_backward_outside_equal_eager() -> None:
    batch = mlp_batch()
    model, twin = Mlp(), Mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = autopar.compile(model, 1, batch)
        losses = [m(**batch)["loss"] for m in (model, twin)]
    for loss in losses:
        loss.backward()
    assert torch.allclose(losses[0].detach(), losses[1].detach(), rtol=1e-3)
    found, wanted = (
        {n: p.grad.double() for n, p in m.named_parameters() if p.grad is not None}
        for m in (model, twin)
    )
    assert distance(found, wanted) < 1e-2
    assert model(**batch)["loss"].dtype == torch.float32, "a call outside runs in float32"


# -- the plan and its words ----------------------------------------------------------------------
def test_the_precision_is_part_of_the_plan_and_is_taken_from_it(tmp_path) -> None:
    batch, path = mlp_batch(), tmp_path / "plan.json"
    model = autopar.compile(Mlp(), 1, batch, precision="bf16")
    save_plan(model.plan, path)
    assert load_plan(path) == model.plan
    again = autopar.compile(Mlp(), 1, batch, plan=path)
    assert again.plan.precision == "bf16"
    with pytest.raises(PlanError, match=re.escape("precision='fp16', and the plan was made for")):
        autopar.compile(Mlp(), 1, batch, plan=path, precision="fp16")
    single = autopar.compile(Mlp(), 1, batch)
    with pytest.raises(PlanError, match="the model's own dtypes"):
        autopar.compile(Mlp(), 1, batch, plan=single.plan, precision="bf16")


def test_a_file_from_before_there_was_a_precision_still_loads() -> None:
    made = autopar.compile(Mlp(), 1, mlp_batch()).plan
    data = json.loads(plan_to_json(made))
    data["version"] = 1
    del data["plan"]["precision"], data["plan"]["precision_words"]
    assert plan_from_json(json.dumps(data), accept_edits=True) == made
    data["version"] = 2
    with pytest.raises(PlanError, match=re.escape("lacks the field plan.precision")):
        plan_from_json(json.dumps(data), accept_edits=True)


def test_the_report_says_which_operators_ran_in_which_precision() -> None:
    model = autopar.compile(Mlp(), 1, mlp_batch(), precision="bf16")
    graph = capture(Mlp(), (), mlp_batch(), precision="bf16").graph
    products = sum(n.op == "aten.mm.default" for n in graph.nodes)
    assert f"{products} x mm" in model.plan.precision_words["bfloat16"]
    assert "1 x native_layer_norm" in model.plan.precision_words["float32"]
    report = model.report()
    assert "Precision bf16" in report
    assert f"{products} x mm" in report
    assert "bf16 with float32 masters" in str(model.plan)


def test_the_command_line_takes_a_precision(tmp_path, capsys) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Flatten(0))\n"
        "    return model, {'input': torch.zeros(4, 8)}\n"
    )
    command = ["plan", f"{script}:build", "--devices", "2:h100-sxm", "--json"]
    assert main([*command, "--precision", "bf16"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "bf16"
    with pytest.raises(SystemExit):
        main([*command, "--precision", "fp8"])
    assert "invalid choice: 'fp8'" in capsys.readouterr().err


def test_verify_checks_a_plan_in_its_precision() -> None:
    report = autopar.verify(Mlp(), "2:cpu", mlp_batch(), dp=2, precision="bf16")
    assert report.plan_error <= report.plan_allowed
    assert 0 < report.eager_error <= report.eager_allowed


def test_planning_alone_takes_a_precision_too() -> None:
    model = autopar.compile(Mlp(), "2x8:h100-sxm", mlp_batch(), dp=8, precision="bf16")
    assert model.plan.precision == "bf16"
    assert next(model.parameters()).dtype == torch.float32


# -- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize("word", ["fp8", "bfloat16", torch.bfloat16, 16, ""])
def test_an_unknown_precision_is_refused_with_the_known_ones(word: object) -> None:
    with pytest.raises(ConfigError, match=re.escape("must be one of 'fp32', 'bf16', 'fp16'")):
        autopar.compile(Mlp(), 1, mlp_batch(), precision=word)


def test_a_model_without_floating_point_parameters_has_no_precision() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.arange(8), requires_grad=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.table[ids].sum()

    with pytest.raises(ConfigError, match="reads no floating-point parameter"):
        autopar.compile(Counter(), 1, {"ids": torch.arange(4)}, precision="bf16")


def test_float64_models_are_refused_with_the_remedy() -> None:
    batch = {name: value.double() for name, value in mlp_batch().items()}
    with pytest.raises(ConfigError, match=re.escape("convert the model by .float()")):
        autopar.compile(Mlp().double(), 1, batch, precision="bf16")


def test_precision_and_autocast_together_are_refused() -> None:
    said = re.escape("precision='bf16' and torch.autocast('cpu', torch.bfloat16)")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match=said):
        autopar.compile(Mlp(), 1, mlp_batch(), precision="bf16")
    model = autopar.compile(Mlp(), 1, mlp_batch(), precision="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match=said):
        model(**mlp_batch())
