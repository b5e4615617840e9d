"""How long planning takes, and what it finds: GPT-2 of several sizes on several clusters.

Nothing is trained: models live on the meta device and the clusters need not exist. Run it with
plain Python: ``python examples/benchmark.py [LAYERS ...]``.
"""

from __future__ import annotations

import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.units import format_bytes, format_time

CLUSTERS = ("1x4:a100-80gb", "1x8:h100-sxm", "4x8:h100-sxm")
LAYERS = (2, 12, 48)
BATCH, SEQUENCE = 32, 1024


def plan_one(num_layers: int, cluster: str) -> tuple[float, autopar.Plan]:
    """Seconds to capture and plan, and the plan."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=num_layers, n_embd=1600, n_head=25))
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    start_s = time.perf_counter()
    compiled = autopar.compile(model, devices=cluster, inputs={"input_ids": ids, "labels": ids})
    return time.perf_counter() - start_s, compiled.plan


def main() -> None:
    """Plan every size for every cluster and print a table."""
    sizes = tuple(map(int, sys.argv[1:])) or LAYERS
    columns = ("layers", "cluster", "planned in", "mesh", "micro-batches", "step", "bound", "peak")
    table = Table(*columns, title="GPT-2, width 1600, 32 x 1024 tokens")
    for num_layers in sizes:
        for cluster in CLUSTERS:
            seconds, plan = plan_one(num_layers, cluster)
            table.add_row(
                str(num_layers),
                cluster,
                f"{seconds:.1f} s",
                str(plan.mesh),
                str(plan.num_microbatches),
                format_time(plan.time_s),
                format_time(plan.bound_s),
                format_bytes(plan.peak_bytes),
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
