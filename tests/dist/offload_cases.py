"""Training with saved values in host memory on real processes, beside the same on one device.

Arguments: number of processes, and the options of ``autopar.compile`` as ``name=value``. CPUs gain
nothing from host memory, so that no plan for them uses it: here it is written into one. Every
second operator's values are kept there.
"""

import copy
import json
import sys
from dataclasses import replace

import torch

import autopar
from autopar.plan.types import Plan
from autopar.runtime.module import state_of
from autopar.sharding.host_copies import BEGINNINGS
from tests.dist.schedule_cases import STEPS, Tied, check


def with_offload(plan: Plan) -> Plan:
    names = sorted({name for table in plan.splits.values() for name in table})
    remade = {name for stage in plan.stages for name in stage.recompute}
    offload = tuple(name for name in names[::2] if name not in remade)
    stages = tuple(replace(stage, offload=offload) for stage in plan.stages)
    return replace(plan, stages=stages, offload_window_bytes=1 << 12)


def main() -> None:
    world, *words = sys.argv[1:]
    options = {name: json.loads(value) for name, value in (word.split("=") for word in words)}
    torch.manual_seed(0)
    model = Tied().double()
    ids = torch.randint(0, 24, (14, 5))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    first = autopar.compile(
        copy.deepcopy(model), f"{world}:cpu", batch, num_microbatches=7, **options
    )
    plan = with_offload(first.plan)
    autopar.close(first)
    twin = autopar.compile(copy.deepcopy(model), f"{world}:cpu", batch, dp=1, tp=1, pp=1)
    model = autopar.compile(model, inputs=batch, plan=plan)
    both = (model, twin)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in both]
    for step in range(STEPS):
        losses = [each(**batch) for each in both]
        check(f"loss of step {step}", *(loss.detach() for loss in losses))
        for loss in losses:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    stages = state_of(model).session.planned_programs.stages
    for stage in stages:
        copies = sum(n.op in BEGINNINGS for n in stage.forward.nodes)
        assert copies >= 3, (stage.index, copies)
    found, wanted = (each.full_state_dict() for each in both)
    for key, value in wanted.items():
        check(key, found[key], value)
    sys.stdout.write("passed\n")


if __name__ == "__main__":
    main()
