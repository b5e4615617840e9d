"""Seconds of recomputing under a cap of memory: ours against what others would keep.

``python -m tests.bench.recompute`` prints one table per model: a stage of a large Llama priced by
an H100's data sheet, and a small one that also runs on this CPU, where the peak is measured. All
sets of values are run by the same programs and priced by the same model, so that only the choice
differs. Caps are the peaks of the others' choices, and some between; ``-`` does not fit.

* ``full``: only what enters each layer is kept;
* ``every 2nd mm``: torchtitan's selective checkpointing by operator;
* ``partitioner``: the best of ten budgets of torch's min-cut;
* ``SAC MILP``: the best of ten budgets of torch's program for selective checkpointing, which is
  solved for each layer on the same prices; it needs pulp (``pip install pulp``).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import transformers

import autopar
from autopar.capture.tracing import Captured, capture
from autopar.cluster import Cluster, parse_devices
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.graph import Node
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.sharding.build import localize, signatures_of
from autopar.solver.constraints import Constraints
from autopar.solver.exact import Setting, exact_figures
from autopar.solver.force import forced_plan
from autopar.solver.search import solve
from autopar.units import format_bytes, format_time
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel
from tests.bench import recompute_rivals as rivals
from tests.bench.live_bytes import peak_allocated_bytes

CAPS_BETWEEN = 3
ONE_DEVICE = Constraints(dp=1, tp=1, pp=1, num_microbatches=1, zero=0)


@dataclass(frozen=True)
class Point:
    """A choice: its name, seconds beyond keeping everything, and peak bytes of the step."""

    name: str
    extra_s: float
    peak_bytes: int
    recompute: frozenset[str]


@dataclass(frozen=True)
class Bench:
    """A captured model with prices."""

    captured: Captured
    cluster: Cluster
    prices: CostModel
    base: Plan

    @staticmethod
    def of(captured: Captured, cluster: Cluster) -> Bench:
        prices = AnalyticCostModel(cluster)
        base = forced_plan(captured.graph, captured.hash, cluster=cluster, cost_model=prices)
        return Bench(captured, cluster, prices, base)

    def plan(self, recompute: frozenset[str]) -> Plan:
        """The plan on one device with other values kept."""
        stage = replace(self.base.stages[0], recompute=tuple(sorted(recompute)))
        return replace(self.base, stages=(stage,))

    def point(self, name: str, recompute: frozenset[str]) -> Point:
        seconds, peak = self._figures(self.plan(recompute))
        return Point(name, seconds - self._figures(self.base)[0], peak, recompute)

    def seconds(self, node: Node) -> float:
        """Seconds of an operator of the graph."""
        metas = self.captured.graph.metas()
        operands = [metas[name] for name in node.refs()]
        return self.prices.op_time_s(node.op, node.args, operands, node.meta)

    def _figures(self, plan: Plan) -> tuple[float, int]:
        graph = self.captured.graph
        programs = localize(graph, decisions_of(plan, graph), signatures_of(graph))
        setting = Setting(
            cluster=self.cluster, model=self.prices, mesh=plan.mesh, schedule=plan.schedule,
            num_microbatches=1, zero_levels=(0,), optimizer=plan.optimizer,
            optimizer_s_per_byte=0.0,
        )  # fmt: skip
        found = exact_figures(programs, setting)
        return found.stages[0].time.backward_s, found.peak_bytes

    def ours(self, cap_bytes: int) -> Point | None:
        """What the planner chooses under a cap; None if it finds that nothing fits."""
        try:
            plan, _ = solve(
                self.captured.graph, self.captured.hash, self.cluster, constraints=ONE_DEVICE,
                optimizer="adamw", memory_limit_bytes=cap_bytes, cost_model=self.prices,
            )  # fmt: skip
        except InfeasibleError:
            return None
        return self.point("ours", frozenset(plan.stages[0].recompute))


def others(bench: Bench) -> list[Point]:
    """Choices of the others that this graph has."""
    graph = bench.captured.graph
    found = [
        bench.point("full", rivals.full(graph)),
        bench.point("every 2nd mm", rivals.every_second_matmul(graph)),
    ]
    for budget, recompute in rivals.partitioned(graph):
        point = bench.point("partitioner", recompute)
        found.append(point)
        sys.stderr.write(f"  budget {budget}: {point.extra_s:.4e} s, {point.peak_bytes}\n")
    if has_sac_milp():
        choices = rivals.sac_milp(graph, bench.seconds)
        found += [bench.point("SAC MILP", recompute) for _, recompute in choices]
    return found


def has_sac_milp() -> bool:
    """Whether the solver that torch's program needs is installed."""
    return importlib.util.find_spec("pulp") is not None


