"""Models as Hugging Face writes them: result classes, keyword calls, shared things, and a table."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.capture.tracing import capture
from autopar.plan.decisions import decisions_of
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.solver.force import forced_plan
from tests.equivalence.harness import actions_for, problem_of
from tests.zoo import build as build_tiny
from tests.zoo_models import build

VOCAB, SEQ = 24, 6
CAUSAL = ("GPT-2", "GPT-NeoX", "BLOOM", "Llama", "Phi-3", "Falcon", "BERT", "T5")


class CausalOutput(OrderedDict):
    """Entries are attributes too, as in ``transformers.utils.ModelOutput``."""

    def __getattr__(self, name: str) -> object:
        return self.get(name)


class ToyCausalLM(nn.Module):
    """A language model that is called by keywords only and returns a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids=None, *, attention_mask=None, labels=None, use_cache=False):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return CausalOutput(loss=loss, logits=logits, past=() if use_cache else None)


def _toy() -> tuple[ToyCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCAB, (4, SEQ))
    return ToyCausalLM(), {"input_ids": ids, "labels": ids}


def test_a_result_class_of_ones_own_comes_back_with_its_empty_fields() -> None:
    model, batch = _toy()
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
    model, batch = _toy()
    expected = model(batch["input_ids"])["logits"]
    compiled = autopar.compile(model, devices=1, inputs=batch).eval()
    with torch.no_grad():
        found = compiled(input_ids=batch["input_ids"])
    assert type(found) is CausalOutput
    assert found.loss is None
    torch.testing.assert_close(found["logits"], expected.detach())


def test_a_keyword_only_model_is_cut_into_two_stages() -> None:
    model, batch = _toy()
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
