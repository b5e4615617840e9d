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
from cost_models.local import gpu_cluster, local_cluster
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


def saved_profile(path: Path | None = None) -> Profile | None:
    """The profile in a file; of this machine, if one was measured, where no file is named.

    Raises:
        ConfigError: The file is damaged or of another version, or the one that is named is not
            there; the text says what to do.
    """
    if path is not None:
        return load_profile(path)
    path = profile_cache_path()
    return load_profile(path) if path.exists() else None


def prices_for(
    cluster: Cluster, profile: Path | None = None, graph: Graph | None = None
) -> CostModel:
    """Prices for a cluster: measured ones where it is of the machine that was profiled.

    Args:
        cluster: What is planned for.
        profile: A profile of its devices, also of another machine; the saved one of this machine
            if left out.
        graph: What is planned: those of its operators that a profile of this machine does not know
            are measured now, for a few seconds, and added to it.

    Raises:
        ConfigError: The profile is damaged, has too few points for a fit, is not of the cluster's
            devices though it was named, or is of another machine or torch than this though it was
            not.
    """
    found = saved_profile(profile)
    if found is None:
        return AnalyticCostModel(cluster)
    if not _is_of(cluster, found, is_named=profile is not None):
        if profile is None:
            return AnalyticCostModel(cluster)
        raise ConfigError(
            f"profile {str(profile)!r}: is of {found.machine} ({found.device}), the plan is for "
            f"{cluster}; plan for devices of that kind, or leave the profile out"
        )
    if profile is None:
        _check_is_of_here(found)
    prices = ProfiledCostModel(cluster, found)  # too few points are refused before more are added
    if graph is None:
        return prices
    completed = _completed(found, graph, profile)
    return prices if completed is found else ProfiledCostModel(cluster, completed)


def _check_is_of_here(profile: Profile) -> None:
    """Refuse the saved profile if processor, device or torch changed since it was measured.

    Fewer cores are let pass: a rank may be bound to some of those that were measured.
    """
    from cost_models.measure import describe_machine

    here = describe_machine(profile.num_threads)
    kind = profile.machine.rpartition(",")[0]
    if kind == here.machine.rpartition(",")[0]:
        here = replace(here, machine=profile.machine)
    check_same_machine(profile, here, where=f"profile {str(profile_cache_path())!r}")


def _completed(profile: Profile, graph: Graph, named: Path | None) -> Profile:
    """``profile`` with the operators of ``graph`` that it lacked, if it is of this machine.

    Args:
        profile: What was measured.
        graph: What is planned.
        named: The profile's file, if the user named one, which may be another machine's.
    """
    from autopar.runtime.op_alone import operator_points, unseen_operators
    from cost_models.measure import describe_machine, local_meter

    known = {p.name.partition("(")[0] for p in profile.of_kind(PointKind.OP)}
    nodes = unseen_operators(graph, known)
    if not nodes:
        return profile
    path = named or profile_cache_path()
    where = f"profile {str(path)!r}"
    try:
        check_same_machine(profile, describe_machine(profile.num_threads), where=where)
    except ConfigError as error:
        logger.log(
            logging.WARNING if named is None else logging.DEBUG,
            "%d operators that the profile lacks are priced by its curves, not measured: %s",
            len(nodes), error,
        )  # fmt: skip
        return profile
    points = operator_points(graph, nodes, local_meter(), budget_s=UNSEEN_S)
    if not points:
        return profile
    profile = profile.with_points(points)
    kept = "kept there"
    try:
        save_profile(profile, path)
    except OSError as error:
        kept = f"not kept there: {error.strerror}"
    logger.warning(
        "measured %d of %d operators that %s lacked; %s", len(points), len(nodes), where, kept
    )
    return profile


def _is_of(cluster: Cluster, profile: Profile, *, is_named: bool) -> bool:
    """Whether the devices of a cluster are those of the profile."""
    devices = [m.device for m in cluster.machines]
    if profile.device == "cpu":
        date = f"on {profile.date}"  # the local cluster's devices say which profile they are from
        is_cpu = all(d.kind.value == "cpu" for d in devices)
        return is_cpu and (is_named or all(date in d.source for d in devices))
    own = profiled_machine(profile).devices[0]
    return all(d.name == own.name for d in devices)


def profiled_machine(profile: Profile) -> Cluster:
    """The machine that a profile was measured on."""
    if profile.device == "cpu":
        return local_cluster(profile)
    return gpu_cluster(
        profile.machine.rpartition(",")[0],
        num_devices=profile.num_cores,
        memory_bytes=max(1, profile.memory_bytes),
    )


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
    made = None if build is None else build()  # refused now, not after minutes of measuring
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
        if made is not None:
            left_s = max(0.0, budget_s - (clock() - started_s))
            profile = _with_model(profile, made, left_s, keep, show, clock)
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
    made: tuple[torch.nn.Module, object],
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
    steps = list(model_points(lambda: made, meter))
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
