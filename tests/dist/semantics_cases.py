"""Facts of training semantics on real processes; every rank writes which of them it found to hold.

The facts run one after another in one launch; their names are those of the functions in ``FACTS``.
"""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  torch's own habit

import autopar
from autopar.capture.tracing import capture
from autopar.errors import CaptureError, ConfigError, InputError
from autopar.plan.types import MeshShape
from autopar.solver.force import forced_plan
from tests.causal_model import CausalOutput, toy
from tests.dist.facts import tell
from tests.dist.ranks import RANK, WORLD, refuses, whole
from tests.plans import hand_made_plan

DEVICES = f"{WORLD}:cpu"
MESHES = {
    1: (),
    2: (MeshShape(pp=2), MeshShape(dp=2), MeshShape(tp=2)),
    4: (MeshShape(pp=2, dp=2), MeshShape(dp=2, tp=2)),
}[WORLD]


class Tagger(nn.Module):
    """A loss over tokens, outputs without labels."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.last, self.out = nn.LayerNorm(8), nn.Linear(8, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, ids, labels=None):
        h = self.embed(ids)
        h = h + self.drop(self.down(torch.tanh(self.up(self.norm(h)))))
        scores = self.out(self.last(h))
        if labels is None:
            return {"scores": scores}
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "scores": scores, "h": h}


def batch_of(seed=1, *, valid=(1, 3, 8, 8, 5, 8, 2, 8)):
    """Eight sequences of eight tokens; the first ``valid`` of each have a label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 16, (8, 8), generator=generator)
    labels = ids.roll(-1, 1)
    for row, count in enumerate(valid):
        labels[row, count:] = -100
    return {"ids": ids, "labels": labels}


def compiled(model, mesh, inputs, *, microbatches=2, **options):
    """A model under a hand-made plan, and its eager twin."""
    twin = copy.deepcopy(model)
    captured = capture(model, (), inputs)
    plan = hand_made_plan(captured, mesh, num_microbatches=microbatches, num_devices=WORLD)
    return autopar.compile(model, DEVICES, inputs, plan=plan, **options), twin


def same_gradients(model, twin):
    wanted = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole(parameter.grad), wanted[name].grad, rtol=2e-4, atol=2e-6, msg=name
        )


# -- facts ----------------------------------------------------------------------------------------


def gradients_accumulate_over_calls_and_are_added_to_what_was_there():
    for mesh in MESHES:
        model, twin = compiled(Tagger(), mesh, batch_of())
        for parameter in (*model.parameters(), *twin.parameters()):
            parameter.grad = torch.ones_like(parameter)
        for seed in (1, 2, 3):
            model(**batch_of(seed))["loss"].backward()
            twin(**batch_of(seed))["loss"].backward()
        same_gradients(model, twin)


def a_mean_over_labels_is_exact_where_a_rank_has_none():
    batch = batch_of(valid=(0, 0, 0, 0, 5, 8, 2, 8))
    for mesh in MESHES:
        model, twin = compiled(Tagger(), mesh, batch)
        loss, wanted = model(**batch)["loss"], twin(**batch)["loss"]
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        wanted.backward()
        same_gradients(model, twin)


def a_loss_divided_outside_the_model_has_the_gradients_of_one_device():
    ids, weights = batch_of()["ids"], torch.linspace(0.1, 1.0, 16)
    for mesh in MESHES:
        model, twin = compiled(Tagger(), mesh, {"ids": ids})
        for each in (model, twin):
            ((each(ids=ids)["scores"] * weights).pow(2).sum() / 7).backward()
        same_gradients(model, twin)


