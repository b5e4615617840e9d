"""Evaluation, ``torch.no_grad`` and inference plans: nothing is kept for a backward."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own habit

import autopar
from autopar.api.compiling import plan as make_plan
from autopar.api.verifying import verify
from autopar.capture.reference import whole_parameters
from autopar.cli import main
from autopar.errors import ConfigError, ConstraintError, PlanError
from autopar.ir.graph import InputKind
from autopar.plan.decisions import decisions_of
from autopar.plan.io import load_plan, plan_from_json, plan_to_json, save_plan
from autopar.plan.types import MeshShape, Plan, ScheduleKind
from autopar.report.text import render_plan
from autopar.runtime.simulate import simulate_step
from autopar.runtime.variants import schedule_actions
from autopar.sharding.build import localize
from tests.cases.eager_parity import problem_for, verified
from tests.plans import hand_made_plan
from tests.zoo import build

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Batch norm and dropout, a loss where there is a target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(4, 16), nn.BatchNorm1d(16)
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.drop(torch.relu(self.norm(self.up(x))))
        out = self.down(hidden)
        return {"out": out} if y is None else {"loss": F.mse_loss(out, y), "out": out}


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    seen = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter):
            storage = found.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_training_steps_equals_eager_and_keeps_nothing(context):
    model = Net()
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, {"x": X, "y": Y})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(x=X, y=Y)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    twin.load_state_dict(model.state_dict())
    model.eval(), twin.eval()
    with context():
        model(x=X)  # its program is captured at the first call
        before = live_bytes()
        for x in (X, 2 * X):
            found, wanted = model(x=x)["out"], twin(x=x)["out"]
            torch.testing.assert_close(found, wanted)
            assert not found.requires_grad
            del found, wanted
        assert live_bytes() <= before + X.nbytes  # x itself
    model.train()
    weight = model.up.weight.detach().clone()
    model(x=X, y=Y)["loss"].backward()
    optimizer.step()
    assert not torch.equal(model.up.weight, weight)
    assert int(model.norm.num_batches_tracked) == 2, "evaluation counts no batch"


def test_training_mode_without_gradients_updates_statistics_as_eager_does():
    model = Net()
    model.drop.p = 0.0
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, {"x": X, "y": Y})
    with torch.no_grad():
        found, wanted = model(x=X, y=Y), twin(x=X, y=Y)
    torch.testing.assert_close(found["out"], wanted["out"])
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)


def test_without_gradients_no_backward_runs_and_nothing_is_saved():
    captured, problem = problem_for(*build("gpt2"))
    plan = hand_made_plan(captured, MeshShape(tp=2, pp=2), num_microbatches=2)
    programs = localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)
    steps = {}
    for backward in (True, False):
        steps[backward] = simulate_step(
            programs, plan.mesh,
            schedule_actions(programs, plan, backward=backward, has_loss=True),
            **arguments_of(problem), forward_only=not backward,
        )  # fmt: skip
    kept, whole = steps[False], steps[True]
    assert max(kept.peak_saved_bytes) == 0 < min(whole.peak_saved_bytes)
    assert kept.grads == {}
    assert kept.traffic.messages < whole.traffic.messages
    assert sum(kept.traffic.collectives.values()) < sum(whole.traffic.collectives.values()) / 2
    assert torch.equal(kept.loss, whole.loss)


def arguments_of(problem):
    return {
        "params": whole_parameters(problem.graph, problem.values),
        "inputs": problem.of_kind(InputKind.USER),
        "buffers": problem.of_kind(InputKind.BUFFER),
        "constants": problem.of_kind(InputKind.CONSTANT),
    }


def test_outputs_are_gathered_for_those_who_ask_and_for_nobody_else():
    captured, problem = problem_for(*build("gpt2"))
    plan = hand_made_plan(captured, MeshShape(dp=2))
    asked, unasked = (verified(problem, plan, gather=g) for g in ({"logits"}, ()))
    assert unasked.outputs == {}
    extra = asked.traffic.collectives - unasked.traffic.collectives
    assert extra == {("all_gather", "dp"): 1}
    extra = asked.traffic.collective_bytes - unasked.traffic.collective_bytes
    assert extra == {("all_gather", "dp"): asked.outputs["logits"].nbytes}


def test_named_outputs_come_in_the_model_s_own_class_and_empty_fields_stay_none():
    model, batch = build("gpt2")
    twin = copy.deepcopy(model)
    batch = {**batch, "output_hidden_states": True}
    named = ["logits", "hidden_states.1"]
    model = autopar.compile(model, 1, batch, outputs=named, num_microbatches=2)
    found, wanted = model(**batch), twin(**batch)
    assert type(found).__name__ == type(wanted).__name__
    assert isinstance(found, type(wanted))
    assert found.attentions is None
    torch.testing.assert_close(found.logits, wanted.logits)
    torch.testing.assert_close(found.hidden_states[1], wanted.hidden_states[1])
    with pytest.raises(ConfigError, match=r"pass outputs=\['hidden_states.0'\] to autopar.comp"):
        found.hidden_states[0].sum()


# -- inference plans ------------------------------------------------------------------------------


def inference_plan(devices: object, **options: object) -> tuple[nn.Module, dict, Plan]:
    model, batch = build("gpt2")
    ids = {"input_ids": batch["input_ids"]}
    return model, ids, make_plan(model, devices, ids, mode="inference", **options)


def test_an_inference_plan_has_no_backward_and_no_memory_for_it():
    model, ids, plan = inference_plan(1)
    assert plan.mode == "inference"
    assert plan.schedule is ScheduleKind.FORWARD
    memory, time = plan.stages[0].memory, plan.stages[0].time
    assert (memory.grads_bytes, memory.optimizer_bytes, memory.activations_bytes) == (0, 0, 0)
    assert time.forward_s > 0 == time.backward_s
    logits = 8 * 16 * model.config.vocab_size * 4
    parameters = sum(p.nbytes for p in model.parameters())
    assert plan.peak_bytes >= parameters + logits, "the outputs are whole on every rank"
    training = make_plan(model, 1, ids)
    assert plan.peak_bytes < training.peak_bytes / 2
    assert plan.time_s < training.time_s / 2


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2},
        {"pp": 2, "num_microbatches": 4},
        {"pp": 2, "virtual": 2, "num_microbatches": 2},
        {"dp": 2, "zero": 3, "tp": 2},
    ],
    ids=["tp2", "pp2", "pp2 v2", "dp2 x tp2 ZeRO-3"],
)
def test_an_inference_plan_equals_one_device(degrees):
    sizes = {"dp": 1, "tp": 1, "pp": 1, **degrees}
    count = sizes["dp"] * sizes["tp"] * sizes["pp"]
    model, ids, plan = inference_plan(f"{count}:cpu", **degrees)
    assert plan.mesh.num_ranks == count
    report = verify(model, plan, ids)
    assert report.plan_worst == "output logits"
    assert report.plan_error <= report.plan_allowed
    assert report.eager_worst == "output logits"


def test_an_inference_plan_is_kept_shown_and_verified_as_such(tmp_path, capsys):
    model, ids, plan = inference_plan("2:cpu", pp=2)
    assert plan_from_json(plan_to_json(plan)) == plan
    text = render_plan(plan, width=100)
    assert "forwards only (inference)" in text
    assert "optimizer  adamw" not in text
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    compiled = autopar.compile(model, inputs=ids, plan=str(path))
    assert compiled.plan == plan
    other, _ = build("gpt2")
    with pytest.raises(PlanError, match="mode='train': the plan was made for 'inference'"):
        autopar.compile(other, inputs=ids, plan=str(path), mode="train")


SCRIPT = """
import torch

