"""``autopar.verify``: does a plan compute what one device computes?

Two comparisons, so that a fault of capture is not on both sides. The captured program against the
model itself, in the model's own dtypes; and the plan on simulated ranks against the captured
program, both in float64 throughout, where any difference over rounding is a fault.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch

from autopar.api.arguments import check_module, chosen_mode, precision_of
from autopar.api.compiling import Devices, LossFunction, capture_call, make_plan
from autopar.api.options import ConstraintOptions, user_constraints
from autopar.capture.calls import ModelCall
from autopar.capture.reference import bind_inputs, gradients, run_graph
from autopar.capture.structure import flatten
from autopar.capture.torch_ops import torch_dtype
from autopar.capture.tracing import Captured
from autopar.errors import ConfigError, EquivalenceError, InputError
from autopar.ir.graph import InputKind
from autopar.ir.precision_rules import PRECISIONS
from autopar.ir.promote import promote
from autopar.plan.decisions import decisions_of
from autopar.plan.io import load_plan, plan_hash
from autopar.plan.types import Plan
from autopar.runtime.equivalence import (
    Gap,
    check_equal,
    compare,
    largest_gradient,
    verify_programs,
)
from autopar.runtime.materialise import InitialValues, find_tensors
from autopar.runtime.module import is_compiled
from autopar.runtime.session import LOSS_BATCH, RunOptions, gathered, step_key
from autopar.runtime.start import check_model
from autopar.runtime.variants import schedule_actions
from autopar.sharding.build import localize, signatures_of

_EAGER_TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
"""Rounding of a training step in each dtype, relative to the largest element of a tensor."""


_HALVES = (torch.float16, torch.bfloat16)
_TIMES_AUTOCAST = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Both comparisons, each by its worst tensor.

    Attributes:
        plan_hash: Of the plan that was checked.
        mesh: Its mesh in words.
        num_ranks: Simulated ranks.
        num_tensors: Tensors compared between plan and program.
        plan_worst: The tensor of the plan that is nearest to its limit.
        plan_error: Its largest difference from one device, in float64.
        plan_allowed: What the criterion allows for it.
        eager_worst: The tensor of the captured program nearest to its limit; "" if not compared.
        eager_error: Its largest difference from the model itself.
        eager_allowed: What is allowed for it.
        note: Why the second comparison was left out, or "".
    """

    plan_hash: str
    mesh: str
    num_ranks: int
    num_tensors: int
    plan_worst: str
    plan_error: float
    plan_allowed: float
    eager_worst: str = ""
    eager_error: float = 0.0
    eager_allowed: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        """Two or three lines for people."""
        lines = [
            f"plan {self.plan_hash[:12]} ({self.mesh}): {self.num_tensors} tensors equal one "
            f"device on {self.num_ranks} simulated ranks",
            f"  worst against the program, float64: {self.plan_worst} differs by "
            f"{self.plan_error:.3g}, allowed is {self.plan_allowed:.3g}",
        ]
        if self.eager_worst:
            lines.append(
                f"  worst of the program against the model: {self.eager_worst} differs by "
                f"{self.eager_error:.3g}, allowed is {self.eager_allowed:.3g}"
            )
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)