class TwoHeads(nn.Module):
    """Two outputs of layers of their own, without a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return self.first(h), self.second(h)


def a_head_that_is_not_used_has_no_gradient_on_any_rank():
    x = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}
    for mesh in MESHES:
        for used, unused in ((0, "second"), (1, "first")):
            model, twin = compiled(TwoHeads(), mesh, x)
            for net in (model, twin):
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
                for _ in range(2):
                    optimizer.zero_grad()
                    net(**x)[used].square().mean().backward()
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                    optimizer.step()
            for name, parameter in model.named_parameters():
                assert (parameter.grad is None) == name.startswith(unused), name
            found = model.full_state_dict()
            for name, value in found.items():
                torch.testing.assert_close(value, twin.state_dict()[name], msg=name)


def an_input_that_requires_a_gradient_is_refused_on_every_rank():
    x = {"x": torch.ones(8, 8)}
    for mesh in MESHES:
        model, _ = compiled(TwoHeads(), mesh, x)
        made = {"x": x["x"].clone().requires_grad_() * 2}
        text = "input 'x' requires a gradient, made by Mul"
        refuses(InputError, text, lambda m=model, given=made: m(**given))
        one = {"x": x["x"].clone().requires_grad_(RANK == 1)}
        text = "the wish for a gradient of input 'x' is on on rank 1, off on rank 0"
        refuses(InputError, text, lambda m=model, given=one: m(**given))
        model(**x)[0].sum().backward()


def replicated_parameters_stay_equal_bit_for_bit():
    """Sequence-split norms (and dropout) over five steps of Adam; one device is followed too."""
    batch = batch_of()
    norms = {"norm.*": "R", "last.*": "R"}
    sequence = {"tp": WORLD, "sequence_parallel": True, "placements": norms}
    for dropout, degrees in ((0.0, sequence), (0.3, {"dp": WORLD})):
        model = Tagger(dropout)
        twin = copy.deepcopy(model)
        captured = capture(model, (), batch)
        plan = forced_plan(captured.graph, captured.hash, **degrees)
        split = plan.splits.get("tp", {})
        assert dropout or split["native_layer_norm"].startswith("S(1)"), split
        model = autopar.compile(model, DEVICES, batch, plan=plan)
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, twin)]
        for _ in range(5):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                each(**batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        count = 0
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            if local.shape != parameter.shape:
                continue
            count += 1
            copies = [torch.empty_like(local) for _ in range(WORLD)]
            dist.all_gather(copies, local.contiguous())
            assert all(torch.equal(local, other) for other in copies), name
        assert count >= 4, "the norms are replicated"
        if not dropout:
            wanted = dict(twin.named_parameters())
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(
                    whole(parameter), wanted[name], rtol=1e-4, atol=1e-5, msg=name
                )


def a_mask_is_the_same_under_every_plan_and_another_in_the_next_step():
    batch, found = batch_of(), []
    for mesh in MESHES:
        model, _ = compiled(Tagger(0.5), mesh, batch, outputs=["h"], seed=3)
        found.append([model(**batch)["h"].detach() for _ in range(2)])
    for first, second in found:
        torch.testing.assert_close(first, found[0][0])
        assert not torch.allclose(first, second)
    everywhere = [torch.empty_like(found[0][0]) for _ in range(WORLD)]
    dist.all_gather(everywhere, found[0][0].contiguous())
    assert all(torch.equal(everywhere[0], other) for other in everywhere)


def evaluation_equals_eager_keeps_nothing_and_training_goes_on():
    batch = batch_of()
    for mesh in MESHES:
        model, twin = compiled(Tagger(0.5), mesh, batch)
        model.eval(), twin.eval()
        with torch.no_grad():
            model(ids=batch["ids"])
            before = live_bytes()
            for seed in (2, 3):
                ids = batch_of(seed)["ids"]
                found = model(ids=ids)["scores"]
                torch.testing.assert_close(found, twin(ids=ids)["scores"], rtol=1e-4, atol=1e-5)
                assert not found.requires_grad
            del found
            assert live_bytes() <= before + ids.nbytes
        model.train()
        model(**batch)["loss"].backward()
        assert all(p.grad is not None for p in model.parameters())


def live_bytes():
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def an_inference_plan_gives_every_rank_the_outputs_of_one_device():
    ids = batch_of()["ids"]
    for degrees in ({"tp": WORLD}, {"pp": WORLD, "num_microbatches": 2}, {"dp": WORLD, "zero": 3}):
        model = Tagger(0.5).eval()
        twin = copy.deepcopy(model)
        model = autopar.compile(model, DEVICES, {"ids": ids}, mode="inference", **degrees)
        assert model.plan.mode == "inference"
        with torch.no_grad():
            found = model(ids=ids)["scores"]
            torch.testing.assert_close(found, twin(ids=ids)["scores"], rtol=1e-4, atol=1e-5)
        refuses(
            ConfigError, "compile it with mode='train'",
            lambda model=model: model(ids=ids)["scores"].sum().backward(),
        )  # fmt: skip


def what_was_not_asked_for_is_refused_and_what_was_is_whole():
    batch = batch_of()
    for mesh in MESHES:
        model, twin = compiled(Tagger(), mesh, batch, outputs=["scores"])
        found, wanted = model(**batch), twin(**batch)
        torch.testing.assert_close(found["scores"], wanted["scores"], rtol=1e-4, atol=1e-5)
        refuses(ConfigError, "pass outputs=['h']", lambda found=found: found["h"].sum())


def torch_s_generator_is_refused_on_several_ranks():
    refuses(
        ConfigError, f"rng='torch' on {WORLD} devices",
        lambda: autopar.compile(Tagger(), DEVICES, batch_of(), rng="torch"),
    )  # fmt: skip


class Nested(nn.Module):
    """One dict with everything in it; decides by a value if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 8)

    def forward(self, batch, *, decide=False):
        y = self.layer(batch["x"]) + self.layer(batch["extra"]["pos"])
        if decide and y.sum() > 0:
            y = -y
        return {"loss": y.pow(2).mean(), "y": y}


