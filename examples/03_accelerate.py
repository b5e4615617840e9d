"""An ``accelerate`` loop on a model that autopar has split over two processes.

    torchrun --nproc-per-node 2 examples/03_accelerate.py

The loop is that of one process: the loader gives global batches, nothing is wrapped or cut again,
metrics are whole on every rank. Rank 0 trains a copy of the model in plain torch beside it and
prints both. The data is made up.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader

import autopar

SAMPLES, FEATURES, CLASSES = 44, 16, 5
BATCH, EPOCHS, ACCUMULATION, MAX_NORM, RATE = 8, 2, 2, 0.5, 1e-2


class Classifier(torch.nn.Module):
    """An ordinary model with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)
        )
        self.head = torch.nn.Linear(64, CLASSES)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss and logits."""
        logits = self.head(self.body(features))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def samples() -> list[dict[str, torch.Tensor]]:
    """Random features whose class follows from them."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = features[:, :CLASSES].argmax(1)
    return [{"features": f, "labels": c} for f, c in zip(features, labels, strict=True)]


def loader(data: list[dict[str, torch.Tensor]], *, shuffle: bool) -> DataLoader:
    """Global batches; the order is seeded, so that it is the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    return DataLoader(data, batch_size=BATCH, shuffle=shuffle, generator=generator)


def alone(model: torch.nn.Module) -> Iterator[float]:
    """The same loop in plain torch: losses of the optimizer steps, then the accuracy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    train = loader(samples(), shuffle=True)
    for _ in range(EPOCHS):
        for position, batch in enumerate(train, start=1):
            loss = model(**batch)["loss"]
            (loss / ACCUMULATION).backward()
            if position % ACCUMULATION == 0 or position == len(train):
                yield float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield loss.item()
    model.eval()
    with torch.no_grad():
        pairs = [(model(**b)["logits"], b["labels"]) for b in loader(samples(), shuffle=False)]
    yield float(torch.cat([p.argmax(1) == c for p, c in pairs]).float().mean())


def accelerated(model: torch.nn.Module, accelerator: Accelerator) -> Iterator[float]:
    """The loop with accelerate: the same numbers in the same order."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    model, optimizer, scheduler, train, test = accelerator.prepare(
        model, optimizer, scheduler, loader(samples(), shuffle=True),
        loader(samples(), shuffle=False),
    )  # fmt: skip
    for _ in range(EPOCHS):
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    yield float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield loss.item()
    model.eval()
    with torch.no_grad():
        pairs = [accelerator.gather_for_metrics((model(**b)["logits"], b["labels"])) for b in test]
    yield float(torch.cat([p.argmax(1) == c for p, c in pairs]).float().mean())


def main() -> None:
    """Train, evaluate, and compare with one process."""
    torch.manual_seed(0)
    model = Classifier()
    plain = copy.deepcopy(model)
    batch = next(iter(loader(samples(), shuffle=False)))
    # how it is split is fixed here: left to itself, so small a model stays on one process
    model = autopar.compile(model, inputs=batch, dp=int(os.environ.get("WORLD_SIZE", "1")))
    accelerator = autopar.as_one_worker(
        Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    )
    accelerator.print(model.plan)
    found = list(accelerated(model, accelerator))
    whole = model.full_state_dict()  # every rank calls it, rank 0 has the weights
    if accelerator.is_main_process:
        wanted = list(alone(plain))
        pairs = list(zip(found, wanted, strict=True))
        for mine, other in pairs:
            print(f"{mine:.6f}, one process {other:.6f}")
        gap = max(float((whole[n] - v).abs().max()) for n, v in plain.state_dict().items())
        print(f"max |difference| = {max(abs(a - b) for a, b in pairs):.3g}")
        print(f"max |weight difference| = {gap:.3g}")
    if dist.is_initialized():
        dist.barrier()


if __name__ == "__main__":
    main()
