"""Does a plan compute what one device computes? The criterion, and the check in simulation.

Per tensor ``max|a - b| <= 1e-10 * max(max|b|, 1e-3 G)`` with ``b`` the reference and ``G`` the
largest gradient of the model: some true gradients are zero, and rounding must not count against
them. It is meant for the *promoted* program, in float64 throughout (:mod:`autopar.ir.promote`), on
both sides. Where the reference has NaN or an infinity, the plan must have the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.capture.reference import run_graph, whole_parameters
from autopar.errors import EquivalenceError
from autopar.ir.graph import Graph, InputKind, OutputKind
from autopar.plan.actions import Action
from autopar.plan.types import MeshShape
from autopar.runtime.simulate import SimulatedStep, doubles, simulate_step
from autopar.sharding.programs import LocalPrograms

TOLERANCE = 1e-10
SCALE_FLOOR_FRACTION = 1e-3
"""Share of the largest gradient below which a tensor's own size no longer sets its tolerance."""
SGD_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Gap:
    """One compared tensor.

    Attributes:
        name: Such as ``"gradient of lm_head.weight"``.
        error: ``max|a - b|``.
        allowed: What the criterion allows.
    """

    name: str
    error: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Error over what is allowed; at most 1 where the criterion holds."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.allowed if self.allowed > 0.0 else float("inf")

    def __str__(self) -> str:
        """Such as ``loss: 1.2e-15 of 3.4e-10 allowed``."""
        return f"{self.name}: {self.error:.3g} of {self.allowed:.3g} allowed"


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The outcome of a check that held.

    Attributes:
        gaps: Every compared tensor, worst first.
        step: The simulated step, if there was one.
    """

    gaps: tuple[Gap, ...]
    step: SimulatedStep | None = None

    @property
    def worst(self) -> Gap:
        """The tensor that is nearest to its limit."""
        return self.gaps[0]


def compare(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    largest_gradient: float,
    tolerance: float = TOLERANCE,
) -> tuple[Gap, ...]:
    """Measure every expected tensor against the found one, worst first.

    Args:
        found: The plan's tensors by name.
        expected: The reference's.
        largest_gradient: ``G``, the largest absolute element of any reference gradient.
        tolerance: The factor of the criterion.

    Raises:
        EquivalenceError: A tensor is missing or has another shape.
    """
    gaps = []
    for name, b in expected.items():
        if name not in found:
            raise EquivalenceError(f"the plan yields no {name}; one device yields {tuple(b.shape)}")
        a = found[name]
        if a.shape != b.shape:
            raise EquivalenceError(
                f"{name} has shape {tuple(a.shape)} under the plan, {tuple(b.shape)} on one device"
            )
        scale = max(_largest(b), SCALE_FLOOR_FRACTION * largest_gradient)
        gaps.append(Gap(name, _difference(a, b), tolerance * scale))
    return tuple(sorted(gaps, key=lambda gap: -gap.ratio))


def check_equal(gaps: Sequence[Gap]) -> None:
    """Raise unless every tensor meets the criterion.

    Raises:
        EquivalenceError: Names the worst tensor with both numbers, and how many failed.
    """
    failed = [gap for gap in gaps if gap.ratio > 1.0]
    if failed:
        worst = failed[0]
        others = ", ".join(gap.name for gap in failed[1:6])
        also = f"; also {others}" if others else ""
        raise EquivalenceError(
            f"{worst.name} differs from one device by {worst.error:.6g}, allowed is "
            f"{worst.allowed:.6g} ({len(failed)} of {len(gaps)} tensors differ{also})"
        )


def largest_gradient(gradients: Mapping[str, torch.Tensor]) -> float:
    """Largest finite absolute element of all gradients; 0.0 without any."""
    return max(map(_largest, gradients.values()), default=0.0)


def verify_programs(
    graph: Graph,
    programs: LocalPrograms,
    mesh: MeshShape,
    actions: Sequence[Sequence[Action]],
    values: Mapping[str, torch.Tensor],
    *,
    tolerance: float = TOLERANCE,
) -> Equivalence:
    """Run a step on one device and on simulated ranks, and compare everything that a user sees.

    Compared are losses, gathered outputs, buffers, gradients, and weights after one step of plain
    gradient descent.

    Args:
        graph: The joint graph, promoted to float64.
        programs: Its local form under the plan.
        mesh: Ranks per axis.
        actions: Per pipeline rank, its action list.
        values: A tensor for every input of ``graph`` by input name.
        tolerance: The factor of the criterion.

    Raises:
        EquivalenceError: Names the worst tensor with both numbers.
        DeadlockError: The ranks can't run the programs.
    """
    reference = run_graph(graph, values)
    inputs = _by_target(graph, values)
    keys = inputs[InputKind.RNG]
    step = simulate_step(
        programs,
        mesh,
        actions,
        params=inputs[InputKind.PARAM],
        buffers=inputs[InputKind.BUFFER],
        inputs=inputs[InputKind.USER],
        constants=inputs[InputKind.CONSTANT],
        rng_key=next(iter(keys.values()), None),
        loss_tangent=_loss_tangent(graph, inputs[InputKind.TANGENT]),
        tangents=inputs[InputKind.TANGENT],
        # replicas are held to the same criterion: their common value is compared below
        replica_tolerance=max(tolerance, 1e-12),
    )
    expected, grads = _reference_tensors(reference, inputs[InputKind.PARAM])
    found = {f"loss {path}": value for path, value in step.losses.items()}
    found |= {f"output {path}": value for path, value in step.outputs.items()}
    found |= {f"buffer {name}": value for name, value in step.buffers.items()}
    found |= {f"gradient of {name}": value for name, value in step.grads.items()}
    found |= _after_descent(inputs[InputKind.PARAM], step.grads)
    wanted = {
        name: value
        for name, value in expected.items()
        if not name.startswith("output ") or name in found  # others were not asked for
    }
    gaps = compare(found, wanted, largest_gradient=largest_gradient(grads), tolerance=tolerance)
    check_equal(gaps)
    return Equivalence(gaps, step)


def _by_target(
    graph: Graph, values: Mapping[str, torch.Tensor]
) -> dict[InputKind, dict[str, torch.Tensor]]:
    table: dict[InputKind, dict[str, torch.Tensor]] = {kind: {} for kind in InputKind}
    for item in graph.inputs:
        table[item.kind][item.target] = values[item.name]
    table[InputKind.PARAM] = whole_parameters(graph, values)
    return table


def _loss_tangent(graph: Graph, tangents: Mapping[str, torch.Tensor]) -> torch.Tensor | float:
    losses = [o.target for o in graph.outputs_of(OutputKind.LOSS)]
    return next((tangents[path] for path in losses if path in tangents), 1.0)


def _reference_tensors(
    reference: Mapping[str, torch.Tensor], params: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    words = {"loss": "loss", "output": "output", "mutation": "buffer", "grad": "gradient of"}
    tensors, grads = {}, {}
    for key, value in reference.items():
        kind, _, target = key.partition(":")
        tensors[f"{words[kind]} {target}"] = value
        if kind == OutputKind.GRAD:
            grads[target] = value
    return tensors | _after_descent(params, grads), grads


def _after_descent(
    params: Mapping[str, torch.Tensor], grads: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {f"weight {name} after a step": params[name] - SGD_RATE * g for name, g in grads.items()}


def _largest(tensor: torch.Tensor) -> float:
    if tensor.numel() == 0:
        return 0.0
    return float(doubles(tensor).nan_to_num(0.0, 0.0, 0.0).abs().max())


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """``max|a - b|``; infinite where only one side is not finite, or the infinities differ."""
    if a.numel() == 0:
        return 0.0
    a, b = doubles(a), doubles(b)
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs())
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