def verify(  # noqa: PLR0913
    model: torch.nn.Module,
    plan: Plan | Devices,
    inputs: object,
    *,
    args: Sequence[object] | None = None,
    loss: LossFunction | None = None,
    memory_limit: int | str | None = None,
    seed: int = 0,
    mode: str | None = None,
    precision: str | None = None,
    **constraints: Unpack[ConstraintOptions],
) -> VerifyReport:
    """Check a plan's numbers against one device, in this process.

    The model is left as it is. It is held in float64, and so are the parts of all ranks: meant for
    models that fit here several times.

    Args:
        model: Not compiled; on the meta device its weights are drawn as by :func:`autopar.compile`.
        plan: A plan, the path of one (``.json``), or devices to plan for.
        inputs: One global batch with values, as in :func:`autopar.compile`.
        args: Positional arguments beside a dict.
        loss: As in :func:`autopar.compile`.
        memory_limit: For planning, if ``plan`` is devices.
        seed: Seed of dropout and of weights on the meta device.
        mode: As in :func:`autopar.compile`.
        precision: As in :func:`autopar.compile`; left out, that of the plan. The second comparison
            is with the model under ``torch.autocast`` then.
        constraints: For planning, if ``plan`` is devices: as in :func:`autopar.compile`.

    Raises:
        EquivalenceError: Names the worst tensor with both numbers.
        PlanError: The plan was made for another model or batch shape.
    """
    _check_model(model)
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        plan = load_plan(plan)  # a cluster file is given as a Cluster here
    given = plan if isinstance(plan, Plan) else None
    chosen, wanted = chosen_mode(mode, given), precision_of(precision, given)
    call, captured = capture_call(model, inputs, args, loss, mode=chosen, precision=wanted)
    empty = [path for path, tensor in call.tensors().items() if tensor.is_meta]
    if empty:
        raise InputError(
            f"verify: input {empty[0]!r} is on the meta device and has no values "
            f"({len(empty)} of {len(call.tensors())} inputs); give one batch of real tensors"
        )
    if not isinstance(plan, Plan):
        plan = make_plan(
            captured,
            plan,
            memory_limit=memory_limit,
            constraints=user_constraints(constraints),
            loss=loss,
        )
    check_model(plan, captured)
    if plan.microbatch_statistics:
        raise ConfigError(
            "verify: the plan takes batch statistics per micro-batch, which is another function of "
            "the batch than the model on one device; plan with microbatch_statistics=False"
        )
    real = _whole_copy(model, seed)
    found = _check_plan(real, call, captured, plan, seed)
    return _check_capture(real, call, captured, loss, found)


def _check_model(model: torch.nn.Module) -> None:
    check_module(model, of="verify: ")
    if is_compiled(model):
        raise ConfigError(
            f"verify: this {type(model).__name__} is compiled, and its parameters are one rank's; "
            "give a model that is not, built the same, with plan=model.plan"
        )


