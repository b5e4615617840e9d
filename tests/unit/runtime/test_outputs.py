"""Results in the model's own classes, with fields that were not gathered."""

import copy

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from autopar.capture.structure import flatten
from autopar.errors import ConfigError
from autopar.runtime.outputs import NotGathered, build_result


def test_a_missing_field_raises_on_access_with_the_remedy():
    spec, tensors = flatten(CausalLMOutput(loss=torch.tensor(1.0), logits=torch.ones(2)))
    out = build_result(spec, {"loss": tensors["loss"]})
    assert isinstance(out, CausalLMOutput)
    assert type(out).__name__ == "CausalLMOutput"
    assert out.loss == 1.0
    assert out["loss"] == 1.0
    assert out[0] == 1.0
    for access in (lambda: out.logits, lambda: out["logits"], lambda: out[1]):
        with pytest.raises(ConfigError, match=r"'logits' is not gathered .* outputs=\['logits'\]"):
            access()
    assert not hasattr(out, "logits")
    assert list(out) == ["loss", "logits"]


def test_a_complete_result_has_the_class_itself():
    given = CausalLMOutput(loss=torch.tensor(1.0), logits=torch.ones(2))
    spec, tensors = flatten(given)
    assert type(build_result(spec, tensors)) is CausalLMOutput


def test_a_missing_entry_of_a_tuple_raises_when_used():
    spec, tensors = flatten((torch.tensor(1.0), torch.ones(2)), root="output")
    first = next(iter(tensors))
    loss, other = build_result(spec, {first: tensors[first]})
    assert loss == 1.0
    for use in (lambda: other + 1, lambda: torch.sum(other), lambda: other.shape, lambda: other[0]):
        with pytest.raises(ConfigError, match="not gathered in training"):
            use()
    assert "not gathered" in repr(other)


def test_the_stand_in_does_not_survive_unnoticed():
    with pytest.raises(ConfigError):
        bool(NotGathered("logits"))
    with pytest.raises(ConfigError):
        copy.copy(NotGathered("logits")).shape  # noqa: B018
