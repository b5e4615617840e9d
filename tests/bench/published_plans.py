"""Chosen plans beside published ones: ``python -m tests.bench.published_plans --data FILE``.

For every training run of a file in the form that ``cost_models.validate`` reads, the published
plan is forced and a free search is run, on the same captured model, cluster, prices and simulator:
the printed ratio is chosen over published predicted time, and must not exceed 1. ``--source``
chooses sources (several times; the default is SC'21 table 1, Korthikanti et al. table 5 and
torchtitan). Models are those of transformers (GPT-2 and Llama) at the published sizes, on meta.

What the solver's space does not have is said, never guessed: context parallelism is skipped;
float8 runs are priced in bf16 and asynchronous tensor parallelism as the synchronous one, on both
sides. The published plan is priced without a limit of memory, and marked where it exceeds it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from autopar.capture.tracing import Captured, capture
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan.types import Plan, ScheduleKind
from autopar.solver.constraints import Constraints
from autopar.solver.search import solve
from autopar.units import format_bytes, format_time
from autopar.validation.errors import SkipRecord
from autopar.validation.hardware import cluster_of
from autopar.validation.records import Kind, Layout, Recompute, Record, Shape, read_records
from cost_models.analytic import AnalyticCostModel

SOURCES = ("sc21-t1", "korthikanti-t5", "torchtitan")
UNLIMITED_BYTES = 1 << 50
WORDS = {
    Recompute.NONE: "none",
    Recompute.FULL: "full",
    Recompute.CORE: "selective",
    Recompute.PER_OPERATOR: "selective",
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One published plan and the chosen one.

    Attributes:
        record: The run.
        published: Its plan, forced.
        chosen: The plan of the free search.
    """

    record: Record
    published: Plan
    chosen: Plan

    @property
    def ratio(self) -> float:
        """Chosen over published predicted time."""
        return self.chosen.time_s / self.published.time_s


def model_of(shape: Shape) -> nn.Module:
    """The model of transformers with these sizes, on meta.

    Raises:
        SkipRecord: The architecture is another.
    """
    config: PretrainedConfig
    if shape.arch == "gpt":
        config = GPT2Config(
            vocab_size=shape.vocab, n_positions=shape.seq, n_embd=shape.hidden,
            n_layer=shape.layers, n_head=shape.heads, n_inner=shape.ffn, use_cache=False,
        )  # fmt: skip
    elif shape.arch == "llama":
        config = LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, max_position_embeddings=shape.seq, use_cache=False,
        )  # fmt: skip
    else:
        raise SkipRecord(f"model.arch is {shape.arch!r}; built here are gpt and llama")
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def published_constraints(layout: Layout) -> Constraints:
    """The published plan as constraints.

    Raises:
        SkipRecord: The solver's space has no such plan.
    """
    if layout.cp > 1:
        raise SkipRecord(f"parallel.cp is {layout.cp}; there is no context-parallel axis")
    if layout.recompute not in WORDS:
        raise SkipRecord(f"parallel.recompute is {layout.recompute}; it has no word here")
    if len(set(layout.tp)) > 1 or len(set(layout.dp)) > 1:
        raise SkipRecord("stages have different tp or dp")
    if not layout.pp > 1:
        schedule = None
    elif layout.virtual > 1:
        schedule = ScheduleKind.INTERLEAVED
    else:
        schedule = ScheduleKind.ONE_F_ONE_B
    return Constraints(
        dp=layout.dp[0],
        tp=layout.tp[0],
        pp=layout.pp,
        virtual=layout.virtual,
        num_microbatches=layout.microbatches,
        schedule=schedule,
        zero=layout.zero,
        recompute=WORDS[layout.recompute],
        sequence_parallel=layout.sequence_parallel if layout.tp[0] > 1 else None,
    )