def build(batch=4):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    return model.eval(), {"input": torch.randn(batch, 8)}
"""


def test_the_command_line_plans_and_verifies_inference(tmp_path, capsys):
    script, out = tmp_path / "served.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    words = ["plan", f"{script}:build", "--devices", "2:cpu", "--mode", "inference"]
    assert main([*words, "--tp", "2", "-o", str(out)]) == 0
    assert "forwards only (inference)" in capsys.readouterr().out
    assert load_plan(out).mode == "inference"
    assert main(["verify", f"{script}:build", str(out)]) == 0
    assert "1 tensors equal one device on 2 simulated ranks" in capsys.readouterr().out


def test_a_plan_file_without_a_word_about_inference_is_one_for_training():
    text = plan_to_json(make_plan(Net(), 1, {"x": X, "y": Y}))
    assert "forward_s" in text
    assert '"forward"' not in text
    assert plan_from_json(text).mode == "train"


def test_a_model_compiled_for_inference_runs_and_refuses_to_be_trained():
    model = Net().eval()
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, {"x": X}, mode="inference")
    found = model(x=X)["out"]
    torch.testing.assert_close(found, twin(x=X)["out"])
    with pytest.raises(ConfigError, match="compiled with mode='inference'; compile it with mode"):
        found.sum().backward()
    with torch.no_grad():
        assert not model(x=X[:4])["out"].requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_inference_returns_the_outputs_that_are_named():
    model, batch = build("gpt2")
    twin = copy.deepcopy(model).eval()
    call = {"input_ids": batch["input_ids"], "output_hidden_states": True}
    model = autopar.compile(model.eval(), 1, call, mode="inference", outputs=["logits"])
    with torch.no_grad():
        found = model(**call)
        torch.testing.assert_close(found.logits, twin(**call).logits)
    with pytest.raises(ConfigError, match=r"no output 'scores'"):
        autopar.compile(build("gpt2")[0], 1, call, mode="inference", outputs=["scores"])


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"mode": "inference", "schedule": "1f1b"}, ConstraintError, "inference has forwards only"),
        ({"schedule": "forward"}, ConstraintError, "compile with mode='inference'"),
        ({"mode": "evaluate"}, ConfigError, "mode='evaluate': must be one of 'train', 'inference'"),
    ],
)
def test_what_inference_can_t_have_is_refused_by_name(options, kind, text):
    with pytest.raises(kind, match=text):
        autopar.compile(Net(), "2:cpu", {"x": X, "y": Y}, **options)


def test_a_model_compiled_under_no_grad_can_be_trained():
    model = Net()
    with torch.no_grad():
        model = autopar.compile(model, 1, {"x": X, "y": Y})
    assert model.plan.mode == "train"
    model(x=X, y=Y)["loss"].backward()
    assert model.up.weight.grad is not None
