"""Whether the optimizer that is really used fits where another one was priced."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch.optim.optimizer import Optimizer

from autopar.errors import ConfigError
from autopar.ir.graph import TensorMeta
from autopar.plan.types import Plan
from autopar.sharding.placement import local_shape
from autopar.sharding.programs import ParamSpec
from autopar.units import format_bytes
from cost_models.memory import optimizer_kind, optimizer_state_bytes
from cost_models.offload import resident_bytes

logger = logging.getLogger(__name__)

# tensors of the parameter's shape that torch's optimizers keep, without their options
_TENSORS = {
    "adadelta": 2, "adagrad": 1, "adam": 2, "adamax": 2, "adamw": 2, "asgd": 1, "muon": 1,
    "nadam": 2, "radam": 2, "rmsprop": 1, "rprop": 2, "sgd": 0,
}  # fmt: skip
ELEMENTWISE = frozenset(_TENSORS) - {"muon"}
"""Optimizers that step every parameter by itself, whatever others do."""
_FURTHER = ("momentum", "amsgrad", "centered")  # options that keep one more
_OWN_MOMENTUM = ("muon",)  # whose momentum is counted already
_STORAGE_AXES = 2


def check_memory(optimizer: Optimizer, priced: str, plan: Plan, specs: Iterable[ParamSpec]) -> None:
    """Compare an optimizer's state with what the plan has room for.

    Args:
        optimizer: As the user built it.
        priced: The kind whose state the plan counts.
        plan: The plan in force; without a memory limit there is nothing to compare with.
        specs: All parameters of the model.

    Raises:
        ConfigError: The state does not fit. All ranks compute the same.
    """
    kind = type(optimizer).__name__
    tensors = _tensors_of(optimizer)
    if tensors is None and kind.lower() != "adafactor":
        if kind.lower() != priced.lower():
            logger.warning(
                "optimizer %s is not known and memory was planned for %r: that its state fits is "
                "not checked; pass the kind that keeps as much as optimizer= of autopar.compile()",
                kind,
                priced,
            )
        return
    if not plan.memory_limit_bytes or not any(s.memory.total_bytes for s in plan.stages):
        return  # a plan from elsewhere, without figures
    trained = [spec for spec in specs if spec.requires_grad]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    is_cpu = all(p.device.type == "cpu" for p in held)
    worst_bytes, planned_bytes, state_bytes = 0, 0, 0
    for rank in range(plan.mesh.pp):
        stages = [s for s in plan.stages if plan.mesh.pipeline_rank(s.index) == rank]
        planned = sum(s.memory.optimizer_bytes for s in stages)
        own = [p for p in trained if plan.mesh.pipeline_rank(p.owner) == rank]
        sizes = [_state_bytes(p, tensors, plan) for p in own]
        state = sum(sizes)
        if plan.offload:
            state = resident_bytes(state, max(sizes, default=0), is_cpu=is_cpu)
        total = sum(s.memory.total_bytes for s in stages) - planned + state
        if total > worst_bytes:
            worst_bytes, planned_bytes, state_bytes = total, planned, state
    if worst_bytes > plan.memory_limit_bytes and state_bytes > planned_bytes:
        raise ConfigError(
            f"{kind} keeps {format_bytes(state_bytes)} of state on the worst device, the plan was "
            f"made for {priced!r} with {format_bytes(planned_bytes)}: {format_bytes(worst_bytes)} "
            f"of {format_bytes(plan.memory_limit_bytes)}; pass optimizer={_word(kind, tensors)!r} "
            "to autopar.compile(), or take an optimizer that keeps less"
        )
    if state_bytes > planned_bytes:
        logger.info(
            "%s keeps %s of state where the plan counts %s; it fits: %s of %s", kind,
            format_bytes(state_bytes), format_bytes(planned_bytes), format_bytes(worst_bytes),
            format_bytes(plan.memory_limit_bytes),
        )  # fmt: skip


def _tensors_of(optimizer: Optimizer) -> int | None:
    """Tensors per parameter, the most of any group; None for an optimizer that is not known."""
    kind = type(optimizer).__name__.lower()
    if kind not in _TENSORS:
        return None
    groups: Sequence[Mapping[str, object]] = optimizer.param_groups
    further = () if kind in _OWN_MOMENTUM else _FURTHER
    return _TENSORS[kind] + max(
        (sum(bool(group.get(option)) for option in further) for group in groups), default=0
    )


def _state_bytes(spec: ParamSpec, tensors: int | None, plan: Plan) -> int:
    sizes = (plan.mesh.dp, plan.mesh.tp)
    shape = local_shape(spec.meta.shape, spec.storage[-_STORAGE_AXES:], sizes)
    meta = TensorMeta(shape, spec.meta.dtype)
    if tensors is None:
        return optimizer_state_bytes("adafactor", meta)
    return tensors * meta.bytes


def _word(kind: str, tensors: int | None) -> str:
    """The kind that ``optimizer=`` knows and that keeps at least as much."""
    if tensors is None:
        return optimizer_kind(kind).value
    return {0: "sgd", 1: "sgd-momentum"}.get(tensors, "adamw")
