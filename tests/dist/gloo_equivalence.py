"""Three optimizer steps of six architectures under one forced plan, beside eager torch.

Arguments: dp, tp, pp. Every rank checks what it holds; rank 0 also checks the whole weights.
"""

import copy
import logging
import os
import sys

import torch

import autopar
from tests.zoo import build

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet")
STEPS = 3
# float64 models; transformers computes norms in float32 inside, which rounds at 6e-8
TOLERANCE = 1e-6


def check(name: str, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    gap = float((found - wanted).abs().max())
    allowed = TOLERANCE * max(float(wanted.abs().max()), 1e-3)
    assert gap <= allowed, f"{name}: {what} differs by {gap:.3g}, allowed is {allowed:.3g}"


def train(name: str, dp: int, tp: int, pp: int) -> None:
    model, batch = build(name)
    model = model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    twin = copy.deepcopy(model)
    # a batch norm mixes the samples of different micro-batches
    microbatches = 1 if name == "resnet" else 2
    model = autopar.compile(
        model, "4:cpu", batch, dp=dp, tp=tp, pp=pp, num_microbatches=microbatches
    )
    mesh = model.plan.mesh
    assert (mesh.dp, mesh.tp, mesh.pp) == (dp, tp, pp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    reference = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        loss, wanted = model(**batch).loss, twin(**batch).loss
        check(name, f"loss of step {step}", loss.detach(), wanted.detach())
        loss.backward()
        wanted.backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    full = model.full_state_dict()
    for key, value in twin.state_dict().items() if full else ():
        if value.is_floating_point():
            check(name, key, full[key], value)


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dp, tp, pp = map(int, sys.argv[1:])
    for name in MODELS:
        train(name, dp, tp, pp)
        if os.environ["RANK"] == "0":
            sys.stdout.write(f"{name} equal\n")
    sys.stdout.write("passed\n")


if __name__ == "__main__":
    main()