def table(title: str, bench: Bench, measure: Callable[[Plan], int] | None = None) -> bool:
    """Print the table of a model; whether ours was never beaten and never above its cap."""
    found = others(bench)
    none = bench.point("none", frozenset())
    peaks = sorted({p.peak_bytes for p in found if p.peak_bytes <= none.peak_bytes})
    low, high = peaks[0], none.peak_bytes
    between = [low + (high - low) * i // (CAPS_BETWEEN + 1) for i in range(1, CAPS_BETWEEN + 1)]
    names = ("full", "every 2nd mm", "partitioner", *(("SAC MILP",) if has_sac_milp() else ()))
    _say(f"\n{title}: {format_bytes(high)} with everything kept")
    head = "measured" if measure else ""
    _say(f"{'cap':>12}" + "".join(f"{n:>15}" for n in ("ours", *names)) + f"{head:>12}  best")
    is_best = True
    for cap in sorted({*peaks, *between}, reverse=True):
        ours = bench.ours(cap)
        best = {n: _best([p for p in found if p.name == n], cap) for n in names}
        line = f"{format_bytes(cap):>12}{_cell(ours):>15}"
        line += "".join(f"{_cell(best[n]):>15}" for n in names)
        rival_s = min((p.extra_s for p in best.values() if p is not None), default=None)
        wins = rival_s is None or (ours is not None and ours.extra_s <= rival_s * (1 + 1e-9))
        if ours is not None and ours.peak_bytes > cap:
            wins = False
        if measure is not None and ours is not None:
            seen = measure(bench.plan(ours.recompute))
            wins = wins and seen <= cap
            line += f"{format_bytes(seen):>12}"
        else:
            line += f"{'':>12}"
        _say(line + ("  ours" if wins else "  NOT OURS"))
        is_best = is_best and wins
    return is_best


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _best(points: list[Point], cap: int) -> Point | None:
    return min((p for p in points if p.peak_bytes <= cap), key=lambda p: p.extra_s, default=None)


def _cell(point: Point | None) -> str:
    return "-" if point is None else format_time(point.extra_s) if point.extra_s > 0 else "0"


def llama(
    *, hidden: int, inner: int, heads: int, layers: int, vocab: int
) -> transformers.LlamaConfig:
    """A decoder without grouped heads: torch counts no arithmetic for those."""
    return transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip


def large() -> Bench:
    """Four layers of Llama-2-7B's shapes, 4 x 4096 tokens in bf16, on one H100."""
    config = llama(hidden=4096, inner=11008, heads=32, layers=4, vocab=512)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty((4, 4096), dtype=torch.int64)
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    return Bench.of(captured, parse_devices("1x1:h100-sxm"))


def small() -> tuple[Bench, Callable[[Plan], int]]:
    """Four narrow layers in float32 on this CPU, and what measures the peak of a plan."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        llama(hidden=128, inner=352, heads=4, layers=4, vocab=256)
    )
    ids = torch.randint(0, 256, (4, 256))
    batch: Mapping[str, torch.Tensor] = {"input_ids": ids, "labels": ids}
    bench = Bench.of(capture(model, (), dict(batch)), parse_devices("1:cpu"))
    lasting = sum(p.numel() * p.element_size() for p in model.parameters())
    # weights, and the optimizer's two moments that the plan reserves; gradients are measured
    reserved = 3 * lasting

    def measure(plan: Plan) -> int:
        made = transformers.LlamaForCausalLM(model.config)
        made.load_state_dict(model.state_dict())
        made = autopar.compile(made, 1, dict(batch), plan=plan)

        def step() -> None:
            made(**batch).loss.backward()

        step()
        made.zero_grad()
        return reserved + peak_allocated_bytes(step)

    return bench, measure


def main() -> int:
    """Print both tables; 0 if ours was best at every cap."""
    torch.set_num_threads(1)
    if not has_sac_milp():
        _say("SAC MILP: torch.distributed._tools.sac_ilp needs pulp, which is not installed")
    bench, measure = small()
    is_best = table("four layers of width 128 on this CPU", bench, measure)
    is_best &= table("four layers of Llama-2-7B, 4 x 4096 tokens, on an H100", large())
    return 0 if is_best else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AutoparError as error:
        sys.exit(f"error: {error}")
