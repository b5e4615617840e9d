"""Runs random models under random plans, and counts what was covered."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from autopar.errors import ConstraintError, ShardingError
from autopar.ir.graph import InputKind, Phase
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.sharding.decisions import Decisions
from autopar.sharding.signature import AxisStrategy
from tests.equivalence.harness import (
    Problem,
    fuzz_decisions,
    problem_of,
    simulate,
    worst_difference,
)
from tests.equivalence.model_generator import Model, PlanDraw

EAGER_TOLERANCE = 1e-10
"""Of the largest gradient; both sides are in double precision."""


@dataclass(frozen=True)
class Drawn:
    """A captured model and what one device computes."""

    model: Model
    problem: Problem
    reference: Mapping[str, torch.Tensor]

    @staticmethod
    def of(model: Model) -> Drawn:
        """Build, capture, promote and run on one device."""
        module, batch = model.build()
        problem = problem_of(module, batch)
        drawn = Drawn(model, problem, problem.reference())
        if not any(True for _ in problem.graph.of_kind(InputKind.RNG)):
            drawn.compare_with_eager(module, batch)
        return drawn

    def compare_with_eager(
        self, module: torch.nn.Module, batch: Mapping[str, torch.Tensor]
    ) -> None:
        """Check the captured program against the module itself, in double precision."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # what integers become
        try:
            module = copy.deepcopy(module).double()  # a batch norm writes to its buffers
            loss = module(
                **{k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            )
            loss.backward()
        finally:
            torch.set_default_dtype(before)
        expected = {"loss": loss.detach()} | {
            f"grad:{n}": p.grad for n, p in module.named_parameters() if p.grad is not None
        }
        found = {
            k if k.startswith("grad") else k.partition(":")[0]: v for k, v in self.reference.items()
        }
        largest = max(float(v.abs().max()) for v in expected.values())
        for name, want in expected.items():
            error = float((found[name] - want).abs().max())
            assert error <= EAGER_TOLERANCE * largest, (
                f"{name} of the captured program differs from the module's by {error:.3g}\n"
                f"{self.model.source}"
            )

    def num_operators(self) -> int:
        """Forward operators, at which stages may begin."""
        nodes = self.problem.graph.nodes
        return sum(n.phase is Phase.FORWARD and n.op != "getitem" for n in nodes)


@dataclass
class Tally:
    """What a run covered.

    Attributes:
        pairs: Models under plans that were compared.
        refusals: Refused plans by the text of the refusal, numbers and names left out.
        ops: How often each operator was run, over all pairs.
        split: How often each operator was split over an axis.
        blocks: Blocks of the models.
        axes: Pairs by the axes that they split.
    """

    pairs: int = 0
    refusals: Counter = field(default_factory=Counter)
    ops: Counter = field(default_factory=Counter)
    split: Counter = field(default_factory=Counter)
    blocks: Counter = field(default_factory=Counter)
    axes: Counter = field(default_factory=Counter)

    def add(self, drawn: Drawn, plan: PlanDraw, decisions: Decisions) -> None:
        """Count one pair."""
        self.pairs += 1
        self.blocks.update(drawn.model.blocks)
        for node in drawn.problem.graph.nodes:
            if node.op == "getitem":
                continue
            self.ops[node.op] += 1
            choices = [decisions.strategy(axis, node.name) for axis in decisions.axes]
            if any(isinstance(c, AxisStrategy) and not c.is_replicated for c in choices):
                self.split[node.op] += 1
        sizes = {
            "mb": plan.microbatches, "dp": plan.dp, "tp": plan.tp, "pp": plan.pp,
            "virtual": plan.virtual, "zero": plan.zero + 1, "recompute": 1 + bool(plan.recompute),
        }  # fmt: skip
        self.axes.update(name for name, size in sizes.items() if size > 1)

    def text(self) -> str:
        """Several lines for people."""
        share = sum(self.split.values()) / max(1, sum(self.ops.values()))
        never = sorted(op for op in self.ops if not self.split[op])
        lines = [
            f"{self.pairs} pairs of a model and a plan compared, "
            f"{sum(self.refusals.values())} plans refused",
            f"{share:.0%} of the operators were split over at least one axis",
            f"axes: {', '.join(f'{n} {c}' for n, c in self.axes.most_common())}",
            f"blocks: {', '.join(f'{n} {c}' for n, c in self.blocks.most_common())}",
            f"{len(self.ops)} operators (times run, times split):",
            *(f"  {op:45} {count:6} {self.split[op]:6}" for op, count in self.ops.most_common()),
            f"never split: {', '.join(never) or 'none'}",
            *(f"refused {count} times: {text}" for text, count in self.refusals.most_common()),
        ]
        return "\n".join(lines)


def reduced(plan: PlanDraw) -> PlanDraw | None:
    """The plan with fewer micro-batches, else with fewer data ranks; None if there is nothing."""
    if plan.microbatches > 1:
        return replace(plan, microbatches=1)
    if plan.dp > 1:
        other = replace(plan, dp=1)
        return other if other.ranks > 1 else replace(other, tp=2)
    return None


def refusal_kind(text: str) -> str:
    """A refusal without what is particular to one model."""
    text = re.sub(r"\(.*?\)", "(...)", text)
    text = re.sub(r"^[\w#]+: ", "", text)
    return re.sub(r"'[^']*'|%\w+|\d+|aten\.[\w.]+|autopar\.[\w.]+", "_", text)[:110]


def check_pair(drawn: Drawn, plan: PlanDraw, tally: Tally) -> PlanDraw:
    """Compare one pair; a refused plan is tried again with fewer micro-batches or data ranks.

    Raises:
        AssertionError: The plan gives other numbers than one device.
    """
    stages = min(plan.pp * plan.virtual, drawn.num_operators())
    if stages < plan.pp * plan.virtual:
        plan = replace(plan, pp=1, virtual=1, schedule="1f1b", tp=max(2, plan.tp))
        stages = 1
    while True:
        try:
            decisions = fuzz_decisions(
                drawn.problem,
                microbatches=plan.microbatches,
                dp=plan.dp,
                tp=plan.tp,
                stages=stages,
                seed=plan.seed,
                zero=plan.zero,
                recompute_share=plan.recompute,
            )
            break
        except (ConstraintError, ShardingError) as error:
            tally.refusals[refusal_kind(str(error))] += 1
            other = reduced(plan)
            if other is None:
                raise  # there is nothing left to refuse
            plan = other
    mesh = MeshShape(dp=plan.dp, tp=plan.tp, pp=plan.pp, virtual=plan.virtual)
    _, step = simulate(drawn.problem, decisions, mesh, ScheduleKind(plan.schedule))
    ratio, tensor = worst_difference(step, drawn.reference)
    assert ratio <= 1, (
        f"{tensor} differs by {ratio:.3g} times the allowance under {plan}\n"
        f"{drawn.model.source}\n{describe(decisions)}"
    )
    tally.add(drawn, plan, decisions)
    return plan


def describe(decisions: Decisions) -> str:
    """What is split how, one operator a line."""
    lines = [f"sizes {decisions.axis_sizes}, stages begin at {decisions.firsts}"]
    for axis, table in decisions.choices.items():
        lines += [f"{axis}: {name}: {choice}" for name, choice in table.items()]
    return "\n".join(lines)
