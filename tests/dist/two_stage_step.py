"""Run the hand-made two-stage network on real process groups and compare with autograd."""

import sys

import torch
import torch.distributed as dist

from autopar.plan.types import MeshShape, ScheduleKind
from autopar.runtime.distributed import Driver
from autopar.runtime.failure import fail_fast
from autopar.runtime.finish import finish, share_outputs
from autopar.runtime.groups import create_groups
from autopar.runtime.inputs import StepInputs
from autopar.runtime.load import load
from autopar.runtime.simulate import simulate_step, stored_params
from autopar.runtime.step import RankStep
from tests.handmade import two_stage, two_stage_actions, two_stage_data, two_stage_reference


def main(pp: int, dp: int, tp: int) -> None:
    dist.init_process_group("gloo")
    mesh = MeshShape(pp=pp, dp=dp, tp=tp, virtual=1 if pp == 2 else 2)
    kind = ScheduleKind.ONE_F_ONE_B if pp == 2 else ScheduleKind.INTERLEAVED
    programs = two_stage(mesh)
    actions = two_stage_actions(mesh, kind=kind)
    params, inputs = two_stage_data()
    watch = fail_fast()
    groups = create_groups(mesh, programs, "cpu")
    assert groups is not None
    rank = dist.get_rank()
    stages = [s for s in range(2) if s % pp == mesh.coordinate(rank)[0]]
    loaded = load(programs, mesh, stages=stages)
    given = StepInputs(params=stored_params(programs, mesh, rank, params), users=inputs)
    driver = Driver(groups, torch.device("cpu"))
    for number in range(2):
        step = RankStep(loaded, rank, given)

        def whole(step: RankStep = step):
            yield from step.run(actions[step.pp])
            yield from finish(step)
            return (yield from share_outputs(step))

        with watch.step(f"step {number}"):
            outputs = driver.run(whole())
    simulated = simulate_step(programs, mesh, actions, params=params, inputs=inputs)
    loss, grads, z = two_stage_reference(params, inputs)
    assert torch.allclose(step.losses["loss"], loss, rtol=1e-12)
    assert torch.allclose(outputs["z"], z, rtol=1e-12)
    for stage in stages:
        for name in step.gradients[stage].names():
            spec = programs.params[name]
            want = stored_params(programs, mesh, rank, grads)[name]
            assert torch.allclose(step.gradients[stage][name], want, rtol=1e-11, atol=1e-11), name
            assert spec.owner == stage
    assert torch.allclose(simulated.loss, step.losses["loss"], rtol=1e-12)
    driver.close()
    dist.destroy_process_group()
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
