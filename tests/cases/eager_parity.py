"""A small model under a forced plan on simulated ranks, against eager torch in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping

import torch

from autopar.capture.reference import bind_inputs, run_graph
from autopar.capture.tracing import Captured, capture
from autopar.ir.graph import Graph, InputKind, OutputKind
from autopar.ir.promote import promote
from autopar.plan.decisions import decisions_of
from autopar.plan.types import MeshShape, Plan
from autopar.runtime.equivalence import check_equal, compare, largest_gradient, verify_programs
from autopar.runtime.simulate import SimulatedStep
from autopar.runtime.variants import schedule_actions
from autopar.sharding.build import localize, signatures_of
from autopar.solver.force import forced_plan
from tests.equivalence.harness import Problem, fuzz_decisions, simulate

Loss = Callable[[object, object], torch.Tensor]

PLANS: Mapping[str, Mapping[str, object]] = {
    "dp2": {"dp": 2},
    "mb4": {"num_microbatches": 4},
    "dp2 x mb2": {"dp": 2, "num_microbatches": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_microbatches": 4},
    "pp2 x dp2": {"pp": 2, "dp": 2, "num_microbatches": 2},
}
"""Plans by name, as arguments of :func:`simulated`; a batch of four divides into all of them."""


def doubled(kwargs: Mapping[str, object]) -> dict[str, object]:
    """Call arguments with floating-point tensors in float64."""
    return {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in kwargs.items()
    }


def problem_for(
    model: torch.nn.Module,
    kwargs: Mapping[str, object],
    *,
    loss: Loss | None = None,
    batch: object = None,
    rng_key: int = 7,
    tangents: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Captured, Problem]:
    """Capture and promote a call."""
    captured = capture(model, (), kwargs, loss=loss, batch=batch)
    graph = promote(captured.graph)
    values = bind_inputs(
        captured, model, (), kwargs, batch=batch, graph=graph, rng_key=rng_key, tangents=tangents
    )
    return captured, Problem(graph, signatures_of(graph), values, rng_key)


def plan_for(graph: Graph, **degrees: object) -> Plan:
    """A plan of these degrees."""
    return forced_plan(graph, "hash", **degrees)  # type: ignore[arg-type]


def step_of(
    problem: Problem,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    num_microbatches: int = 1,
    recompute: float = 0.0,
) -> SimulatedStep:
    """One step without a search: cuts, tensor splits and what is recomputed are drawn.

    Args:
        problem: The program and its values.
        dp: Ranks that split the batch.
        tp: Ranks that split operators.
        pp: Pipeline ranks, under 1F1B.
        num_microbatches: Per step.
        recompute: Share of the forward operators that are recomputed.
    """
    decisions = fuzz_decisions(
        problem, microbatches=num_microbatches, dp=dp, tp=tp, stages=pp, seed=0,
        recompute_share=recompute,
    )  # fmt: skip
    return simulate(problem, decisions, MeshShape(dp=dp, tp=tp, pp=pp))[1]


def verified(problem: Problem, plan: Plan, *, gather: Collection[str] = ()) -> SimulatedStep:
    """A step of a plan on simulated ranks that equals the program on one device.

    Args:
        problem: The program and its values; what it has for tangents is used.
        plan: The plan.
        gather: Outputs to return whole.
    """
    decisions = decisions_of(plan, problem.graph, gather_outputs=frozenset(gather))
    programs = localize(problem.graph, decisions, problem.signatures)
    backward = plan.mode == "train"
    has_loss = any(True for _ in problem.graph.outputs_of(OutputKind.LOSS))
    actions = schedule_actions(programs, plan, backward=backward, has_loss=has_loss)
    outcome = verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)
    assert outcome.step is not None
    return outcome.step


def found_in(step: SimulatedStep) -> dict[str, torch.Tensor]:
    """Losses and gradients of a simulated step by name."""
    found = {f"loss {path}": value for path, value in step.losses.items()}
    return found | {f"gradient of {name}": value for name, value in step.grads.items()}


def eager_step(
    model: torch.nn.Module,
    kwargs: Mapping[str, object],
    *,
    loss: Loss | None = None,
    batch: object = None,
    loss_name: str = "loss",
) -> dict[str, torch.Tensor]:
    """Loss and gradients of eager torch, by the names of :func:`found_in`, in float64."""
    twin = copy.deepcopy(model).double()
    output = twin(**doubled(kwargs))
    value = loss(output, batch) if loss is not None else output
    if isinstance(value, Mapping):
        value = value["loss"]
    value.backward()
    found = {f"loss {loss_name}": value.detach()}
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
    return found


def check_against_eager(
    model: torch.nn.Module, kwargs: Mapping[str, object], **degrees: object
) -> None:
    """Loss and gradients under a plan equal eager's, by the criterion of ``verify_programs``."""
    captured, problem = problem_for(model, kwargs)
    step = step_of(problem, **degrees)
    wanted = eager_step(model, kwargs, loss_name=captured.loss_path or "loss")
    check(found_in(step), wanted)


def check(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Every wanted tensor is there and equal to rounding."""
    grads = {n: v for n, v in wanted.items() if n.startswith("gradient")}
    check_equal(compare(found, wanted, largest_gradient=largest_gradient(grads)))


def reference_of(problem: Problem) -> dict[str, torch.Tensor]:
    """The captured program on one device, by the names of :func:`found_in`."""
    words = {"loss": "loss", "grad": "gradient of"}
    found = {}
    for key, value in run_graph(problem.graph, problem.values).items():
        kind, _, target = key.partition(":")
        if kind in words:
            found[f"{words[kind]} {target}"] = value
    return found


def has_randomness(problem: Problem) -> bool:
    """Whether the program draws random numbers."""
    return any(True for _ in problem.graph.of_kind(InputKind.RNG))
