"""The captured program against the model run by torch, loss and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.capture.reference import bind_inputs, gradients, mutations, run_graph
from autopar.capture.tracing import capture
from autopar.ir.promote import promote
from autopar.ir.verify import verify_graph
from tests.zoo import build, tiny_models

LOW = (torch.float32, torch.bfloat16, torch.float16)


class Promoted(TorchDispatchMode):
    """Run a model with every low-precision dtype argument replaced by float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args = [torch.float64 if a in LOW else a for a in args]
        kwargs = {k: torch.float64 if v in LOW else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def worst_error(model, found):
    """Largest deviation of a gradient, relative to it or a thousandth of the largest one."""
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == found.keys()
    largest = max(g.abs().max() for g in grads.values())
    return max(
        ((g - found[n]).abs().max() / max(g.abs().max(), 1e-3 * largest)).item()
        for n, g in grads.items()
    )


@pytest.mark.parametrize("name", tiny_models())
def test_program_equals_eager_in_own_dtype(case, name):
    model, batch, captured = case(name)
    results = run_graph(captured.graph, bind_inputs(captured, model, (), batch))
    eager = copy.deepcopy(model)
    output = eager(**batch)
    output.loss.backward()
    torch.testing.assert_close(results["loss:loss"], output.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(results["output:logits"], output.logits, rtol=1e-5, atol=1e-6)
    assert worst_error(eager, gradients(results)) < 2e-5
    buffers = dict(eager.named_buffers())
    for buffer, value in mutations(results).items():
        torch.testing.assert_close(value, buffers[buffer])


@pytest.mark.parametrize("name", tiny_models())
def test_promoted_program_equals_promoted_eager(case, name):
    model, batch, captured = case(name)
    graph = promote(captured.graph)
    verify_graph(graph)
    results = run_graph(graph, bind_inputs(captured, model, (), batch, graph=graph))
    eager = copy.deepcopy(model).double()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    with Promoted():
        loss = eager(**wide).loss
        loss.backward()
    assert abs((results["loss:loss"] - loss).item()) < 1e-12
    assert worst_error(eager, gradients(results)) < 1e-10


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_eval_mode_is_captured_as_eval(name):
    model, batch = build(name, dropout=0.5, batch=4)
    model.eval()
    captured = capture(model, (), batch)
    assert not model.training
    results = run_graph(captured.graph, bind_inputs(captured, model, (), batch))
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(results["loss:loss"], loss)
    assert worst_error(model, gradients(results)) < 2e-5
    assert not mutations(results)


def test_bfloat16_model_keeps_its_dtypes():
    model, batch = build("llama", batch=4)
    model = model.bfloat16()
    captured = capture(model, (), batch)
    assert {i.meta.dtype for i in captured.graph.inputs if i.requires_grad} == {"bfloat16"}
    results = run_graph(captured.graph, bind_inputs(captured, model, (), batch))
    loss = model(**batch).loss
    assert results["loss:loss"].dtype == loss.dtype
    torch.testing.assert_close(results["loss:loss"], loss, rtol=2e-2, atol=0)
