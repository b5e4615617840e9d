"""Runs decisions on simulated ranks and compares the step with one device.

The graph is promoted to float64 on both sides, so that any difference over rounding is a fault.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture.reference import bind_inputs, run_graph, whole_parameters
from autopar.capture.tracing import capture
from autopar.ir.graph import Graph, InputKind, Node
from autopar.ir.promote import promote
from autopar.plan.orders import order_of, receives_ahead
from autopar.plan.schedule import action_lists
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.runtime.simulate import SimulatedStep, simulate_step
from autopar.sharding.build import localize, signatures_of
from autopar.sharding.decisions import Choice, Decisions
from autopar.sharding.placement import Placement, R, Routed, Shard
from autopar.sharding.programs import LocalPrograms
from autopar.sharding.propagate import split_data_axes
from autopar.sharding.signature import AxisStrategy, OpSignature, axis_strategies, parts_by_factor

RELATIVE_TOLERANCE = 1e-10
SMALL_GRADIENT = 1e-3


@dataclass(frozen=True)
class Problem:
    """A captured, promoted model with float64 values by input name."""

    graph: Graph
    signatures: Mapping[str, OpSignature | None]
    values: Mapping[str, torch.Tensor]
    rng_key: int

    def of_kind(self, kind: InputKind) -> dict[str, torch.Tensor]:
        """Values by target."""
        return {i.target: self.values[i.name] for i in self.graph.of_kind(kind)}

    def reference(self) -> dict[str, torch.Tensor]:
        """Results of one device."""
        return run_graph(self.graph, self.values)


def problem_of(
    model: torch.nn.Module,
    kwargs: Mapping[str, object],
    *,
    rng_key: int = 7,
    precision: str | None = None,
) -> Problem:
    """Capture and promote."""
    captured = capture(model, (), kwargs, precision=precision)
    graph = promote(captured.graph)
    values = bind_inputs(captured, model, (), kwargs, graph=graph, rng_key=rng_key)
    return Problem(graph, signatures_of(graph), values, rng_key)


def actions_for(
    programs: LocalPrograms,
    mesh: MeshShape,
    microbatches: int,
    kind: ScheduleKind,
    zero: Sequence[int],
    warmup: Sequence[int] | None = None,
) -> Sequence[Sequence[object]]:
    """The action lists of every pipeline rank."""
    tied = [(p.owner, s) for p in programs.params.values() for s in p.stages if s != p.owner]
    order = order_of(kind, mesh, microbatches, warmup)
    return action_lists(
        order,
        mesh,
        forward_edges=tuple(programs.forward_edges),
        backward_edges=tuple(programs.backward_edges),
        tied=tuple(dict.fromkeys(tied)),
        zero_levels=tuple(zero),
        prefetch=receives_ahead(warmup),
    )


def run(
    problem: Problem,
    programs: LocalPrograms,
    mesh: MeshShape,
    microbatches: int,
    kind: ScheduleKind,
    zero: Sequence[int] = (),
    warmup: Sequence[int] | None = None,
) -> SimulatedStep:
    """One step of all ranks."""
    return simulate_step(
        programs,
        mesh,
        actions_for(programs, mesh, microbatches, kind, zero or (0,) * mesh.num_stages, warmup),
        params=whole_parameters(problem.graph, problem.values),
        inputs=problem.of_kind(InputKind.USER),
        buffers=problem.of_kind(InputKind.BUFFER),
        constants=problem.of_kind(InputKind.CONSTANT),
        rng_key=torch.tensor(problem.rng_key),
    )


def simulate(
    problem: Problem,
    decisions: Decisions,
    mesh: MeshShape,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
) -> tuple[LocalPrograms, SimulatedStep]:
    """Localize and run one step of all ranks."""
    programs = localize(problem.graph, decisions, problem.signatures)
    count = decisions.axis_sizes[0]
    return programs, run(problem, programs, mesh, count, kind, decisions.zero_levels)


def worst_difference(
    step: SimulatedStep, reference: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Largest ratio of difference to allowance, and its tensor; below one is equal."""
    grads = {k: v for k, v in reference.items() if k.startswith("grad:")}
    largest = max((float(g.abs().max()) for g in grads.values() if g.numel()), default=0.0)
    found = {f"loss:{k}": v for k, v in step.losses.items()}
    found |= {f"grad:{k}": v for k, v in step.grads.items()}
    found |= {f"mutation:{k}": v for k, v in step.buffers.items()}
    worst = (0.0, "")
    for name, want in reference.items():
        if name.startswith("output:"):
            continue
        have = found[name]
        scale = max(float(want.abs().max()), SMALL_GRADIENT * largest)
        ratio = float((have.double() - want.double()).abs().max()) / (
            RELATIVE_TOLERANCE * scale or 1e-300
        )
        if not ratio <= worst[0]:
            worst = (ratio, name)
    return worst


