"""Questions about a saved plan, with the model that it was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from autopar.api.arguments import file_of
from autopar.api.compiling import Devices, LossFunction, capture_call, cluster_for
from autopar.api.questions import Questions
from autopar.cluster import Cluster
from autopar.errors import ConfigError
from autopar.plan.types import Plan
from autopar.runtime.start import check_model

_FROM_FILE = "figures from cluster file"


def questions_of(  # noqa: PLR0913
    model: torch.nn.Module,
    inputs: object,
    plan: Plan,
    *,
    devices: Devices | None = None,
    args: Sequence[object] | None = None,
    loss: LossFunction | None = None,
    cost_per_hour: float | Mapping[str, float] | None = None,
    time_limit_s: float | None = None,
    profile: str | Path | None = None,
) -> Questions:
    """Who answers what is asked about a plan.

    Args:
        model: That the plan was made for; it is left as it is.
        inputs: The global batch that it was made for.
        plan: The plan.
        devices: That it was made for; those that its text names if left out.
        args: Positional arguments beside a dict in ``inputs``.
        loss: As in :func:`autopar.compile`.
        cost_per_hour: Price of a device, as in :func:`autopar.compile`; a plan does not keep it.
        time_limit_s: Wall-clock guard of each search.
        profile: That the plan was made with, if it was named.

    Raises:
        PlanError: The plan is of another model, or of another number of devices.
        ConfigError: The plan's cluster came from a file, which must be named.
    """
    if devices is None and any(text.startswith(_FROM_FILE) for text in plan.assumptions):
        raise ConfigError(
            f"the plan is for a cluster that came from a file ({plan.cluster}); name the "
            "file: devices='FILE'"
        )
    prices_file = file_of("profile", profile)
    cluster = cluster_for(devices or plan.cluster, plan, None, cost_per_hour, prices_file)
    _, captured = capture_call(model, inputs, args, loss, mode=plan.mode, precision=plan.precision)
    check_model(plan, captured)
    limit_bytes = _own_limit_bytes(plan, cluster)
    if limit_bytes is not None:  # a cluster's text does not name it
        cluster = cluster.with_memory_limit(limit_bytes)
    return Questions(captured, cluster, plan, time_limit_s, limit_bytes, prices_file)


def _own_limit_bytes(plan: Plan, cluster: Cluster) -> int | None:
    """The memory of a device that the user allowed, None if that is what each device has."""
    if not plan.pipelines:
        limit_bytes = plan.memory_limit_bytes
        return None if limit_bytes in (0, cluster.memory_bytes) else limit_bytes
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    has_own = any(
        stage.memory_limit_bytes != cluster.device_of(rank).usable_bytes
        for stage in stages
        for rank in stage.devices
    )
    return min(stage.memory_limit_bytes for stage in stages) if has_own else None