def _solved(captured: Captured, cluster: Cluster, wish: Constraints, limit: int | None) -> Plan:
    plan, _ = solve(
        captured.graph,
        captured.hash,
        cluster,
        constraints=wish,
        optimizer="adamw",
        memory_limit_bytes=limit,
        cost_model=AnalyticCostModel(cluster),
    )
    return plan


def _captured(record: Record) -> Captured:
    layout = record.layout
    ids = torch.zeros((layout.gbs, record.shape.seq), dtype=torch.long, device="meta")
    precision = "fp16" if "fp16" in layout.precision else "bf16"
    inputs = {"input_ids": ids, "labels": ids}
    return capture(model_of(record.shape), kwargs=inputs, precision=precision)


def compared(records: Iterable[Record], console: Console) -> list[Compared]:
    """Published and chosen plans; runs of one model, machine and batch share the free search."""
    found: list[Compared] = []
    for key, group in groupby(sorted(records, key=_question), key=_question):
        rows = list(group)
        wishes = {}
        for record in rows:
            try:
                wishes[record.name] = published_constraints(record.layout)
            except SkipRecord as reason:
                console.print(f"{record.name}: skipped, {reason}", highlight=False)
        if not wishes:
            continue
        begin_s = time.monotonic()
        captured = _captured(rows[0])
        cluster = cluster_of(rows[0].machine)
        capture_s = time.monotonic() - begin_s
        chosen = _solved(captured, cluster, Constraints(), None)
        console.print(
            f"{key}: capture {capture_s:.0f} s, search "
            f"{time.monotonic() - begin_s - capture_s:.0f} s",
            highlight=False,
        )
        forced: dict[str, Plan] = {}
        for record in rows:
            wish = wishes.get(record.name)
            if wish is None:
                continue
            try:
                if str(wish) not in forced:
                    forced[str(wish)] = _solved(captured, cluster, wish, UNLIMITED_BYTES)
            except AutoparError as error:
                console.print(f"{record.name}: skipped, {error}", highlight=False)
                continue
            found.append(Compared(record, forced[str(wish)], chosen))
    return found


def _question(record: Record) -> str:
    shape, machine = record.shape, record.machine
    return (
        f"{shape.arch} {shape.layers} x {shape.hidden}, {machine.num_gpus} {machine.gpu}, "
        f"batch {record.layout.gbs} x {shape.seq}"
    )


def table_of(rows: Iterable[Compared], memory_limits: dict[str, int]) -> Table:
    """One line per published plan."""
    table = Table(title="chosen plans beside published ones")
    for name in ("run", "published", "time", "peak", "chosen", "time", "peak", "ratio"):
        table.add_column(name)
    for row in rows:
        old, new = row.published, row.chosen
        limit = memory_limits[row.record.name]
        mark = " (too much)" if old.peak_bytes > limit else ""
        table.add_row(
            row.record.name, f"{old.mesh} x {old.num_microbatches}", format_time(old.time_s),
            format_bytes(old.peak_bytes) + mark, f"{new.mesh} x {new.num_microbatches}",
            format_time(new.time_s), format_bytes(new.peak_bytes), f"{row.ratio:.3f}",
        )  # fmt: skip
    return table


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", action="append")
    parser.add_argument("--limit", type=int, help="the first N runs of each source")
    options = parser.parse_args()
    records: list[Record] = []
    for source in options.source or SOURCES:
        every, _ = read_records(options.data, source=source)
        steps = [r for r in every if r.kind is Kind.STEP and not r.is_oom]
        records += steps[: options.limit]
    console = Console(file=sys.stdout, width=180)
    rows = compared(records, console)
    limits = {r.record.name: cluster_of(r.record.machine).memory_bytes for r in rows}
    console.print(table_of(rows, limits))
    worse = [r for r in rows if r.ratio > 1 + 1e-9]
    console.print(
        f"{len(rows)} published plans, the chosen one is slower than {len(worse)} of them"
        + "".join(f"; {r.record.name} {r.ratio:.3f}" for r in worse),
        highlight=False,
    )


if __name__ == "__main__":
    main()
