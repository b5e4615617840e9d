"""Mixed devices against the planners of the literature: ``python -m tests.bench.hetero``.

Every row is a cluster and a model; every column a planner. All choices are simulated by the same
simulator from the same block prices. ``bound`` is the sum-of-speeds bound, ``gap`` what ours is
above it. ``--large`` adds Llama-3-70B on 8x8 H100 and 16x8 A100, for which the model is captured.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from autopar.cluster import Cluster, parse_devices
from autopar.ir.graph import Graph
from autopar.solver.constraints import Constraints
from autopar.solver.mixed_build import MixedBuilder
from autopar.solver.mixed_choice import choose
from autopar.solver.mixed_problem import MixedProblem
from cost_models.analytic import AnalyticCostModel
from tests.bench.hetero_baselines import BASELINES, best_of
from tests.mixed_problems import MIB, small_problem

GIB = 1 << 30


def chain(
    *,
    counts: tuple[int, int],
    speeds: tuple[float, float],
    limits: tuple[int, int],
    batch: int,
    blocks: int = 32,
) -> MixedProblem:
    """A Llama-8B-like chain: layers of 20 ms per sample and 3.4 GiB of state, on fast links."""
    return small_problem(
        counts=counts,
        speeds=speeds,
        limits=limits,
        num_blocks=blocks,
        batch=batch,
        sizes=(1, 2, 4, 8),
        widths=((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)),
        block_s=20e-3,
        state_bytes=3400 * MIB,
        saved_bytes=600 * MIB,
        gradient_bytes=850 * MIB,
        step_s=2e-3,
    )


SMALL: dict[str, Callable[[], MixedProblem]] = {
    "1:1 speeds, 4 + 4": lambda: chain(
        counts=(4, 4), speeds=(1.0, 1.0), limits=(75 * GIB, 75 * GIB), batch=512
    ),
    "1:3 speeds, 4 + 4": lambda: chain(
        counts=(4, 4), speeds=(3.0, 1.0), limits=(75 * GIB, 75 * GIB), batch=512
    ),
    "1:3 speeds, 2 + 6": lambda: chain(
        counts=(2, 6), speeds=(3.0, 1.0), limits=(75 * GIB, 75 * GIB), batch=512
    ),
    "mixed memory, 4 + 4": lambda: chain(
        counts=(4, 4), speeds=(1.0, 1.0), limits=(75 * GIB, 22 * GIB), batch=512
    ),
    "1:3 and mixed memory, 4 + 4": lambda: chain(
        counts=(4, 4), speeds=(3.0, 1.0), limits=(75 * GIB, 22 * GIB), batch=512
    ),
}


def row(name: str, problem: MixedProblem) -> dict[str, float]:
    """Seconds of a step by planner, and the bound."""
    found: dict[str, float] = {}
    begin_s = time.process_time()
    answer = choose(problem)
    found["cpu_s"] = time.process_time() - begin_s
    assert answer is not None, name
    found["ours"], found["bound"] = answer.best.step_s, answer.bound_s
    for label, choices in BASELINES.items():
        best = best_of(problem, choices(problem))
        found[label] = float("inf") if best is None else best[0].step_s
    return found


def show(name: str, found: dict[str, float]) -> None:
    """One line of the table."""
    cells = "".join(f"{found[label]:>13.3f}" for label in ("bound", "ours", *BASELINES))
    gap = 100 * (1 - found["bound"] / found["ours"])
    sys.stdout.write(f"{name:<30}{cells}{gap:>8.1f} %{found['cpu_s']:>8.1f}\n")


def large(batch: int) -> tuple[Graph, Cluster]:
    """Llama-3-70B, captured on the meta device, and the cluster of two kinds."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from autopar.api.compiling import capture_call

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.empty((batch, 8192), dtype=torch.long)
    _, captured = capture_call(
        model, {"input_ids": ids, "labels": ids}, None, None, precision="bf16"
    )
    return captured.graph, parse_devices("8x8:h100-sxm + 16x8:a100-80gb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="Llama-3-70B on 192 devices")
    parser.add_argument("--batch", type=int, default=512, help="of the large row")
    args = parser.parse_args()
    labels = "".join(f"{label:>13}" for label in ("bound", "ours", *BASELINES))
    sys.stdout.write(f"{'seconds of a step':<30}{labels}{'gap':>10}{'cpu s':>8}\n")
    for name, build in SMALL.items():
        show(name, row(name, build()))
    if args.large:
        graph, cluster = large(args.batch)
        begin_s = time.process_time()
        builder = MixedBuilder(graph, Constraints(), "adamw", AnalyticCostModel)
        problem = builder.build(cluster).problem
        sys.stdout.write(f"blocks priced in {time.process_time() - begin_s:.1f} cpu s\n")
        # the heuristics enumerate: groups of whole machines are enough for them
        whole = tuple(k for k in problem.kinds if k.num_devices % 8 == 0)
        show("70B, 8x8 H100 + 16x8 A100", row("70B", replace(problem, kinds=whole)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sys.stdout.write(f"peak RSS {peak:.2f} GiB\n")


if __name__ == "__main__":
    main()
