"""Models as Hugging Face writes them: result classes, keyword calls, shared things, and a table."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.capture.tracing import capture
from autopar.plan.decisions import decisions_of
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.solver.force import forced_plan
from tests.causal_model import CausalOutput, toy
from tests.equivalence.harness import actions_for, problem_of
from tests.zoo import build as build_tiny
from tests.zoo_models import build

CAUSAL = ("GPT-2", "GPT-NeoX", "BLOOM", "Llama", "Phi-3", "Falcon", "BERT", "T5")


def test_a_result_class_of_ones_own_comes_back_with_its_empty_fields() -> None:
    model, batch = toy()
    with torch.no_grad():
        expected = model(**batch)
    compiled = autopar.compile(model, devices=1, inputs=batch, outputs=["logits"])
    found = compiled(**batch)
    assert type(found) is CausalOutput
    assert found.past is None
    torch.testing.assert_close(found["logits"], expected["logits"])
    torch.testing.assert_close(found.loss.detach(), expected["loss"])
    found.loss.backward()
    assert all(p.grad is not None for p in compiled.parameters())


def test_a_call_without_labels_returns_no_loss() -> None:
    model, batch = toy()
    expected = model(batch["input_ids"])["logits"]
    compiled = autopar.compile(model, devices=1, inputs=batch).eval()
    with torch.no_grad():
        found = compiled(input_ids=batch["input_ids"])
    assert type(found) is CausalOutput
    assert found.loss is None
    torch.testing.assert_close(found["logits"], expected.detach())


def test_a_keyword_only_model_is_cut_into_two_stages() -> None:
    model, batch = toy()
    report = autopar.verify(model, 2, batch, pp=2, num_microbatches=2)
    assert report.mesh == "pp2"
    assert report.eager_worst


@pytest.mark.parametrize("stages", [2, 4])
def test_an_encoder_and_a_decoder_share_embedding_and_positions_over_stages(stages: int) -> None:
    # one table for encoder, decoder and head; the encoder's result is read by both decoder blocks;
    # the relative positions of block 0 are reused by block 1
    problem = problem_of(*build_tiny("t5", batch=4))
    plan = forced_plan(problem.graph, "t5", pp=stages, num_microbatches=4)
    programs = localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)
    shared = programs.params["shared.weight"]
    assert len(shared.stages) > 1
    actions = actions_for(programs, plan.mesh, plan.num_microbatches, plan.schedule, [0] * stages)
    verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_language_model_is_planned_for_eight_devices_on_one_and_two_axes(name: str) -> None:
    captured = capture(build(name)[0], (), build(name)[1])
    for degrees in ({"dp": 8}, {"dp": 4, "tp": 2}):
        plan = forced_plan(captured.graph, captured.hash, **degrees)
        assert plan.mesh.num_ranks == 8
        assert plan.unruled == ()
