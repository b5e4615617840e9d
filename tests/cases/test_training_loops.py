"""Settings of other libraries' loops that can't work with a compiled model are refused by name."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

import autopar
from autopar.errors import ConfigError


class Trainer(autopar.TrainerMixin, transformers.Trainer):
    pass


@pytest.fixture(autouse=True)
def _forget_accelerate():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def model():
    net = torch.nn.Linear(4, 2)
    return autopar.compile(net, devices=1, inputs=torch.zeros(2, 4))


def arguments(folder, **options):
    options = {"save_strategy": "no", "report_to": [], "use_cpu": True, **options}
    return transformers.TrainingArguments(output_dir=str(folder), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bf16": True}, "(bf16=True) can't work with a compiled model: accelerate's wrapper"),
        ({"activation_checkpointing": True}, "pass recompute= to autopar.compile()"),
        ({"auto_find_batch_size": True}, "one rank alone would change the batch; pass memory_limi"),
        ({"neftune_noise_alpha": 5.0}, "its hook is not part of the captured program"),
        ({"save_strategy": "epoch"}, "save_only_model=True or save_strategy='no'"),
    ],
)
def test_a_setting_of_the_trainer_that_cannot_work_is_refused(model, tmp_path, options, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        Trainer(model, arguments(tmp_path, **options))


@pytest.mark.parametrize("name", ["fsdp", "deepspeed", "parallelism_config", "torch_compile"])
def test_another_librarys_parallelism_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}='x'. can't work with a compiled model"):
        autopar.as_one_worker(SimpleNamespace(**{name: "x"}))


@pytest.mark.parametrize("name", ["fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"])
def test_a_plugin_of_accelerate_that_shards_is_refused(name):
    with pytest.raises(ConfigError, match=f"has a {name}, which would shard the compiled model"):
        autopar.as_one_worker(SimpleNamespace(state=SimpleNamespace(**{name: object()})))


def test_mixed_precision_of_accelerate_is_refused():
    with pytest.raises(ConfigError, match="mixed_precision='bf16'"):
        autopar.as_one_worker(Accelerator(cpu=True, mixed_precision="bf16"))


def test_a_trainer_of_a_model_that_is_not_compiled_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the Trainer's model is a Linear that is not compiled"):
        Trainer(torch.nn.Linear(4, 2), arguments(tmp_path))


def test_resuming_by_the_trainer_is_refused(model, tmp_path):
    trainer = Trainer(model, arguments(tmp_path))
    with pytest.raises(ConfigError, match="checkpoints lack the optimizer's shards"):
        trainer.train(resume_from_checkpoint="checkpoint-1")


def test_all_ranks_are_one_worker_whose_main_process_is_rank_0():
    accelerator = Accelerator(cpu=True)
    state = PartialState()
    state.num_processes, state.process_index = 4, 3  # as the last of four ranks would have it
    accelerator.state.num_processes = 4
    assert autopar.as_one_worker(accelerator) is accelerator
    assert accelerator.num_processes == 1
    assert not state.is_main_process
    assert torch.equal(accelerator.gather(torch.ones(3)), torch.ones(3))
    loader = torch.utils.data.DataLoader(range(8), batch_size=4)
    assert [b.tolist() for b in accelerator.prepare(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
