"""A batch that can't be right is named before anything is computed from it."""

from __future__ import annotations

import math
import re

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.errors import ConfigError, InputError
from autopar.runtime.index_checks import index_checks
from autopar.runtime.shares import LocalShare, ShareOrigin
from tests.zoo import build

ORIGIN = ShareOrigin(plan="p", rank=0, batch="b")


@pytest.fixture(scope="module")
def compiled():
    model, batch = build("gpt2")
    return autopar.compile(model, devices=1, inputs=batch)


def changed(name, value, at=(2, 5)):
    batch = {key: tensor.clone() for key, tensor in build("gpt2")[1].items()}
    batch[name][at] = value
    return batch


@pytest.mark.parametrize("value", [96, -1, 10**9])
def test_a_token_id_out_of_range_names_input_table_and_bound(compiled, value):
    text = f"input 'input_ids' holds {value}: 'transformer.wte.weight' takes 0 to 95"
    with pytest.raises(InputError, match=re.escape(text)):
        compiled(**changed("input_ids", value))


@pytest.mark.parametrize("value", [96, -7])
def test_a_label_out_of_range_names_the_loss_and_the_ignored_label(compiled, value):
    text = rf"input 'labels' holds {value}: the loss at loss_utils.py:\d+ in .* takes 0 to 95, or"
    with pytest.raises(InputError, match=text):
        compiled(**changed("labels", value))


def test_a_label_that_the_model_drops_may_be_anything(compiled):
    """A causal model never predicts the first token."""
    batch = changed("labels", 5000, at=(2, 0))
    assert torch.allclose(compiled(**batch).loss, build("gpt2")[0](**batch).loss, rtol=1e-6)


def test_ignored_labels_are_in_range(compiled):
    batch = changed("labels", -100)
    assert torch.allclose(compiled(**batch).loss, build("gpt2")[0](**batch).loss, rtol=1e-6)


def test_a_nan_in_the_batch_gives_a_nan_as_on_one_device():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(6, 4)
    x[1, 1] = math.nan
    compiled = autopar.compile(model, devices=1, inputs=x, loss=lambda out, x: (out**2).mean())
    loss = compiled(x)
    assert loss.isnan()
    loss.backward()
    with pytest.raises(RuntimeError, match="of the gradients is nan; skip this step"):
        compiled.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: {**b, "labels": b["labels"].int()}, "cast it to torch.int64"),
        (
            lambda b: {**b, "labels": b["labels"].float()},
            "'labels' is float32[8, 16], the plan was",
        ),
        (lambda b: {**b, "labels": b["labels"].to("meta")}, "'labels' is on meta, this rank compu"),
        (lambda b: {**b, "labels": b["labels"].flatten()}, "with 1 dims, the plan was made for"),
        (lambda b: {k: v[:0] for k, v in b.items()}, "is int64[0, 16], which is empty"),
        (lambda b: {"input_ids": b["input_ids"]}, "the batch has no 'labels'"),
        (lambda b: {**b, "token_type_ids": b["labels"]}, "has an unknown 'token_type_ids'"),
        (lambda b: {**b, "input_ids": b["input_ids"].tolist()}, "the batch has no 'input_ids'"),
    ],
)
def test_a_batch_of_another_kind_says_what_the_plan_was_made_for(compiled, change, text):
    with pytest.raises(InputError, match=re.escape(text)):
        compiled(**change(build("gpt2")[1]))


def test_an_argument_that_forward_has_not_is_refused():
    model = autopar.compile(torch.nn.Linear(4, 2), devices=1, inputs=torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="an unexpected keyword argument 'mask'"):
        model(torch.zeros(3, 4), mask=None)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda out, x: out, "loss= must return a scalar tensor, got shape (3, 2); reduce it"),
        (lambda out, x: 0.0, "loss= must return a scalar tensor, got <class 'float'>"),
        (lambda out, x: x.sum(), "depends on no trainable parameter"),
    ],
)
def test_a_loss_that_is_no_scalar_of_the_parameters_is_refused(loss, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        autopar.compile(torch.nn.Linear(4, 2), devices=1, inputs=torch.zeros(3, 4), loss=loss)


def test_a_loss_may_be_scaled_in_place(compiled):
    twin, batch = build("gpt2")
    losses = [compiled(**batch).loss, twin(**batch).loss]
    compiled.zero_grad()
    for loss in losses:
        loss *= 0.25
        loss.backward()
    wanted = dict(twin.named_parameters())
    for name, parameter in compiled.named_parameters():
        assert torch.allclose(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6), name


# ------------------------------------------------------------ where ids are looked for
def checks_of(model, batch):
    return index_checks(capture(model, (), batch).graph)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_ids_and_labels_of_known_models_are_found(name):
    model, batch = build(name)
    found = checks_of(model, batch)
    paths = {path for check in found for path in check.paths.values()}
    assert paths == {key for key in batch if key != "pixel_values"}
    assert not any(check.problem(batch) for check in found)


def test_of_shares_ids_are_checked_and_what_is_moved_about_is_not():
    model, batch = build("gpt2")
    bad = {key: torch.full_like(tensor, 500) for key, tensor in batch.items()}
    shares = {k: LocalShare(t[2:4], (2, 3), 0, 8, ORIGIN) for k, t in bad.items()}
    ids, labels = checks_of(model, batch)
    assert "'input_ids' holds 500" in ids.problem(shares)
    assert labels.problem(shares) == ""
    none = {k: LocalShare(t[:0], (), 0, 8, ORIGIN) for k, t in bad.items()}
    assert ids.problem(none) == ""


class Bags(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Embedding(10, 4)
        self.second = torch.nn.Embedding(20, 4)

    def forward(self, ids):
        hashed = (ids[:, 1] * 7) % 20
        return (self.first(ids[:, 0]) + self.second(hashed)).sum()


def test_each_table_is_checked_with_its_own_bound_and_computed_ids_are_left_alone():
    ids = torch.zeros(4, 2, dtype=torch.int64)
    (check,) = checks_of(Bags(), {"ids": ids})
    assert check.size == 10
    assert check.problem({"ids": torch.full_like(ids, 10)}).startswith("input 'ids' holds 10: ")
    good = ids.clone()
    good[:, 1] = 10**6
    assert check.problem({"ids": good}) == ""
