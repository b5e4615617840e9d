"""Chosen plans beside published ones: ``python -m tests.bench.published_plans --data FILE``.

For every training run of a file in the form that ``cost_models.validate`` reads, the published
plan is forced and a free search is run, on the same captured model, cluster, prices and simulator.
Two ratios are printed, each of chosen over published predicted time: that of the search alone, and
that of the search with the published plans as hints (:mod:`autopar.solver.hints`), which must not
exceed 1 where the published plan fits. ``--source`` chooses sources (several times; the default is
SC'21 table 1, Korthikanti et al. table 5 and torchtitan), ``--only`` runs by their names. Models
are those of transformers (GPT-2 and Llama) at the published sizes, on meta; small ones come first,
every row is printed when it is known, and how far things are goes to the standard error. All runs
of one model, machine and batch share a capture, an analysis and the free search.

At the end: for each source how many runs there were and the worst ratios; and for all sweeps of the
file (same model, devices and batch, several plans measured) what choosing by prediction loses, as
``cost_models.validate`` finds it.

What the solver's space does not have is said, never guessed: context parallelism is skipped;
float8 runs are priced in bf16 and asynchronous tensor parallelism as the synchronous one, on both
sides. The published plan is priced without a limit of memory; where it exceeds the machine's,
within that, and marked if it can't be.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from autopar.capture.tracing import Captured, capture
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InfeasibleError
from autopar.plan.types import Plan, ScheduleKind
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints
from autopar.solver.hints import with_hints
from autopar.solver.search import solve
from autopar.units import format_bytes, format_time
from autopar.validation.engine import summaries, validate
from autopar.validation.errors import SkipRecord
from autopar.validation.hardware import cluster_of
from autopar.validation.records import Kind, Layout, Recompute, Record, Shape, read_records
from cost_models.analytic import AnalyticCostModel

SOURCES = ("sc21-t1", "korthikanti-t5", "torchtitan")
UNLIMITED_BYTES = 1 << 50
SHOWN_EACH = 50  # predicted runs of sweeps
PARTS = ("plans", "sweeps")
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
        fits: Whether that is within the limit of the machine.
        searched: The plan of the free search.
        chosen: The plan of the free search with hints.
    """

    record: Record
    published: Plan
    fits: bool
    searched: Plan
    chosen: Plan

    @property
    def search_ratio(self) -> float:
        """Predicted time of the search's plan over that of the published one."""
        return self.searched.time_s / self.published.time_s

    @property
    def ratio(self) -> float:
        """The same with hints."""
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
            activation_function="gelu_pytorch_tanh",  # one operator, as in Megatron
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


@dataclass(slots=True)
class _Solver:
    """Solves one captured model on one cluster; all its searches share what they find out."""

    captured: Captured
    cluster: Cluster
    progress: Callable[[str], None]
    model: AnalyticCostModel = field(init=False)
    analysis: Analysis = field(init=False)

    def __post_init__(self) -> None:
        self.model = AnalyticCostModel(self.cluster)
        self.analysis = Analysis(
            self.captured.graph, self.cluster, self.model, Constraints(), "adamw"
        )

    def __call__(self, wish: Constraints, limit: int | None = None) -> Plan:
        """The best plan under constraints and a limit of memory."""
        plan, _ = solve(
            self.captured.graph,
            self.captured.hash,
            self.cluster,
            constraints=wish,
            optimizer="adamw",
            memory_limit_bytes=limit,
            cost_model=self.model,
            analysis=self.analysis.under(wish),
            progress=self.progress,
        )
        return plan


def _captured(record: Record) -> Captured:
    layout = record.layout
    ids = torch.zeros((layout.gbs, record.shape.seq), dtype=torch.long, device="meta")
    precision = "fp16" if "fp16" in layout.precision else "bf16"
    inputs = {"input_ids": ids, "labels": ids}
    return capture(model_of(record.shape), kwargs=inputs, precision=precision)


def compared(records: Iterable[Record], told: Callable[[str], None]) -> Iterator[Compared]:
    """Published and chosen plans; runs of one model, machine and batch share the free search.

    Args:
        records: The runs.
        told: Called with lines of text.
    """
    problems: dict[str, list[Record]] = {}
    for record in sorted(records, key=_size):
        problems.setdefault(_question(record), []).append(record)
    for key, rows in problems.items():
        wishes = {}
        for record in rows:
            try:
                wishes[record.name] = published_constraints(record.layout)
            except SkipRecord as reason:
                told(f"{record.name}: skipped, {reason}")
        if wishes:
            yield from _problem(key, [r for r in rows if r.name in wishes], wishes, told)


def _problem(
    key: str, rows: list[Record], wishes: dict[str, Constraints], told: Callable[[str], None]
) -> Iterator[Compared]:
    begin_s = time.process_time()
    captured, cluster = _captured(rows[0]), cluster_of(rows[0].machine)
    capture_s = time.process_time() - begin_s
    began_s = time.process_time()

    def progress(line: str) -> None:
        sys.stderr.write(f"{time.process_time() - began_s:7.1f} {line}\n")

    solved, limit = _Solver(captured, cluster, progress), cluster.memory_bytes
    begin_s = time.process_time()
    searched = solved(Constraints())
    told(
        f"{key}: capture {capture_s:.0f} s, search {time.process_time() - begin_s:.0f} processor "
        f"seconds, {format_time(searched.time_s)}, gap {searched.gap:.1%}"
    )
    begin_s = time.process_time()
    forced: dict[str, Plan] = {}
    for record in rows:
        wish = wishes[record.name]
        try:
            if str(wish) not in forced:
                forced[str(wish)] = _forced(solved, wish, limit)
        except AutoparError as error:
            told(f"{record.name}: skipped, {error}")
            continue
        published = forced[str(wish)]
        fits = published.peak_bytes <= limit
        chosen = searched
        if fits:  # under a limit that it meets the search for it ends no later
            chosen = with_hints(searched, Constraints(), [wish], lambda _, p=published: p)
        yield Compared(record, published, fits, searched, chosen)
    told(f"{key}: published plans, {time.process_time() - begin_s:.0f} processor seconds")


