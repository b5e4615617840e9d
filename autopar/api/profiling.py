"""The profile of this machine: measured on request, then used for every plan made here."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from autopar.cluster import Cluster
from autopar.errors import AutoparError, ConfigError
from autopar.ir.graph import Graph
from cost_models.analytic import AnalyticCostModel
from cost_models.base import CostModel
from cost_models.local import gpu_cluster
from cost_models.profile import (
    PointKind,
    Profile,
    check_same_machine,
    check_writable,
    load_profile,
    profile_cache_path,
    save_profile,
)
from cost_models.profiled import ProfiledCostModel

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BUDGET_S = 60.0
UNSEEN_S = 5.0  # for operators that are measured while a plan is made
Build = Callable[[], tuple["torch.nn.Module", object]]
"""Makes the model and one global batch whose operators are measured."""


def saved_profile() -> Profile | None:
    """The profile of this machine, if one was measured.

    Raises:
        ConfigError: The file is damaged or of another version; the text says what to do.
    """
    path = profile_cache_path()
    return load_profile(path) if path.exists() else None


def prices_for(
    cluster: Cluster, profile: Profile | None = None, graph: Graph | None = None
) -> CostModel:
    """Prices for a cluster: measured ones where it is this machine and was profiled.

    Args:
        cluster: What is planned for.
        profile: Of this machine; the saved one if left out.
        graph: What is planned: those of its operators that the saved profile does not know are
            measured now, for a few seconds, and added to it.

    Raises:
        ConfigError: The saved profile is damaged, or has too few points for a fit.
    """
    found = profile or saved_profile()
    if found is None or not _is_of(cluster, found):
        return AnalyticCostModel(cluster)
    if graph is not None:
        found = _completed(found, graph, is_saved=profile is None)
    return ProfiledCostModel(cluster, found)


def _completed(profile: Profile, graph: Graph, *, is_saved: bool) -> Profile:
    """``profile`` with the operators of ``graph`` that it lacked, if it is of this device."""
    from autopar.runtime.op_alone import operator_points, unseen_operators
    from cost_models.measure import describe_machine, local_meter

    try:
        check_same_machine(profile, describe_machine(profile.num_threads), where="the profile")
    except ConfigError as error:
        logger.warning("operators that the profile lacks are not measured: %s", error)
        return profile
    known = {p.name.partition("(")[0] for p in profile.of_kind(PointKind.OP)}
    nodes = unseen_operators(graph, known)
    points = operator_points(graph, nodes, local_meter(), budget_s=UNSEEN_S) if nodes else []
    if not points:
        return profile
    logger.info("%d operators that the profile lacked were measured", len(points))
    profile = profile.with_points(points)
    if is_saved:
        save_profile(profile, profile_cache_path())
    return profile


def _is_of(cluster: Cluster, profile: Profile) -> bool:
    """Whether the devices of a cluster are those of the profile."""
    devices = [m.device for m in cluster.machines]
    if profile.device == "cpu":
        date = f"on {profile.date}"  # the local cluster's devices say which profile they are from
        return all(d.kind.value == "cpu" and date in d.source for d in devices)
    name = profile.machine.rpartition(",")[0]
    own = gpu_cluster(name, num_devices=1, memory_bytes=max(1, profile.memory_bytes)).devices[0]
    return all(d.name == own.name for d in devices)


def profile_machine(
    out: Path | None = None,
    *,
    budget_s: float = BUDGET_S,
    only_if_missing: bool = False,
    resume: bool = False,
    build: Build | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Path, Profile]:
    """Measure this machine as its ranks see it, with a progress bar, and keep the result.

    Under ``torchrun`` every rank must call it: what ranks take from each other and collectives are
    measured as well. Rank 0 writes, after every point, so that a run that was cut short can be
    resumed.

    Args:
        out: Where to write; where plans look for it if left out.
        budget_s: Seconds after which no further point is started.
        only_if_missing: Measure nothing if there is a profile already.
        resume: Measure only what the existing file lacks; also with another number of ranks.
        build: Gives a model whose operators are measured at the shapes that they have on a rank.
        clock: Seconds, for the budget and for CPUs.

    Returns:
        The file and what it holds.

    Raises:
        ConfigError: ``budget_s`` is out of range, or an existing profile is damaged or of another
            machine; the same on every rank.
    """
    from cost_models.measure import describe_machine, local_meter, measure_local_device

    if not budget_s > 0:
        raise ConfigError(f"--budget: {budget_s} seconds; must be above 0, 60 is usual")
    path = out or profile_cache_path()
    _join_job()

    def existing() -> Profile | None:
        found = _existing(path, describe_machine(), only_if_missing, resume)
        if found is None or not only_if_missing:
            check_writable(path)
        return found

    known = _on_rank_0(existing)
    if known is not None and only_if_missing:
        return path, known
    is_writer = local_meter().rank == 0

    def keep(profile: Profile) -> None:
        if is_writer:
            save_profile(profile, path)

    started_s = clock()
    bar = Progress(
        SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn(),
        console=Console(stderr=True), transient=True, disable=not is_writer,
    )  # fmt: skip
    with bar:
        task = bar.add_task("measuring", total=1.0)

        def show(what: str, share: float) -> None:
            bar.update(task, description=what, completed=share)

        profile = measure_local_device(budget_s, show, known=known, keep=keep, clock=clock)
        keep(profile)
        if build is not None:
            left_s = max(0.0, budget_s - (clock() - started_s))
            profile = _with_model(profile, build, left_s, keep, show, clock)
    keep(profile)
    return path, profile


def _existing(path: Path, here: Profile, only_if_missing: bool, resume: bool) -> Profile | None:
    if not path.exists() or not (only_if_missing or resume):
        return None
    found = load_profile(path)
    check_same_machine(found, here, where=f"profile {str(path)!r}")
    return found


def _with_model(
    profile: Profile,
    build: Build,
    budget_s: float,
    keep: Callable[[Profile], None],
    show: Callable[[str, float], None],
    clock: Callable[[], float],
) -> Profile:
    """``profile`` with the operators of a model, and what a call costs beyond its programs."""
    from autopar.api.profiling_model import call_points, model_points
    from cost_models.measure import local_meter

    meter = local_meter(clock=clock)
    started_s = clock()
    is_complete = True
    steps = list(model_points(build, meter))
    calls = [p for p in profile.of_kind(PointKind.STEP) if p.name == "call"]
    # the same for all models, and told by nothing else: first, and once for so many ranks
    if not meter.agree(any(p.busy == meter.per_node for p in calls)):
        steps.insert(0, ("a call", lambda: list(call_points(meter))))
    for what, measure in steps:
        if meter.agree(clock() - started_s > budget_s):
            is_complete = False
            break
        show(what, 1.0)
        profile = profile.with_points(measure())
        keep(replace(profile, is_complete=False))
    return replace(profile, is_complete=profile.is_complete and is_complete)


def _join_job() -> None:
    """Set up the process group of a launched job, and leave it when the process ends."""
    import torch
    import torch.distributed as dist

    from autopar.api.environment import is_launched

    if not is_launched() or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    # an interpreter that ends while a thread is inside a backend aborts the process
    atexit.register(_leave_job)


def _leave_job() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _on_rank_0(make: Callable[[], Profile | None]) -> Profile | None:
    """What rank 0 finds, or its error, on every rank."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return make()
    box: list[tuple[Profile | None, str]] = [(None, "")]
    if dist.get_rank() == 0:
        try:
            box = [(make(), "")]
        except AutoparError as error:
            box = [(None, str(error))]
    dist.broadcast_object_list(box, src=0)
    found, text = box[0]
    if text:
        raise ConfigError(text)
    return found
