"""Batches of changing sizes on real ranks; facts that do not hold are written to a file by name."""

import copy
import json
import logging
import sys
import traceback
from pathlib import Path

import torch

import autopar
from autopar.capture.tracing import capture
from autopar.errors import InputError
from autopar.plan.types import MeshShape
from tests.cases.small_models import SmallGPT, tokens
from tests.dist.ranks import RANK, WORLD, refuses, whole
from tests.plans import hand_made_plan

DEVICES = f"{WORLD}:cpu"


def compiled(mesh, microbatches, zero=0):
    """A compiled model planned for 8 samples of 16 tokens, and its twin."""
    torch.manual_seed(0)
    model = SmallGPT(layers=1)
    twin, batch = copy.deepcopy(model), tokens(8)
    plan = hand_made_plan(
        capture(model, (), batch), mesh, num_microbatches=microbatches, zero=zero, num_devices=WORLD
    )
    return autopar.compile(model, DEVICES, batch, plan=plan), twin


def trains(model, twin, batch):
    """One step: the loss and every gradient of this rank equal the twin's."""
    model.zero_grad(), twin.zero_grad()
    loss, wanted = model(**batch)["loss"], twin(**batch)["loss"]
    torch.testing.assert_close(loss, wanted, rtol=2e-5, atol=1e-6)
    loss.backward()
    wanted.backward()
    named = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole(parameter.grad), named[name].grad, rtol=2e-4, atol=2e-6, msg=name
        )


def evaluates(model, twin, batch):
    """Evaluation: all logits equal the twin's."""
    model.eval(), twin.eval()
    with torch.no_grad():
        found, wanted = model(**batch), twin(**batch)
    torch.testing.assert_close(found["logits"], wanted["logits"], rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(found["loss"], wanted["loss"], rtol=2e-5, atol=1e-6)
    model.train(), twin.train()


def other_sizes(model, twin):
    for size in (10, 7, 3, 1):
        trains(model, twin, tokens(size))


def other_lengths(model, twin):
    for length in (24, 8):
        trains(model, twin, tokens(8, length))
    evaluates(model, twin, tokens(16, 16))


def thirteen_samples(model, twin):
    samples = tokens(13)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for start in range(0, 13, 4):
        trains(model, twin, {k: v[start : start + 4] for k, v in samples.items()})
        for optimizer in optimizers:
            optimizer.step()


def other_dims(model, twin):
    """Refused on every rank, and the next step runs."""
    flat = {name: tensor[0] for name, tensor in tokens(8).items()}
    refuses(InputError, "with 1 dims", lambda: model(**flat))
    trains(model, twin, tokens(8))


PLANS = {
    "two_stages": (MeshShape(pp=WORLD), 4, 0),
    "two_data_ranks": (MeshShape(dp=WORLD), 1, 2),
}
FACTS = (other_sizes, other_lengths, thirteen_samples, other_dims)


def main(folder):
    failures = {}
    for plan, (mesh, microbatches, zero) in PLANS.items():
        model, twin = compiled(mesh, microbatches, zero)
        for fact in FACTS:
            try:
                torch.manual_seed(3)
                fact(model, twin)
                failures[f"{plan} {fact.__name__}"] = ""
            except Exception:
                failures[f"{plan} {fact.__name__}"] = traceback.format_exc()
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(failures))


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("autopar").setLevel(logging.ERROR)
    main(sys.argv[1])
