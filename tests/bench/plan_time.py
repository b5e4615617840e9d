"""How long planning takes: ``python -m tests.bench.plan_time [--rows NAME...]``.

Every row is planned in a process of its own, from nothing: seconds by phase, processor seconds,
peak memory, and what came out: mesh, predicted step, bound, what the bound leaves open of the
simulated time (gap) and of the estimates (model gap); with ``--replan`` also the seconds of
planning again in the same process after the last machine was lost. Nothing is asserted.

Batches are those of the papers: GPT-2 (Radford et al. 2019: 512 sequences); Llama 3 (Dubey et al.
2024: 8M tokens for most of the training of the large ones; 1M here for 8B on 32 devices); 175B,
530B, 1T (Narayanan et al., SC 2021, tables 1 and 2: as many sequences as devices); T5 (Raffel et
al. 2020: 2,048 sequences of 512); ViT-22B (Dehghani et al. 2023: 65k images, here 65,536).
Mixtral's is not published: 4M tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_NODES = 100_000
PHASES = ("capture", "analysis", "ranking", "pipelines", "exact", "other")
Made = tuple[Any, dict[str, Any]]
"""A model on the meta device and its global batch."""


@dataclass(frozen=True)
class Row:
    """A model on a cluster; a graph instead of a model where ``make`` is None."""

    devices: str
    make: Callable[[], Made] | None


def _tokens(batch: int, length: int, vocabulary: int) -> Any:
    import torch

    return torch.zeros((batch, length), dtype=torch.int64) % vocabulary


def _language_model(config: Any, batch: int, length: int) -> Made:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = _tokens(batch, length, config.vocab_size)
    return model, {"input_ids": ids, "labels": ids}


def _gpt(layers: int, hidden: int, heads: int, batch: int, *, length: int = 2048) -> Made:
    from transformers import GPT2Config

    config = GPT2Config(
        vocab_size=51_200, n_positions=length, n_embd=hidden, n_layer=layers, n_head=heads
    )
    return _language_model(config, batch, length)


def _gpt2() -> Made:
    from transformers import GPT2Config

    return _language_model(GPT2Config(), 512, 1024)


def _llama(layers: int, hidden: int, inner: int, heads: int, batch: int) -> Made:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192,
        rope_theta=500_000.0,
    )  # fmt: skip
    return _language_model(config, batch, 8192)


def _llama_8b() -> Made:
    return _llama(32, 4096, 14_336, 32, 128)


def _llama_70b() -> Made:
    return _llama(80, 8192, 28_672, 64, 1024)


def _mixtral() -> Made:
    from transformers import MixtralConfig

    return _language_model(MixtralConfig(), 1024, 4096)


def _t5_11b() -> Made:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_kv=128, d_ff=65_536, num_layers=24, num_heads=128, vocab_size=32_128,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config).to(torch.bfloat16)
    ids = _tokens(2048, 512, config.vocab_size)
    return model, {"input_ids": ids, "labels": ids}


def _vit_22b() -> Made:
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=6144, num_hidden_layers=48, num_attention_heads=48, intermediate_size=24_576,
        image_size=224, patch_size=14, num_labels=21_843,
    )  # fmt: skip
    with torch.device("meta"):
        model = ViTForImageClassification(config).to(torch.bfloat16)
        images = torch.zeros((65_536, 3, 224, 224), dtype=torch.bfloat16)
    return model, {"pixel_values": images, "labels": torch.zeros(65_536, dtype=torch.int64)}


ROWS: Mapping[str, Row] = {
    "gpt2-8": Row("1x8:a100-80gb", _gpt2),
    "llama3-8b-32": Row("4x8:h100-sxm", _llama_8b),
    "llama3-70b-64": Row("8x8:h100-sxm", _llama_70b),
    "llama3-70b-512": Row("64x8:h100-sxm", _llama_70b),
    "llama3-70b-1024": Row("128x8:h100-sxm", _llama_70b),
    "gpt3-175b-1536": Row("192x8:a100-80gb", lambda: _gpt(96, 12_288, 96, 1536)),
    "gpt-530b-2240": Row("280x8:a100-80gb", lambda: _gpt(105, 20_480, 128, 2240)),
    "gpt-1t-3072": Row("384x8:a100-80gb", lambda: _gpt(128, 25_600, 160, 3072)),
    "mixtral-8x7b-64": Row("8x8:h100-sxm", _mixtral),
    "t5-11b-64": Row("8x8:a100-80gb", _t5_11b),
    "vit-22b-256": Row("32x8:a100-80gb", _vit_22b),
    "graph-100k-64": Row("8x8:h100-sxm", None),
    "llama3-70b-mixed": Row("8x8:h100-sxm + 16x8:a100-80gb", _llama_70b),
}


def _graph() -> Any:
    from tests.joint_graphs import residual_network

    per_layer = len(residual_network(3).nodes) - len(residual_network(2).nodes)
    return residual_network(NUM_NODES // per_layer, rows=4096, width=2048, hidden=8192)


def _planner(graph: Any, key: str, progress: Callable[[str], None]) -> Any:
    """A planner whose searches share what they know about the model."""
    from autopar.solver.analysis import Analysis
    from autopar.solver.constraints import Constraints
    from autopar.solver.planning import Planner
    from autopar.solver.search import solve
    from cost_models.analytic import AnalyticCostModel

    known: list[Any] = []

    def search(cluster: Any, constraints: Constraints, limit: int | None) -> Any:
        model = AnalyticCostModel(cluster)
        if known:
            analysis = known[0].on(cluster, model).under(constraints)
        else:
            begin_s = time.monotonic()
            analysis = planner.analysis = Analysis(graph, cluster, model, constraints, "adamw")
            known.extend([analysis, time.monotonic() - begin_s])
        plan, stats = solve(
            graph, key, cluster, constraints=constraints, optimizer="adamw",
            memory_limit_bytes=limit, cost_model=model, analysis=analysis, progress=progress,
        )  # fmt: skip
        stats.seconds["analysis"] += known.pop() if len(known) > 1 else 0.0
        return plan, stats

    planner = Planner(
        graph=graph, model_hash=key, constraints=Constraints(), optimizer="adamw",
        prices=AnalyticCostModel, search=search, progress=progress,
    )  # fmt: skip
    return planner


def measure(
    row: Row, *, save: str = "", verbose: bool = False, replans: bool = False
) -> dict[str, Any]:
    """Plan a row in this process."""
    from autopar.cluster import parse_devices
    from autopar.solver.replan import change_of, replan

    begin_s = time.monotonic()
    if row.make is None:
        graph, key = _graph(), "synthetic"
    else:
        from autopar.api.compiling import capture_call

        model, batch = row.make()
        begin_s = time.monotonic()
        captured = capture_call(model, batch, None, None, mode="train", precision=None)[1]
        graph, key = captured.graph, captured.hash
    cluster = parse_devices(row.devices)
    captured_s = time.monotonic()
    if save:
        import pickle

        with open(save, "wb") as file:
            pickle.dump((graph, key, cluster), file)

    def progress(line: str) -> None:
        if verbose:
            sys.stderr.write(f"{time.monotonic() - captured_s:7.1f} {line}\n")

    planner = _planner(graph, key, progress)
    plan, stats = planner.plan(cluster)
    end_s = time.monotonic()
    phases = {"capture": captured_s - begin_s, **stats.seconds}
    phases["other"] = end_s - captured_s - sum(stats.seconds.values())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "nodes": len(graph.nodes),
        "phases": phases,
        "total_s": end_s - begin_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_gib": usage.ru_maxrss / 2**20,
        "mesh": f"{plan.mesh}, {plan.num_microbatches} mb, {plan.schedule.value}",
        "time_s": plan.time_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "model_gap": plan.model_gap,
        "opened": f"{stats.num_ranked}/{stats.num_shapes}",
        "stopped_by": stats.stopped_by,
    }
    if plan.pipelines:
        found["mesh"] = f"{len(plan.pipelines)} pipelines"
    if replans and len(cluster.machines) > 1:
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        again = replan(planner, plan, change_of(cluster, lost=(len(cluster.machines) - 1,)))
        found["replan_s"] = time.monotonic() - begin_s
        found["replan_cpu_s"] = time.process_time() - begin_cpu_s
        found["replan_step_s"] = again.plan.time_s
    return found


def _in_child(name: str, *, replans: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.plan_time", "--child", name]
    command += ["--replan"] if replans else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"error": done.returncode}
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How long planning takes.")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--child", choices=list(ROWS), help="plan one row here, print JSON")
    parser.add_argument("--save", default="", help="with --child: keep the solver's input here")
    parser.add_argument(
        "--verbose", action="store_true", help="with --child: the search's progress"
    )
    parser.add_argument(
        "--replan", action="store_true", help="plan again after the last machine was lost"
    )
    given = parser.parse_args()
    if given.child:
        found = measure(
            ROWS[given.child], save=given.save, verbose=given.verbose, replans=given.replan
        )
        sys.stdout.write(json.dumps(found) + "\n")
        return
    table = Table("row", "nodes", *PHASES, "total s", "cpu s", "GiB", "plan", "step s", "bound s")
    for heading in ("gap", "model gap", "opened", "stopped", "replan s", "cpu s"):
        table.add_column(heading)
    for name in given.rows:
        found = _in_child(name, replans=given.replan)
        if "error" in found:
            table.add_row(name, f"failed: {found['error']}")
            continue
        table.add_row(
            name, str(found["nodes"]), *(f"{found['phases'].get(p, 0.0):.1f}" for p in PHASES),
            f"{found['total_s']:.1f}", f"{found['cpu_s']:.1f}", f"{found['rss_gib']:.2f}",
            found["mesh"], f"{found['time_s']:.3f}", f"{found['bound_s']:.3f}",
            f"{found['gap']:.1%}", f"{found['model_gap']:.2%}", found["opened"],
            found["stopped_by"] or "-",
            *(f"{found[p]:.1f}" if p in found else "-" for p in ("replan_s", "replan_cpu_s")),
        )  # fmt: skip
        sys.stderr.write(json.dumps({"row": name, **found}) + "\n")
    Console(width=240).print(table)


if __name__ == "__main__":
    main()
