"""Initial values of tensors on the meta device."""

import pytest
import torch

from autopar.errors import ConfigError
from autopar.runtime.materialise import InitialValues, find_tensors, seed_of
from tests.zoo import build, tiny_models


def values(model, *, parameters=True, seed=0, given=None):
    tensors = find_tensors(model, parameters=parameters)
    source = InitialValues(model, tensors, seed=seed, given=given, distributed=False)
    return {name: source.whole(name) for name in tensors}


@pytest.mark.parametrize("name", tiny_models())
def test_every_tensor_of_a_meta_model_is_initialised(name):
    meta, _ = build(name, device="meta")
    real, _ = build(name)
    for parameters in (True, False):
        drawn = values(meta, parameters=parameters)
        wanted = find_tensors(real, parameters=parameters)
        assert list(drawn) == list(wanted)
        for key, value in drawn.items():
            other = wanted[key].tensor
            assert value.shape == other.shape
            assert value.dtype == other.dtype
            assert bool(torch.isfinite(value.double()).all())
            if not parameters:  # frequencies, positions, statistics: computed, not drawn
                assert torch.equal(value, other), key


def test_an_initialiser_of_an_outer_module_has_the_last_word():
    # GPT-2 scales the output projections of its blocks by 1 / sqrt(2 * layers)
    config = {"layers": 8}
    model, _ = build("gpt2", device="meta", **config)
    drawn = values(model)
    outer, inner = (
        drawn["transformer.h.0.mlp.c_proj.weight"],
        drawn["transformer.h.0.mlp.c_fc.weight"],
    )
    assert float(inner.std() / outer.std()) == pytest.approx(4.0, rel=0.1)


def test_values_depend_on_seed_and_name_alone():
    model, _ = build("llama", device="meta")
    first, second, third = values(model), values(model), values(model, seed=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], third[name])
    assert not torch.equal(first[name], first[name.replace("layers.0", "layers.1")])
    assert seed_of(0, "a") != seed_of(0, "b")


def test_drawing_leaves_the_global_generator_and_the_model_alone():
    model, _ = build("llama", device="meta")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    values(model)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.is_meta for p in model.parameters())


def test_a_tensor_that_nobody_initialises_is_named():
    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(4, 2))

    with torch.device("meta"):
        model = torch.nn.Sequential(Positions())
    with pytest.raises(ConfigError, match=r"parameter '0.table' .* Positions writes it; give"):
        values(model)
    given = {"0.table": torch.ones(4, 2)}
    assert torch.equal(values(model, given=given)["0.table"], given["0.table"])
    with pytest.raises(ConfigError, match=r"'0.table' has shape \(2, 2\), the model has \(4, 2\)"):
        values(model, given={"0.table": torch.ones(2, 2)})


def test_tied_tensors_are_one_with_all_names():
    model, _ = build("gpt2")
    found = find_tensors(model, parameters=True)
    assert found["transformer.wte.weight"].names == ("transformer.wte.weight", "lm_head.weight")
    assert "lm_head.weight" not in found
