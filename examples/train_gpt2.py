"""Train a small GPT-2 on the bytes of Python's own sources, over four processes.

    torchrun --nproc-per-node 4 examples/train_gpt2.py

The model is transformers' GPT-2 as it is; nothing below says how it is split. The memory limit is
too small for plain data parallelism, so the plan has to find another way. Rank 0 trains a copy of
the model on its own beside it, and prints both losses at every tenth step. Dropout is off: the copy
would draw other bits than the compiled model, whose bits do not depend on the plan.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sysconfig
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import Progress

import autopar

STEPS = 30
BATCH, LENGTH = 16, 64
TEXT_BYTES = 1 << 20
MAX_NORM = 1.0
RATE = 3e-4  # at 1e-3 two runs of one process already part when a weight changes by rounding


def small_gpt2() -> transformers.GPT2LMHeadModel:
    """Eight layers, 6.4 million parameters, one token per byte."""
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=256, n_layer=8, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def source_bytes() -> torch.Tensor:
    """The first megabyte of the standard library's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text: torch.Tensor, count: int) -> list[dict[str, torch.Tensor]]:
    """Random pieces of the text; the same on every rank, as on one device."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        starts = torch.randint(0, len(text) - LENGTH, (BATCH, 1), generator=generator)
        ids = text[starts + torch.arange(LENGTH)]
        found.append({"input_ids": ids, "labels": ids})
    return found


def main() -> None:
    """Train, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-limit", default="64MiB", help="per process")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    is_first = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not is_first, highlight=False)

    model = small_gpt2()
    alone = copy.deepcopy(model) if is_first else None
    data = batches(source_bytes(), options.steps)
    model = autopar.compile(model, devices=4, inputs=data[0], memory_limit=options.memory_limit)
    console.print(model.report(), markup=False, soft_wrap=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    reference = None if alone is None else torch.optim.AdamW(alone.parameters(), lr=RATE)
    largest = 0.0
    with Progress(console=console, disable=not is_first) as progress:
        for step in progress.track(range(1, options.steps + 1), description="training"):
            batch = data[step - 1]
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if alone is None or reference is None:
                continue
            expected = alone(**batch).loss
            expected.backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
            reference.step()
            reference.zero_grad()
            largest = max(largest, abs(loss.item() - expected.item()))
            if step % 10 == 0:
                progress.console.print(
                    f"step {step:3}: loss {loss.item():.6f}, one process {expected.item():.6f}"
                )
    if is_first:
        print(f"max |loss difference| = {largest:.3g}")


if __name__ == "__main__":
    main()
