"""Autocast, the precision in plans and their words, and what is refused."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.cli import main
from autopar.errors import CaptureError, ConfigError, PlanError
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


class RotatedAttention(torch.nn.Module):
    """Attention whose queries and keys are float32 again where its values are low, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        turn = torch.linspace(0.5, 1.5, 8)
        q, k, v = (f(x).view(4, 6, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q * turn, k * turn, v, attn_mask=bias)
        assert out.dtype == (torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)
        return out.float().square().mean()


def one_loop(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients of a call under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **grads}


@pytest.mark.parametrize("inside", [True, False], ids=["compiled inside", "compiled outside"])
@pytest.mark.parametrize("name", ["llama", "rotated"])
def test_attention_of_two_dtypes_under_autocast_equals_eager(name: str, inside: bool) -> None:
    torch.manual_seed(0)
    if name == "llama":
        model, batch = build("llama", layers=1)
    else:
        model = RotatedAttention()
        batch = {"x": torch.randn(4, 6, 16), "bias": torch.randn(4, 2, 6, 6)}
    wanted = one_loop(copy.deepcopy(model), batch)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        model = autopar.compile(model, 1, batch)
    assert distance(one_loop(model, batch), wanted) < 2e-2


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp": 2}], ids=["tp2", "dp2"])
def test_plans_of_attention_under_autocast_equal_one_device(degrees: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6, 16), "bias": torch.randn(4, 2, 6, 6)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        problem = problem_of(RotatedAttention(), batch)
        graph = capture(RotatedAttention(), (), batch).graph
    (attention,) = (n for n in graph.nodes if n.op == "autopar.attention")
    assert {graph.metas()[name].dtype for name in attention.refs()} == {"bfloat16"}
    check_plan(problem, **degrees)


def test_a_grouped_product_of_two_dtypes_under_autocast_is_refused_as_by_torch() -> None:
    model = torch.nn.Linear(16, 16)
    weight, ends = torch.randn(2, 16, 16), torch.tensor([3, 8], dtype=torch.int32)
    model.forward = lambda x: torch.nn.functional.grouped_mm(
        torch.nn.functional.linear(x, model.weight), weight, offs=ends
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="dtype"):
            model(torch.randn(8, 16))
        with pytest.raises(CaptureError, match="dtype"):
            capture(model, (torch.randn(8, 16),), {})


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
