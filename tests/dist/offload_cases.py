"""Training with saved values in host memory on real processes, beside the same on one device.

Arguments: number of processes, and the options of ``autopar.compile`` as ``name=value``. CPUs gain
nothing from host memory, so that no plan for them uses it: here it is written into one. Every
second operator's values are kept there.
"""

import copy
import sys
from dataclasses import replace

import autopar
from autopar.plan.types import Plan
from autopar.runtime.module import state_of
from autopar.sharding.host_copies import BEGINNINGS
from tests.dist.schedule_cases import given, train_beside


def with_offload(plan: Plan) -> Plan:
    names = sorted({name for table in plan.splits.values() for name in table})
    remade = {name for stage in plan.stages for name in stage.recompute}
    offload = tuple(name for name in names[::2] if name not in remade)
    stages = tuple(replace(stage, offload=offload) for stage in plan.stages)
    return replace(plan, stages=stages, offload_window_bytes=1 << 12)


def main() -> None:
    world, options, model, batch = given()
    first = autopar.compile(
        copy.deepcopy(model), f"{world}:cpu", batch, num_microbatches=7, **options
    )
    plan = with_offload(first.plan)
    autopar.close(first)
    twin = autopar.compile(copy.deepcopy(model), f"{world}:cpu", batch, dp=1, tp=1, pp=1)
    model = autopar.compile(model, inputs=batch, plan=plan)
    train_beside(model, twin, batch, calls=1)
    for stage in state_of(model).session.planned_programs.stages:
        copies = sum(n.op in BEGINNINGS for n in stage.forward.nodes)
        assert copies >= 3, (stage.index, copies)
    sys.stdout.write("passed\n")


if __name__ == "__main__":
    main()
