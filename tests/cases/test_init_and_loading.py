"""Weights that are set, loaded, exported and imported around a compiled model."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

import autopar
from autopar.errors import ConfigError
from tests import zoo
from tests.dist.state_models import batch_of, build


def compiled():
    model, batch = build()
    twin = copy.deepcopy(model)
    return autopar.compile(model, 1, batch), twin


def test_an_assigned_buffer_and_written_parameters_reach_the_programs():
    model, twin = compiled()
    for each in (model, twin):
        torch.manual_seed(3)
        each.scale = torch.tensor([0.25])
        each.first.weight.data.normal_()
        torch.nn.init.uniform_(each.second.weight)
        each.norm.load_state_dict({**each.norm.state_dict(), "weight": torch.full((7,), 2.0)})
    losses = [float(each(**batch_of(0))["loss"].detach()) for each in (model, twin)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert torch.equal(model.full_state_dict()["scale"], torch.tensor([0.25]))


def test_a_buffer_assigned_before_a_load_does_not_come_back_after_it():
    model, twin = compiled()
    model.scale = torch.tensor([9.0])
    model.load_state_dict(twin.state_dict())
    model(**batch_of(0))
    assert torch.equal(model.scale, twin.scale)


def test_replaced_parameters_and_misshapen_buffers_are_refused_by_name():
    model, _ = compiled()
    kept = model.first.weight
    model.first.weight = torch.nn.Parameter(torch.zeros(7, 10))
    with pytest.raises(ConfigError, match=r"parameter 'first.weight' was replaced .* copy into it"):
        model(**batch_of(0))
    with pytest.raises(ConfigError, match="parameter 'first.weight' was replaced"):
        model.full_state_dict()
    model.first.weight = kept
    model.scale = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"shape \(2,\), it was compiled with \(1,\)"):
        model(**batch_of(0))
    model.scale = None
    with pytest.raises(ConfigError, match="buffer 'scale' was removed"):
        model(**batch_of(0))


def test_a_state_dict_with_a_wrong_name_changes_nothing():
    model, twin = compiled()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    wrong = {n: v + 1 for n, v in twin.state_dict().items()} | {"nobody": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"unexpected \['nobody'\]"):
        model.load_state_dict(wrong)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    with pytest.raises(ConfigError, match="storage"):
        model.load_state_dict(twin.state_dict(), assign=True)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_of_a_compiled_model_are_refused_with_the_remedy(copier):
    model, _ = compiled()
    with pytest.raises(ConfigError, match=r"of a compiled Everything: .* build the model again"):
        copier(model)


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_an_exported_directory_opens_in_the_models_own_library(tmp_path, name):
    model, batch = zoo.build(name, vocab=101)
    twin = copy.deepcopy(model)
    model = autopar.compile(model, 1, batch)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    assert all(f.stat().st_size < 80_000 for f in files)
    opened = type(twin).from_pretrained(tmp_path)
    assert opened.state_dict().keys() == twin.state_dict().keys()
    for key, value in opened.state_dict().items():
        assert torch.equal(value, twin.state_dict()[key]), key
    assert opened.config.architectures == [type(twin).__name__]
    model.save_pretrained(tmp_path)  # in one file: the old ones go
    assert [f.name for f in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert torch.equal(
        type(twin).from_pretrained(tmp_path).get_input_embeddings().weight,
        twin.get_input_embeddings().weight,
    )


def test_a_directory_of_the_library_loads_into_compiled_models_on_the_cpu_and_on_meta(tmp_path):
    plain, batch = zoo.build("gpt2", seed=4)
    plain.save_pretrained(tmp_path, max_shard_size="60KB")
    model, _ = zoo.build("gpt2")
    model = autopar.compile(model, 1, batch)
    assert model.load_pretrained(tmp_path).missing_keys == []
    empty, _ = zoo.build("gpt2", device="meta")
    empty = autopar.compile(empty, 1, batch, state_dict=tmp_path)
    for each in (model, empty):
        for key, value in plain.state_dict().items():
            assert torch.equal(each.state_dict()[key], value), key


def test_directories_that_are_torn_or_of_another_model_are_refused(tmp_path):
    model, _ = compiled()
    with pytest.raises(ConfigError, match=r"has no \*.safetensors files"):
        model.load_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "own", max_shard_size=300)
    tensors = load_file(next((tmp_path / "own").glob("*00001-of*")))
    (tmp_path / "alien").mkdir()
    save_file(tensors, tmp_path / "alien" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"load_state_dict: missing \['"):
        model.load_pretrained(tmp_path / "alien")
    name, value = next(iter(tensors.items()))
    save_file({name: torch.cat([value, value])}, tmp_path / "alien" / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name!r} has shape .*, the model has"):
        model.load_pretrained(tmp_path / "alien")
    torn = next((tmp_path / "own").glob("*00002-of*"))
    torn.write_bytes(torn.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="can't be read .* was cut off"):
        model.load_pretrained(tmp_path / "own")
    torn.unlink()
    with pytest.raises(ConfigError, match="can't be read"):
        model.load_pretrained(tmp_path / "own")


def test_an_export_that_breaks_off_leaves_the_old_weights(tmp_path, monkeypatch):
    model, twin = compiled()
    model.save_pretrained(tmp_path, max_shard_size=300)
    model.load_state_dict({n: v + 1 for n, v in twin.state_dict().items()})
    import safetensors.torch

    write, count = safetensors.torch.save_file, iter(range(100))

    def breaks(*args, **kwargs):
        if next(count) == 2:
            raise OSError("no space left")
        write(*args, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", breaks)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path, max_shard_size=300)
    monkeypatch.undo()
    model.load_pretrained(tmp_path)
    assert torch.equal(model.embed.weight, twin.embed.weight)


def test_options_of_the_librarys_own_export_are_refused_or_handed_on(tmp_path):
    model, batch = zoo.build("gpt2")
    model = autopar.compile(model, 1, batch)
    with pytest.raises(ConfigError, match="push_to_hub=True"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    model.save_pretrained(tmp_path, state_dict=model.full_state_dict())
    assert (tmp_path / "model.safetensors").is_file()
