"""A small model with one of everything that a checkpoint holds, and ways to train it."""

import copy
import os

import torch

import autopar
from autopar.capture.tracing import capture
from tests.plans import hand_made_plan

VOCAB, WIDTH, ROWS, LENGTH = 13, 10, 8, 4

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, eps=1e-3, weight_decay=0.1),
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, lr=0.02, eps=1e-3, foreach=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(
        groups,
        lr=0.05,
        eps=(1e-2, 1e-3),
        weight_decay=0.1,  # above the noise of a zero gradient
    ),
}


class Everything(torch.nn.Module):
    """A tied weight, odd sizes, buffers, a frozen and an unused parameter, dropout."""

    def __init__(self, dropout=0.0, vocab=VOCAB, unused=True):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, WIDTH)
        torch.nn.init.normal_(self.embed.weight, std=0.3)
        self.position = torch.nn.Parameter(torch.randn(LENGTH, WIDTH), requires_grad=False)
        self.first = torch.nn.Linear(WIDTH, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.drop = torch.nn.Dropout(dropout)
        self.second = torch.nn.Linear(7, WIDTH)
        if unused:
            self.spare = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor([1.5]))
        self.head = torch.nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        hidden = self.embed(ids) + self.position
        inner = self.norm(self.first(hidden).flatten(0, 1)).unflatten(0, ids.shape)
        hidden = hidden + self.second(self.drop(torch.tanh(inner))) * self.scale
        logits = self.head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def build(dropout=0.0, seed=0, vocab=VOCAB, unused=True):
    torch.manual_seed(seed)
    model = Everything(dropout, vocab, unused).train()
    return model, batch_of(0, vocab)


def batch_of(step, vocab=VOCAB):
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, vocab, (ROWS, LENGTH), generator=generator)
    return {"ids": ids, "labels": ids.roll(1, 1)}


def compiled(
    mesh, *, dropout=0.0, zero=0, seed=0, vocab=VOCAB, model_seed=0, unused=True, **options
):
    """The model compiled under a hand-made plan for ``mesh``, and its eager twin."""
    model, batch = build(dropout, model_seed, vocab, unused)
    twin = copy.deepcopy(model)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    plan = hand_made_plan(capture(model, (), batch), mesh, zero=zero, num_devices=world, seed=seed)
    devices = f"{world}:cpu" if world > 1 else 1
    return autopar.compile(model, devices, batch, plan=plan, **options), twin


def groups_of(model):
    """Weight decay for matrices alone, as is usual."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if p.dim() > 1]},
        {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def optimizer_of(kind, model):
    optimizer = OPTIMIZERS[kind](groups_of(model))
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


def train(model, optimizer, scheduler, steps, *, first=0, clip=None):
    """Losses of some steps, each on its own batch."""
    losses = []
    for step in range(first, first + steps):
        loss = model(**batch_of(step))["loss"]
        losses.append(float(loss.detach()))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses
