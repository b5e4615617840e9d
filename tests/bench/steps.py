"""One rank of the bench: profiles, then plans, predicts and measures; the result is JSON.

``python steps.py PROFILE.json RESULT.json BUDGET SECONDS [--profile-only]``, in every rank's
process; both are seconds: of each profile, and of each plan's steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import autopar
from autopar.api.profiling import profile_machine
from autopar.capture.tracing import Captured, capture
from autopar.cluster import parse_devices
from autopar.errors import AutoparError
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.sharding.build import localize, signatures_of
from autopar.solver.exact import Setting, exact_figures
from autopar.solver.exact_memory import local_bytes
from autopar.solver.force import forced_plan
from cost_models.local import local_cluster
from cost_models.memory_timeline import memory_timelines
from cost_models.profile import Profile
from cost_models.profiled import ProfiledCostModel
from tests.bench.live_bytes import peak_allocated_bytes, storage_bytes
from tests.bench.models import MODELS, PLANS, words

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MOST_PROFILES = 4
WARM_UP = 3
LEAST_STEPS, MOST_STEPS = 9, 60


def main() -> None:
    torch.set_num_threads(1)
    out, result = Path(sys.argv[1]), Path(sys.argv[2])
    budget_s, plan_s = float(sys.argv[3]), float(sys.argv[4])
    for build in MODELS.values():
        for _ in range(MOST_PROFILES):  # what the machine takes may leave no time for the model
            _, profile = profile_machine(out, budget_s=budget_s, resume=True, build=build)
            if profile.is_complete:
                break
    if "--profile-only" in sys.argv:
        return
    profile = everywhere(profile)
    rows = []
    for name in MODELS:
        for degrees in PLANS[SIZE]:
            row = measured(name, degrees, profile, plan_s)
            if row is not None and RANK == 0:
                rows.append(row)
                result.write_text(json.dumps(rows))


def everywhere(profile: Profile) -> Profile:
    """The profile of rank 0, by which all ranks plan."""
    if SIZE == 1:
        return profile
    box = [profile]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def measured(
    name: str, degrees: Mapping[str, object], profile: Profile, plan_s: float
) -> dict[str, object] | None:
    """What a plan was predicted to take, and what it took; None if there is no such plan."""
    model, batch = MODELS[name]()
    captured = capture(model, (), batch)
    cluster = parse_devices(SIZE, local=local_cluster(profile))
    prices = ProfiledCostModel(cluster, profile)
    try:
        plan = forced_plan(
            captured.graph, captured.hash, cluster=cluster, cost_model=prices, **degrees
        )
    except AutoparError as error:
        if RANK == 0:
            sys.stderr.write(f"{name} {words(degrees)}: {error}\n")
        return None
    model = autopar.compile(model, SIZE, batch, plan=plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    warm = [timed(step) for _ in range(WARM_UP)]
    wanted = int(plan_s / max(gathered(warm[-1])))  # the same on all ranks
    times = [timed(step) for _ in range(min(MOST_STEPS, max(LEAST_STEPS, wanted)))]
    held = [*model.parameters(), *model.buffers(), *batch.values()]
    held += [t for state in optimizer.state.values() for t in state.values()]
    peak = storage_bytes(held) + peak_allocated_bytes(step)
    autopar.close(model)
    return {
        "model": name,
        "plan": words(degrees),
        "ranks": SIZE,
        "predicted_s": plan.time_s,
        "measured_s": max(gathered(median(times))),
        "spread_s": max(times) - min(times),
        "predicted_bytes": live_bytes(captured, plan, prices),
        "measured_bytes": max(gathered(peak)),
    }


def live_bytes(captured: Captured, plan: Plan, prices: ProfiledCostModel) -> int:
    """Most bytes over the simulated step of a loop that sets gradients to None after each."""
    decisions = decisions_of(plan, captured.graph)
    programs = localize(captured.graph, decisions, signatures_of(captured.graph))
    setting = Setting(
        cluster=prices.cluster,
        model=prices,
        mesh=plan.mesh,
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        zero_levels=tuple(stage.zero_level for stage in plan.stages),
        optimizer=plan.optimizer,
        optimizer_s_per_byte=0.0,
    )
    figures = exact_figures(programs, setting)
    held = [replace(stage.held, has_lasting_grads=False) for stage in figures.stages]
    timelines = memory_timelines(figures.simulation, held, every_operator=True)
    peaks = [timeline.peak_bytes for timeline in timelines]
    for pp, timeline in enumerate(timelines):
        owned = [p for p in programs.params.values() if plan.mesh.pipeline_rank(p.owner) == pp]
        blocks = [local_bytes(p.meta, p.storage, programs) for p in owned]
        # AdamW goes tensor by tensor and holds a root and a quotient of its size
        peaks.append(timeline.points[-1].total_bytes + 2 * max(blocks))
    return max(peaks)


def timed(step) -> float:
    """Seconds of a step that all ranks begin together."""
    if SIZE > 1:
        dist.barrier()
    started_s = time.perf_counter()
    step()
    return time.perf_counter() - started_s


def gathered(value):
    """The value of every rank."""
    if SIZE == 1:
        return [value]
    every = [None] * SIZE
    dist.all_gather_object(every, value)
    return every


if __name__ == "__main__":
    main()
