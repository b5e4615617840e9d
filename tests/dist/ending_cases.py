"""Training on four ranks, two by two, that one rank ends in the way that the first argument says.

Arguments: the way, the rank. Every rank has a process that loads its batches.
"""

import os
import signal
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader

import autopar
from autopar.capture.tracing import capture
from autopar.plan.types import MeshShape
from tests.dist.data_cases import SAMPLES, Model, Words, example
from tests.plans import hand_made_plan

# defaults, since pytest imports every file to look for doctests
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BATCH, BAD_STEP = 4, 3


class Spoilt(Words):
    """The labels of the third batch are out of range."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index // BATCH == BAD_STEP - 1:
            sample["labels"][-1] = 99
        return sample


class Picky(Model):
    """Can't be captured on the failing rank."""

    def forward(self, input_ids, labels):
        raise ValueError("boom in forward")


def stop_for(seconds):
    """Stop this process; somebody else lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"],
                     start_new_session=True)  # fmt: skip
    os.kill(os.getpid(), signal.SIGSTOP)


def misbehave(how):
    match how:
        case "raise":
            raise ValueError("the metrics broke")
        case "leave":
            sys.exit(0)
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            stop_for(20)
        case "stall":
            time.sleep(1000)


def main(how, failing):
    is_failing = failing == RANK
    batch = {key: value[:BATCH] for key, value in example().items()}
    model = Picky() if is_failing and how == "compile" else Model()
    captured = capture(Model(), (), batch)
    mesh = MeshShape(dp=2, tp=2) if is_failing and how == "plan" else MeshShape(pp=2, dp=2)
    plan = hand_made_plan(captured, mesh, num_microbatches=2, num_devices=WORLD)
    model = autopar.compile(model, f"{WORLD}:cpu", batch, plan=plan)
    data = Spoilt() if is_failing and how == "label" else Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=BATCH, num_workers=1)
    for step, share in enumerate(autopar.shard_loader(loader, model), start=1):
        if is_failing and step == BAD_STEP:
            misbehave(how)
        if is_failing and step == BAD_STEP and how == "shape":
            share = {key: value[:2] for key, value in batch.items()}
        model(**share)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert step == SAMPLES // BATCH


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write("trained to the end\n")