def _whole_copy(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A copy of the model with all its tensors real."""
    kept: dict[int, torch.Tensor] = {}
    for module in model.modules():  # what a forward left, with its history: torch won't copy that
        found = flatten(dict(module.__dict__))[1].values()
        kept |= {id(t): t.detach().clone() for t in found if not t.is_leaf}
    real = copy.deepcopy(model, kept)
    for parameters in (True, False):
        tensors = find_tensors(real, parameters=parameters)
        values = InitialValues(real, tensors, seed=seed, given=None, distributed=False)
        drawn = {n: values.whole(n) for n, tied in tensors.items() if tied.tensor.is_meta}
        for name, value in drawn.items():
            new = value
            if parameters:
                needs_grad = tensors[name].tensor.requires_grad
                new = torch.nn.Parameter(value, requires_grad=needs_grad)
            for slot in tensors[name].slots:
                slot.put(new)
    return real


def _check_plan(
    model: torch.nn.Module, call: ModelCall, captured: Captured, plan: Plan, seed: int
) -> VerifyReport:
    """The plan on simulated ranks against the program, promoted."""
    graph = promote(captured.graph)
    values = bind_inputs(
        captured, model, call.args(), call.kwargs(),
        batch=call.values.get(LOSS_BATCH), graph=graph, rng_key=step_key(seed, 1),
    )  # fmt: skip
    gather = gathered(captured, RunOptions(), backward=False)
    decisions = replace(decisions_of(plan, graph), gather_outputs=gather)
    local = localize(graph, decisions, signatures_of(graph))
    actions = schedule_actions(local, plan, backward=captured.training, has_loss=captured.has_loss)
    outcome = verify_programs(graph, local, plan.mesh, actions, values)
    worst = outcome.worst
    return VerifyReport(
        plan_hash=plan_hash(plan),
        mesh=str(plan.mesh),
        num_ranks=plan.mesh.num_ranks,
        num_tensors=len(outcome.gaps),
        plan_worst=worst.name,
        plan_error=worst.error,
        plan_allowed=worst.allowed,
    )


def _check_capture(
    model: torch.nn.Module,
    call: ModelCall,
    captured: Captured,
    loss: LossFunction | None,
    report: VerifyReport,
) -> VerifyReport:
    """The program against the model itself, in the model's own dtypes or under autocast."""
    if any(True for _ in captured.graph.of_kind(InputKind.RNG)):
        return replace(
            report,
            note="the program was not compared with the model, whose dropout draws other bits",
        )
    results = run_graph(
        captured.graph,
        bind_inputs(captured, model, call.args(), call.kwargs(), batch=call.values.get(LOSS_BATCH)),
    )
    found = {f"gradient of {name}": value for name, value in gradients(results).items()}
    found |= {k.replace(":", " ", 1): v for k, v in results.items() if not k.startswith("grad")}
    if captured.precision is None:
        expected = _known(_run_eagerly(model, call, captured, loss), found)
        dtypes = [p.dtype for p in model.parameters()] or [torch.float32]
        gaps = _gaps(found, expected, max(_EAGER_TOLERANCE.get(d, 1e-1) for d in dtypes))
    else:
        gaps = _precision_gaps(model, call, captured, loss, found)
    try:
        check_equal(gaps)
    except EquivalenceError as error:
        raise EquivalenceError(f"the captured program against the model itself: {error}") from None
    worst = gaps[0]
    return replace(
        report, eager_worst=worst.name, eager_error=worst.error, eager_allowed=worst.allowed
    )


def _known(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What is expected, outputs that the program does not yield left out."""
    return {n: v for n, v in expected.items() if n in found or not n.startswith("output")}


def _gaps(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> tuple[Gap, ...]:
    grads = {n: v for n, v in expected.items() if n.startswith("gradient")}
    return compare(found, expected, largest_gradient=largest_gradient(grads), tolerance=tolerance)


def _precision_gaps(
    model: torch.nn.Module,
    call: ModelCall,
    captured: Captured,
    loss: LossFunction | None,
    found: Mapping[str, torch.Tensor],
) -> tuple[Gap, ...]:
    """Both the program and the model under autocast against the model in float32.

    Rounding depends on the model (a unit near its kink flips): some times what torch's own autocast
    loses in its worst tensor is allowed in each.
    """
    single = copy.deepcopy(model).float()
    wide = call.with_tensors(lambda _, t: t.float() if t.dtype in _HALVES else t)
    try:
        eager = _run_eagerly(single, wide, captured, loss)
    except RuntimeError as error:
        raise ConfigError(
            f"verify(precision={captured.precision!r}) compares with the model in float32, where "
            f"{type(model).__name__} does not run ({error}): it casts to a dtype by itself; let it "
            "cast to the dtype of its weights, or verify it without precision="
        ) from error
    expected = _known(eager, found)
    assert captured.precision is not None
    dtype = torch_dtype(PRECISIONS[captured.precision])
    gaps = _gaps(found, expected, _EAGER_TOLERANCE[dtype])
    if dtype not in _HALVES:
        return gaps
    again = copy.deepcopy(model).float()
    with torch.autocast("cpu", dtype=dtype):
        rounded = _known(_run_eagerly(again, wide, captured, loss), found)
    noise = max(gap.ratio for gap in _gaps(rounded, expected, _EAGER_TOLERANCE[dtype]))
    return tuple(replace(gap, allowed=gap.allowed * (1 + _TIMES_AUTOCAST * noise)) for gap in gaps)


def _run_eagerly(
    model: torch.nn.Module, call: ModelCall, captured: Captured, loss: LossFunction | None
) -> dict[str, torch.Tensor]:
    """Losses, outputs, changed buffers and gradients of the model itself."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(captured.training):
        output = model(*call.args(), **call.kwargs())
        tensors = flatten(output)[1] if not isinstance(output, torch.Tensor) else {}
        if isinstance(output, torch.Tensor):
            tensors = {captured.loss_path or "output": output}
        expected: dict[str, torch.Tensor] = {}
        value = None
        if loss is not None:
            value = loss(output, call.batch())
            expected["loss loss"] = value.detach()
        elif captured.has_loss and captured.loss_path is not None:
            value = tensors[captured.loss_path]
            expected[f"loss {captured.loss_path}"] = value.detach()
        for path, tensor in tensors.items():
            if tensor is not value:
                expected[f"output {path}"] = tensor.detach()
        for name, buffer in model.named_buffers():
            old = before.get(name)  # a new one is a cache
            if old is not None and old.shape == buffer.shape and not torch.equal(old, buffer):
                expected[f"mutation {name}"] = buffer.detach()
        if not captured.training:
            return expected
        results = [t for t in tensors.values() if t.requires_grad] if value is None else [value]
        if not results:  # nothing in the result depends on a parameter
            return expected
        # given explicitly: torch makes none for complex results
        torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected[f"gradient of {name}"] = parameter.grad
    return expected
