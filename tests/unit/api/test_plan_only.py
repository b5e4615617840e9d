"""Compiling in a plain process for several devices: plans and stops."""

import pytest
import torch

import autopar
from autopar import api
from autopar.capture.tracing import capture
from autopar.errors import ConfigError, PlanError
from autopar.plan.types import MeshShape
from tests.plans import hand_made_plan
from tests.zoo import build


def test_calling_says_how_to_launch():
    model, batch = build("gpt2")
    plan = hand_made_plan(capture(model, (), batch), MeshShape(pp=2, dp=2))
    model = autopar.compile(model, "4:cpu", batch, plan=plan)
    assert model.plan == plan
    assert "GPT" not in model.report()[:3]
    with pytest.raises(
        ConfigError, match=r"(?s)planned for 4 devices.*torchrun --nproc-per-node 4 "
    ):
        model(**batch)


def test_several_machines_get_the_whole_command():
    model, batch = build("gpt2")
    plan = hand_made_plan(capture(model, (), batch), MeshShape(dp=2), num_devices=16)
    model = autopar.compile(model, "2x8:h100-sxm", batch, plan=plan)
    with pytest.raises(ConfigError, match=r"--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d"):
        model(**batch)


def test_without_inputs_the_first_call_plans():
    model, batch = build("gpt2")
    plan = hand_made_plan(capture(model, (), batch), MeshShape(dp=2))
    model = autopar.compile(model, 2, plan=plan)
    assert model.plan is None
    with pytest.raises(ConfigError, match="there is no plan yet"):
        model.report()
    with pytest.raises(ConfigError, match="torchrun"):
        model(**batch)
    assert model.plan == plan


def test_a_plan_of_another_model_is_refused():
    model, batch = build("gpt2")
    plan = hand_made_plan(capture(model, (), batch), MeshShape(dp=2))
    llama, ids = build("llama")
    with pytest.raises(PlanError, match="made for a model with hash"):
        autopar.compile(llama, 2, ids, plan=plan)
    assert type(llama).__mro__[1].__name__ == "LlamaPreTrainedModel", "left as it was"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"schedule": "zigzag"},
            r"schedule='zigzag': must be one of 'gpipe', '1f1b', 'interleaved'",
        ),
        ({"zero": 4}, "zero=4"),
        ({"on_unknown": "maybe"}, "on_unknown='maybe'"),
        ({"args": (1,)}, "args= goes with keyword arguments"),
        ({"memory_limit": "lots"}, "memory_limit"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_captured(options, text):
    model, batch = build("gpt2")
    inputs = (batch["input_ids"],) if "args" in options else batch
    with pytest.raises(ConfigError, match=text):
        autopar.compile(model, 2, inputs, **options)


def test_outputs_that_are_gathered_count_before_a_model_is_split():
    with torch.device("meta"):
        model, batch = torch.nn.Linear(512, 512), (torch.empty(8, 512),)
    free = api.plan(model, "4:l4", batch, mode="inference")
    alone = api.plan(model, "4:l4", batch, mode="inference", dp=1, tp=1, pp=1)
    assert free.time_s <= alone.time_s * (1 + 1e-9)
