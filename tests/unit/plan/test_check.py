"""Plans that contradict themselves or the cluster are refused, with the numbers that clash."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import parse_devices
from autopar.errors import PlanError
from autopar.plan.check import check_plan
from autopar.plan.types import MemoryParts, MeshShape, ScheduleKind, StagePlacement
from autopar.units import GIB


def with_stage(plan, position, **changes):
    stages = list(plan.stages)
    stages[position] = replace(stages[position], **changes)
    return replace(plan, stages=tuple(stages))


def test_the_example_plan_is_consistent(example_plan):
    check_plan(example_plan)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 7}, "mesh pp2 x dp2 x tp2 needs 8 devices, the plan has 7"),
        ({"num_microbatches": 0}, "there are 0 micro-batches, the least is 1"),
        ({"mesh": MeshShape(pp=4, dp=2)}, r"there are 2 stages, mesh .* = 4"),
        ({"peak_bytes": 100, "memory_limit_bytes": 99}, "needs 100 bytes .*, its limit is 99"),
        ({"splits": {"cp": {}}}, "splits name the axis 'cp'"),
        ({"splits": {"tp": {"mm": "Q(0)"}}}, "'mm' on axis 'tp' has the split 'Q"),
        ({"splits": {"tp": {"mm": "S(x) -> R"}}}, "'mm' on axis 'tp' has the split 'S"),
        ({"mesh": MeshShape(pp=0)}, "mesh axis 'pp' has size 0, the least is 1"),
        (
            {"mesh": MeshShape(pp=1, virtual=2, dp=4)},
            "schedule '1f1b' has one stage per pipeline rank, not 2; use 'interleaved'",
        ),
        ({"warmup": (3, 2, 1)}, r"warmup=\(3, 2, 1\) has 3 depths for 2 pipeline ranks"),
        ({"warmup": (1, 2)}, r"warmup=\(1, 2\): depths must be at least 1 and must not increase"),
        (
            {"warmup": (3, 1), "schedule": ScheduleKind.ZERO_BUBBLE},
            r"warmup=\(3, 1\) goes with schedule '1f1b', not 'zero_bubble'",
        ),
        (
            {"schedule": ScheduleKind.ZBV},
            "'zbv' has 2 stages per pipeline rank in a V, the mesh has 1 placed as 'loop'",
        ),
        (
            {
                "mesh": MeshShape(pp=1, virtual=2, dp=4, placement=StagePlacement.V),
                "schedule": ScheduleKind.INTERLEAVED,
            },
            "schedule 'interleaved' deals stages round robin, not in a V; use 'zbv'",
        ),
    ],
)
def test_a_broken_rule_is_named_with_its_numbers(example_plan, changes, message):
    with pytest.raises(PlanError, match=message):
        check_plan(replace(example_plan, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": (4, 5, 6, 8)}, "stage 1 has devices 4,5,6,8, its pipeline rank has 4-7"),
        ({"index": 3}, "stage 3 stands at position 1"),
        ({"zero_level": 4}, "stage 1 has ZeRO level 4, the levels are 0 to 3"),
        ({"num_in_flight": 0}, "for 0 micro-batches in flight, its schedule has 1"),
        ({"first": "add_0"}, "two stages begin with the operator 'add_0'"),
    ],
)
def test_a_broken_stage_is_named(example_plan, changes, message):
    with pytest.raises(PlanError, match=message):
        check_plan(with_stage(example_plan, 1, **changes))


def test_interleaved_stages_share_their_ranks(example_plan):
    stages = tuple(
        replace(s, devices=tuple(range(8)), num_in_flight=9) for s in example_plan.stages
    )
    mesh = MeshShape(pp=1, virtual=2, dp=4, tp=2)
    check_plan(replace(example_plan, stages=stages, mesh=mesh, schedule=ScheduleKind.INTERLEAVED))


def test_all_faults_are_listed_at_once(example_plan):
    with pytest.raises(PlanError) as caught:
        check_plan(replace(example_plan, num_devices=7, splits={"cp": {}}))
    assert str(caught.value).count("\n  - ") == 2


def test_a_cluster_with_too_few_or_too_small_devices_is_refused(example_plan):
    check_plan(example_plan, parse_devices("1x8:h100-sxm"))
    with pytest.raises(PlanError, match="needs 8 devices, the cluster has 4"):
        check_plan(example_plan, parse_devices("1x4:h100-sxm"))
    big = with_stage(example_plan, 0, memory=MemoryParts(params_bytes=200 * GIB))
    with pytest.raises(PlanError, match=r"stage 0 needs 214,748,364,800 bytes, device 0 \(h100"):
        check_plan(big, parse_devices("1x8:h100-sxm"))