def a_decision_by_value_is_refused_with_its_line_on_every_rank():
    call = {"batch": {"x": torch.ones(4, 4), "extra": {"pos": torch.ones(4, 4)}}, "decide": True}
    with pytest.raises(CaptureError, match="it decides by the value of a tensor") as caught:
        autopar.compile(Nested(), DEVICES, call)
    assert "`if decide and y.sum() > 0:`" in str(caught.value)


def nested_arguments_equal_eager_and_a_wrong_one_is_named_by_its_path():
    call = {"batch": {"x": torch.randn(4, 4), "extra": {"pos": torch.ones(4, 4)}}}
    dist.broadcast(call["batch"]["x"], 0)
    for mesh in MESHES:
        model, twin = compiled(Nested(), mesh, call)
        torch.testing.assert_close(model(**call)["loss"], twin(**call)["loss"])
        wrong = {"batch": {**call["batch"], "extra": {"pos": torch.ones(4, 5)}}}
        refuses(InputError, "'batch.extra.pos' [4, 5]", lambda m=model, w=wrong: m(**w))
        model(**call)["loss"].backward()


def a_result_class_of_ones_own_keeps_its_empty_fields_on_every_rank():
    batch = toy()[1]
    for mesh in MESHES:
        model, twin = compiled(toy()[0], mesh, batch, outputs=["logits"])
        found, wanted = model(**batch), twin(**batch)
        assert type(found) is CausalOutput
        assert found.past is None
        torch.testing.assert_close(found["logits"], wanted["logits"].detach())
        torch.testing.assert_close(found.loss.detach(), wanted.loss.detach())
        found.loss.backward()
        with torch.no_grad():
            again = model.eval()(input_ids=batch["input_ids"])
        assert type(again) is CausalOutput
        assert again.loss is None
        model.train()


ALL = (
    gradients_accumulate_over_calls_and_are_added_to_what_was_there,
    a_mean_over_labels_is_exact_where_a_rank_has_none,
    a_loss_divided_outside_the_model_has_the_gradients_of_one_device,
    a_head_that_is_not_used_has_no_gradient_on_any_rank,
    an_input_that_requires_a_gradient_is_refused_on_every_rank,
    a_mask_is_the_same_under_every_plan_and_another_in_the_next_step,
    replicated_parameters_stay_equal_bit_for_bit,
    evaluation_equals_eager_keeps_nothing_and_training_goes_on,
    an_inference_plan_gives_every_rank_the_outputs_of_one_device,
    what_was_not_asked_for_is_refused_and_what_was_is_whole,
    torch_s_generator_is_refused_on_several_ranks,
    a_decision_by_value_is_refused_with_its_line_on_every_rank,
    nested_arguments_equal_eager_and_a_wrong_one_is_named_by_its_path,
    a_result_class_of_ones_own_keeps_its_empty_fields_on_every_rank,
)
FACTS = {2: ALL, 4: ALL[:7]}
"""Facts by the number of ranks that look for them; four are for what two can't show."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    tell(FACTS[WORLD])
