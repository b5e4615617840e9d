"""``devices=1`` in a plain process: the same machinery on one device."""

import copy
import inspect

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.errors import ConfigError, InputError
from autopar.plan.types import MeshShape
from tests.plans import hand_made_plan
from tests.zoo import build


def compiled(name="gpt2", *, microbatches=2, dropout=0.0, **options):
    model, batch = build(name, dropout=dropout)
    twin = copy.deepcopy(model)
    plan = hand_made_plan(capture(model, (), batch), MeshShape(), num_microbatches=microbatches)
    return autopar.compile(model, 1, batch, plan=plan, **options), twin, batch


def test_the_same_object_comes_back_and_stays_what_it_was():
    model, batch = build("gpt2")
    parameters = list(model.parameters())
    plan = hand_made_plan(capture(model, (), batch), MeshShape())
    result = autopar.compile(model, 1, batch, plan=plan)
    assert result is model
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.config.n_layer == 2
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert "input_ids" in inspect.signature(model.forward).parameters
    assert model.plan is plan
    with pytest.raises(ConfigError, match="compiled already"):
        autopar.compile(model, 1, batch, plan=plan)


def test_training_with_accumulation_equals_eager():
    model, twin, batch = compiled()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in (model, twin)]
    for _ in range(2):
        for _ in range(2):
            for each in (model, twin):
                (each(**batch).loss / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6), name


def test_dropout_is_the_same_in_two_runs_and_differs_between_steps():
    first, _, batch = compiled(dropout=0.3)
    second, _, _ = compiled(dropout=0.3, microbatches=1)
    losses = [[m(**batch).loss.item() for _ in range(2)] for m in (first, second)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] != losses[0][1]
    other, _, _ = compiled(dropout=0.3, seed=1)
    assert other(**batch).loss.item() != losses[0][0]


def test_evaluation_returns_everything_and_without_labels_too():
    model, twin, batch = compiled(dropout=0.3)
    model.eval(), twin.eval()
    with torch.no_grad():
        found, wanted = model(**batch), twin(**batch)
        assert torch.allclose(found.logits, wanted.logits, atol=1e-5)
        ids = {"input_ids": batch["input_ids"]}
        found, wanted = model(**ids), twin(**ids)
    assert found.loss is None
    assert torch.allclose(found.logits, wanted.logits, atol=1e-5)
    assert not found.logits.requires_grad


def test_named_outputs_are_returned_and_closed_to_gradients():
    model, twin, batch = compiled(outputs=["logits"])
    out = model(**batch)
    assert torch.allclose(out.logits, twin(**batch).logits, atol=1e-5)
    with pytest.raises(ConfigError, match="gradient flows into output 'logits'"):
        out.logits.sum().backward()
    with pytest.raises(ConfigError, match=r"no output 'scores'; it has 'logits', 'loss'"):
        compiled(outputs=["scores"])


def test_hooks_on_parameters_and_torch_autograd_grad_work():
    model, twin, batch = compiled()
    weight, wanted = model.lm_head.weight, twin.lm_head.weight
    found = torch.autograd.grad(model(**batch).loss, [weight])[0]
    assert torch.allclose(found, torch.autograd.grad(twin(**batch).loss, [wanted])[0], atol=1e-6)
    seen = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    model(**batch).loss.backward()
    assert seen == [weight.shape]


def test_a_loss_function_with_a_batch_of_its_own():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    twin = copy.deepcopy(model)
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))

    def loss(output, batch):
        return torch.nn.functional.cross_entropy(output, batch)

    plan = hand_made_plan(capture(model, (), {"input": x}, loss=loss, batch=y), MeshShape())
    model = autopar.compile(model, 1, {"input": x, "batch": y}, loss=loss, plan=plan)
    found = model(input=x, batch=y)
    wanted = loss(twin(x), y)
    assert found.item() == pytest.approx(wanted.item())
    found.backward()
    wanted.backward()
    assert torch.allclose(model.weight.grad, twin.weight.grad, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(model(input=x), twin(x), atol=1e-6)


def test_a_frozen_parameter_that_is_thawed_later_is_refused():
    model, batch = build("gpt2")
    model.transformer.wpe.weight.requires_grad_(False)
    plan = hand_made_plan(capture(model, (), batch), MeshShape())
    model = autopar.compile(model, 1, batch, plan=plan)
    model(**batch).loss.backward()
    assert model.transformer.wpe.weight.grad is None
    model.transformer.wpe.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="'transformer.wpe.weight' was frozen"):
        model(**batch)


def test_a_wrong_batch_is_refused_and_the_model_goes_on():
    model, _, batch = compiled()
    with pytest.raises(InputError, match="no 'labels'"):
        model(input_ids=batch["input_ids"])
    model(**batch).loss.backward()


def test_a_meta_model_gets_weights():
    model, batch = build("llama", device="meta")
    plan = hand_made_plan(capture(model, (), batch), MeshShape())
    model = autopar.compile(model, 1, batch, plan=plan)
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert not any(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