def _forced(solved: _Solver, wish: Constraints, limit_bytes: int) -> Plan:
    """The plan of a wish: without a limit, but within the machine's where that can be."""
    free = solved(wish, UNLIMITED_BYTES)
    if free.peak_bytes <= limit_bytes:
        return free
    try:
        return solved(wish)
    except InfeasibleError:
        return free


def _size(record: Record) -> tuple[float, int, str]:
    shape = record.shape
    return shape.layers * shape.hidden**2, record.machine.num_gpus, record.name


def _question(record: Record) -> str:
    shape, machine = record.shape, record.machine
    return (
        f"{shape.arch} {shape.layers} x {shape.hidden}, {machine.num_gpus} {machine.gpu}, "
        f"batch {record.layout.gbs} x {shape.seq}"
    )


def line_of(row: Compared) -> str:
    """One row for the eye."""
    old, new = row.published, row.chosen
    mark = "" if row.fits else ", too much"
    return (
        f"{row.record.name}: published {old.mesh} x {old.num_microbatches} "
        f"{format_time(old.time_s)} ({format_bytes(old.peak_bytes)}{mark}); chosen {new.mesh} x "
        f"{new.num_microbatches} {new.schedule} {format_time(new.time_s)} "
        f"({format_bytes(new.peak_bytes)}); ratio {row.search_ratio:.4f}, with hints "
        f"{row.ratio:.4f}"
    )


def table_of(rows: Iterable[Compared]) -> Table:
    """Ratios by source."""
    table = Table(title="chosen over published predicted time")
    for name in ("source", "runs", "mean", "worst", "above 1", "worst with hints", "too much"):
        table.add_column(name)
    by_source: dict[str, list[Compared]] = {}
    for row in rows:
        by_source.setdefault(row.record.source, []).append(row)
    for source, own in by_source.items():
        ratios = [row.search_ratio for row in own]
        table.add_row(
            source, str(len(own)), f"{fmean(ratios):.3f}", f"{max(ratios):.4f}",
            str(sum(ratio > 1 + 1e-9 for ratio in ratios)),
            f"{max(row.ratio for row in own):.4f}", str(sum(not row.fits for row in own)),
        )  # fmt: skip
    return table


def sweeps_of(data: Path) -> Table:
    """What choosing among measured plans by prediction loses, by source."""
    table = Table(title="sweeps with measurements: regret of the plan predicted fastest")
    for name in ("source", "sweeps", "runs", "mean regret", "worst regret"):
        table.add_column(name)
    began_s = time.process_time()

    def progress(done: int, total: int) -> None:
        if done % SHOWN_EACH == 0 or done == total:
            spent_s = time.process_time() - began_s
            sys.stderr.write(f"{spent_s:7.1f} predicted {done} of {total} runs\n")

    outcomes, skipped = validate(data, progress=progress)
    everything = []
    for one in summaries(outcomes, skipped):
        regrets = [group.regret for group in one.groups]
        everything += regrets
        if regrets:
            table.add_row(
                one.source, str(len(regrets)), str(sum(g.count for g in one.groups)),
                f"{fmean(regrets):.1%}", f"{max(regrets):.1%}",
            )  # fmt: skip
    if everything:
        words = (f"{fmean(everything):.1%}", f"{max(everything):.1%}")
        table.add_row("all", str(len(everything)), "", *words)
    return table


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", action="append")
    parser.add_argument("--only", action="append", help="runs whose names fit a pattern")
    parser.add_argument("--limit", type=int, help="the first N runs of each source")
    parser.add_argument("--part", choices=PARTS, help="leave the other part out")
    options = parser.parse_args()
    console = Console(file=sys.stdout, width=180)
    if options.part != "sweeps":
        _plans(options, console)
    if options.part != "plans":
        console.print(sweeps_of(options.data))


def _plans(options: argparse.Namespace, console: Console) -> None:
    """Print the published plans beside the chosen ones."""
    records: list[Record] = []
    for source in options.source or SOURCES:
        every, _ = read_records(options.data, source=source)
        steps = [r for r in every if r.kind is Kind.STEP and not r.is_oom]
        patterns = options.only or ["*"]
        steps = [r for r in steps if any(fnmatchcase(r.name, p) for p in patterns)]
        records += steps[: options.limit]

    def told(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    rows: list[Compared] = []
    for row in compared(records, told):
        rows.append(row)
        told(line_of(row))
    console.print(table_of(rows))
    worse = [r for r in rows if r.search_ratio > 1 + 1e-9]
    told(
        f"{len(rows)} published plans, the search alone is slower than {len(worse)} of them"
        + "".join(f"; {r.record.name} {r.search_ratio:.4f}" for r in worse)
    )


if __name__ == "__main__":
    main()
