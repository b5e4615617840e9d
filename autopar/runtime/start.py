"""From a plan to a session that runs on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.capture.calls import ModelCall
from autopar.capture.tracing import Captured
from autopar.errors import ConfigError, PlanError
from autopar.host_memory import keep_freed_memory
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.runtime.batches import call_key
from autopar.runtime.changes import Marks, ModelChanges, modes_of
from autopar.runtime.distributed import Driver as TorchDriver
from autopar.runtime.driving import Driver, IdleDriver, LoneDriver
from autopar.runtime.failure import FailFast
from autopar.runtime.gathering import keep_own_dtypes
from autopar.runtime.groups import ProcessGroups, lease_groups
from autopar.runtime.module import uncompiled
from autopar.runtime.optimizers import OptimizerGuard
from autopar.runtime.parameters import stage_mesh
from autopar.runtime.pieces import parts_of
from autopar.runtime.place import Place
from autopar.runtime.session import RunOptions, Session, gathered
from autopar.runtime.surgery import move_in
from autopar.runtime.variants import make_variant


def start_session(  # noqa: PLR0913
    model: torch.nn.Module,
    call: ModelCall,
    captured: Captured,
    plan: Plan,
    *,
    options: RunOptions,
    place: Place,
    guard: OptimizerGuard,
    given: Mapping[str, torch.Tensor] | None,
    watch: FailFast | None = None,
) -> Session:
    """Emit this rank's programs and move its parameters in.

    Args:
        model: The user's module; its tensors are replaced.
        call: The call that was captured.
        captured: Its program.
        plan: Made for that program.
        options: What the user asked for.
        place: This process.
        guard: Keeps optimizers with the parameters.
        given: Whole tensors by name, in the place of the model's own.
        watch: Ends all ranks when one fails.

    Raises:
        ConfigError: The launch has another number of ranks than the plan.
        PlanError: The plan was made for another program.
    """
    check_launch(plan.num_devices, place)
    check_model(plan, captured)
    if place.device.type == "cpu":
        keep_freed_memory()
    decisions = replace(
        decisions_of(plan, captured.graph),
        gather_outputs=gathered(captured, options, captured.training),
    )
    planned = make_variant(
        captured, decisions, plan, rank=place.rank, device=place.device,
        backward=captured.training,
    )  # fmt: skip
    lease = None
    if place.is_distributed:
        lease = lease_groups(plan.mesh, planned.local, place.device.type)
    groups = None if lease is None else lease.groups
    key = call_key(Marks(modes_of(model), ()), call, backward=captured.training)
    residents, replaced = move_in(
        model,
        planned.local,
        parts_of(captured.graph),
        plan.mesh,
        None if groups is None else stage_mesh(groups.device_mesh),
        place,
        seed=options.seed,
        given=given,
    )
    keep_own_dtypes(model, residents)
    guard.replace(replaced, residents.store, plan, distributed=place.is_distributed)
    session = Session(
        changes=ModelChanges(model),
        plan=plan,
        captured=captured,
        options=options,
        place=place,
        residents=residents,
        planned=planned,
        driver=_driver(groups, place),
        lease=lease,
        guard=guard,
        uncompiled=uncompiled,
        watch=watch,
    )
    session.adopt(key, planned)
    return session


def check_launch(num_devices: int, place: Place) -> None:
    """Refuse a launch with another number of ranks than the plan has devices."""
    if place.world_size != num_devices:
        raise ConfigError(
            f"the plan is for {num_devices} devices, the launch has {place.world_size} ranks; "
            f"start {num_devices} processes, or plan for devices={place.world_size}"
        )


def check_model(plan: Plan, captured: Captured) -> None:
    """Refuse a plan that was made for another program."""
    if plan.model_hash != captured.hash:
        raise PlanError(
            f"the plan was made for a model with hash {plan.model_hash}, this one has "
            f"{captured.hash}; the model, its mode or the shapes of the batch differ: plan again"
        )


def _driver(groups: ProcessGroups | None, place: Place) -> Driver:
    if not place.is_distributed:
        return LoneDriver()
    return IdleDriver() if groups is None else TorchDriver(groups, place.device)
