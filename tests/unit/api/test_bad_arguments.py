"""Arguments of another kind are refused before anything is captured, with what to give."""

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.errors import ConfigError, ConstraintError, InputError, PlanError
from autopar.plan.io import plan_from_json, plan_hash, plan_to_json
from autopar.plan.types import MeshShape
from tests.plans import hand_made_plan
from tests.zoo import build


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dp": "2"}, r"dp='2' is a str; give a whole number"),
        ({"tp": 2.0}, r"tp=2.0 is a float; give a whole number"),
        ({"pp": True}, r"pp=True is a bool; give a whole number"),
        ({"zero": "3"}, r"zero='3' is a str"),
        ({"recompute": ["full"]}, r"recompute=\['full'\] is a list; give a word"),
        ({"recompute": True}, r"recompute=True is a bool"),
        ({"placements": "a.weight"}, r"placements='a.weight' is a str; give a dict"),
        ({"placements": {"a.weight": 0}}, r"give a dict"),
        ({"stages": "h.1"}, r"stages='h.1' is a str; give a list of module names"),
        ({"sequence_parallel": 1}, r"sequence_parallel=1 is a int; give True or False"),
        ({"schedule": 1}, r"schedule=1 is a int; give a word"),
        ({"warmup": 3}, r"warmup=3 is a int; give a list of whole numbers"),
        ({"warmup": []}, r"warmup=\[\] is a list; give a list of whole numbers, such as"),
        ({"warmup": [2, 1, 1]}, r"constraint pp=3: needs 3 devices, the cluster has 2; lower it"),
        ({"loss": 3}, r"loss=3 is a int; give a function"),
        ({"plan": 5}, r"plan=5 is a int; give a Plan"),
        ({"outputs": "logits"}, r"outputs='logits' is a str; give a list"),
        ({"seed": "x"}, r"seed='x' is a str"),
        ({"time_limit_s": -1}, r"time_limit_s=-1 is a int; give seconds above 0"),
        ({"state_dict": {"zz": torch.zeros(1)}}, r"1 of 1 names are unknown .* 'zz'"),
        ({"state_dict": {"lm_head.weight": 3}}, r"state_dict: 'lm_head.weight' is a int; give a"),
        ({"state_dict": {}}, r"state_dict: \d+ of \d+ names of GPT2LMHeadModel are missing"),
        ({"optimizer": None}, r"optimizer=None is a NoneType; give the kind .* 'adamw', or 'none'"),
        ({"args": 5}, r"args=5 is a int; give the positional arguments in a list"),
        ({"expert_capacity": 1.5}, r"expert_capacity=1.5: the model has no experts"),
    ],
)
def test_a_value_of_another_kind_is_refused(options, text):
    model, batch = build("gpt2")
    with pytest.raises(ConfigError, match=text):
        autopar.compile(model, 2, batch, **options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_dict_with_missing_names_is_refused_as_in_a_strict_load(device):
    batch = build("gpt2")[1]
    whole = build("gpt2", seed=4)[0].state_dict()
    part = {name: value for name, value in whole.items() if name != "transformer.ln_f.bias"}
    with pytest.raises(ConfigError, match=r"1 of \d+ names .* first is 'transformer.ln_f.bias'"):
        autopar.compile(build("gpt2", device=device)[0], 1, batch, state_dict=part)
    del whole["lm_head.weight"]  # tied: its other name is there
    model = autopar.compile(build("gpt2", device=device)[0], 1, batch, state_dict=whole)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in whole.items())


def test_a_buffer_that_is_not_saved_is_not_missing():
    model = torch.nn.Linear(4, 2)
    model.register_buffer("cache", torch.ones(2), persistent=False)
    given = {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}
    model = autopar.compile(model, 1, torch.zeros(3, 4), state_dict=given)
    assert torch.equal(model.state_dict()["weight"], given["weight"])


@pytest.mark.parametrize("devices", [1, 2])
def test_an_empty_batch_is_refused_by_name(devices):
    batch = {name: value[:0] for name, value in build("gpt2")[1].items()}
    text = r"input 'input_ids' has shape \(0, 16\), which is empty; give one global batch"
    with pytest.raises(InputError, match=text):
        autopar.compile(build("gpt2")[0], devices, batch)
    with pytest.raises(InputError, match=text):
        autopar.verify(build("gpt2")[0], devices, batch)


@pytest.mark.parametrize("lazy", [True, False])
def test_values_that_are_no_tensors_are_not_loaded(lazy):
    model = autopar.compile(torch.nn.Linear(4, 2), 1, None if lazy else torch.zeros(3, 4))
    lists = {name: value.tolist() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="load_state_dict: 'weight' is a list; give a dict of te"):
        model.load_state_dict(lists)


@pytest.mark.parametrize("model", [torch.nn.Linear, torch.relu, None])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(ConfigError, match=r"give an object of torch.nn.Module"):
        autopar.compile(model, 2, torch.randn(4, 4))


@pytest.mark.parametrize(
    "options", [{"placements": {"*c_fc.weight": "S(1)"}}, {"sequence_parallel": True}]
)
def test_a_split_over_one_tensor_rank_is_a_contradiction(options):
    model, batch = build("gpt2")
    with pytest.raises(ConstraintError, match=r"tp=1 and .* a split needs 2 or more"):
        autopar.compile(model, 2, batch, tp=1, **options)


def test_a_negative_dim_is_refused_with_the_dims_there_are():
    model, batch = build("gpt2")
    with pytest.raises(ConstraintError, match=r"S\(-1\).*whose dims are 0 to 1"):
        autopar.compile(model, 2, batch, placements={"*c_fc.weight": "S(-1)"})


def test_an_unknown_output_is_refused_where_only_a_plan_is_made():
    model, batch = build("gpt2")
    with pytest.raises(ConfigError, match=r"no output 'zz'; it has"):
        autopar.compile(model, 2, batch, outputs=["zz"])


def test_a_plan_for_another_number_of_devices_names_both():
    model, batch = build("gpt2")
    plan = hand_made_plan(capture(model, (), batch), MeshShape(dp=2))
    with pytest.raises(PlanError, match=r"for 2 devices .*names 4 "):
        autopar.compile(model, 4, batch, plan=plan)


def test_a_batch_without_values_is_not_verified():
    model, batch = build("gpt2")
    meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    with pytest.raises(InputError, match=r"'input_ids' is on the meta device .*2 of 2 inputs"):
        autopar.verify(model, 2, meta)


def test_an_id_out_of_range_names_the_operator_and_the_line():
    model, batch = build("gpt2", vocab=96)
    batch["input_ids"][0, 0] = 99
    with pytest.raises(InputError, match=r"embedding.*index out of range.*ids and labels in range"):
        autopar.verify(model, 2, batch)


def test_a_plan_of_nothing_to_train_reads_back_with_the_same_hash():
    model, batch = build("vit")
    plan = autopar.compile(model.requires_grad_(False), 2, batch).plan
    assert plan_hash(plan_from_json(plan_to_json(plan))) == plan_hash(plan)


def test_a_result_that_depends_on_no_parameter_is_verified():
    class Detached(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    assert autopar.verify(Detached(4, 4), 2, torch.randn(4, 4)).num_ranks >= 1


def test_a_complex_model_is_verified_in_complex128():
    class Complex(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x):
            return torch.view_as_real(torch.complex(x, x) @ self.weight).pow(2).sum()

    assert autopar.verify(Complex(), 2, torch.randn(4, 4)).plan_error < 1e-12