def random_tp_choices(
    problem: Problem,
    data: Mapping[str, Mapping[str, Choice]],
    sizes: tuple[int, int, int],
    seed: int,
) -> dict[str, Choice]:
    """A random legal split of every operator and parameter over tp."""
    rng = random.Random(seed)
    tp = sizes[2]
    choices: dict[str, Choice] = {}
    for entry in problem.graph.of_kind(InputKind.PARAM):
        shape = entry.meta.shape if entry.meta else ()
        dims = [d for d, n in enumerate(shape) if n > (tp - 1) * -(-n // tp)]
        placement = rng.choice([R, *map(Shard, dims)])
        if placement != R:
            choices[entry.name] = placement
    made: dict[str, Placement] = {}
    for node in problem.graph.nodes:
        signature = problem.signatures.get(node.name)
        if node.op == "getitem":
            made[node.name] = made.get(f"{node.refs()[0]}#{node.args[1]}", R)
        if signature is None:
            continue
        others = [
            (choice, size)
            for axis, size in zip(("mb", "dp"), sizes[:2], strict=True)
            if isinstance(choice := data.get(axis, {}).get(node.name), AxisStrategy)
        ]
        divide = parts_by_factor(signature, others)
        lowered = {s.lowering for s, _ in others}
        options = [
            s
            for s in axis_strategies(signature, tp, divide=divide)
            if not s.lowering or not (lowered - {"", s.lowering})
            if s.factor != "microbatch_statistics"
            if not _moves_rows(made, node, s)
        ]
        choice = rng.choice(options)
        if not choice.is_replicated:
            choices[node.name] = choice
        for index, placement in enumerate(choice.outputs):
            made[f"{node.name}#{index}" if isinstance(node.meta, tuple) else node.name] = placement
    return choices


def _moves_rows(made: Mapping[str, Placement], node: Node, strategy: AxisStrategy) -> bool:
    """Whether an operand of sorted rows would have to change its layout, which none can."""
    return any(
        (have := made.get(ref, R)) != want and isinstance(have, Routed) | isinstance(want, Routed)
        for ref, want in zip(node.refs(), strategy.inputs, strict=True)
    )


def fuzz_decisions(
    problem: Problem,
    *,
    microbatches: int,
    dp: int,
    tp: int,
    stages: int,
    seed: int,
    zero: int | Sequence[int] = 0,
    recompute_share: float = 0.0,
    microbatch_statistics: bool = False,
) -> Decisions:
    """Data splits as propagated, everything else random.

    ``zero`` is the level of all stages, or of each.
    """
    rng = random.Random(seed)
    data = split_data_axes(
        problem.graph,
        problem.signatures,
        num_microbatches=microbatches,
        dp=dp,
        microbatch_statistics=microbatch_statistics,
    ).choices
    choices = dict(data)
    sizes = (microbatches, dp, tp)
    if tp > 1:
        choices["tp"] = random_tp_choices(problem, data, sizes, seed)
    forward = [n for n in problem.graph.nodes if n.phase == "forward" and n.op != "getitem"]
    starts = sorted(rng.sample(range(1, len(forward)), stages - 1))
    return Decisions(
        axis_sizes=sizes,
        choices=choices,
        firsts=tuple(forward[i].name for i in starts),
        recompute=frozenset(n.name for n in forward if rng.random() < recompute_share),
        zero_levels=(zero,) * stages if isinstance(zero, int) else tuple(zero),
    )
