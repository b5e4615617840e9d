from __future__ import annotations

import random

import pytest

from autopar.plan.actions import ActionKind
from autopar.plan.orders import codes_of, order_of
from autopar.plan.schedule import action_lists, alive_at_once, most_in_flight
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.solver.order_times import settled_count, step_s
from cost_models.simulate import StageSeconds, simulate

KINDS = tuple(ScheduleKind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_what_the_simulator_finds(kind: ScheduleKind) -> None:
    rng = random.Random(f"{kind}")
    for _ in range(30):
        mesh, count, warmup = _shape(rng, kind)
        order = order_of(kind, mesh, count, warmup)
        stages = [_stage(rng) for _ in range(mesh.num_stages)]
        ahead = [(s - 1, s) for s in range(1, mesh.num_stages)]
        back = [(target, source) for source, target in ahead]
        links = {edge: rng.random() / 2 for edge in (*ahead, *back)}
        lists = action_lists(order, mesh, forward_edges=ahead, backward_edges=back)
        expected = simulate(lists, stages, p2p_s=links).makespan_s
        found = step_s(kind, mesh, count, warmup, stages, links)
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_alive_together_is_that_of_the_settled_count(kind: ScheduleKind) -> None:
    is_v = kind is ScheduleKind.ZBV
    placement = StagePlacement.V if is_v else StagePlacement.LOOP
    for pp in range(1, 6):
        for virtual in (1, 2, 3, 4) if kind is ScheduleKind.INTERLEAVED else (1 + is_v,):
            mesh = MeshShape(pp=pp, virtual=virtual, placement=placement)
            known: dict[int, object] = {}
            for count in range(1, (pp + 4) * pp + 1):
                settled = settled_count(kind, mesh, count, None)
                assert settled <= count
                rows = codes_of(kind, mesh, count, None)
                known[count] = [
                    (
                        most_in_flight(codes, len(stages)),
                        set(map(repr, alive_at_once(codes, stages))),
                    )
                    for codes, stages in rows
                ]
                assert known[count] == known[settled], (mesh, count, settled)


def _shape(rng: random.Random, kind: ScheduleKind) -> tuple[MeshShape, int, tuple[int, ...] | None]:
    pp, count = rng.randint(1, 6), rng.randint(1, 17)
    if kind is ScheduleKind.ZBV:
        mesh = MeshShape(pp=pp, virtual=2, placement=StagePlacement.V)
    else:
        virtual = rng.randint(1, 3) if kind is ScheduleKind.INTERLEAVED else 1
        mesh = MeshShape(pp=pp, virtual=virtual)
    warmup = None
    if kind is ScheduleKind.ONE_F_ONE_B and rng.random() < 0.5:
        warmup = tuple(sorted((rng.randint(1, 7) for _ in range(pp)), reverse=True))
    return mesh, count, warmup


def _stage(rng: random.Random) -> StageSeconds:
    backward_s = rng.random()
    once_s = {ActionKind.UNSHARD: rng.random(), ActionKind.REDUCE_GRAD: rng.random()}
    return StageSeconds(
        forward_s=rng.random(), backward_s=backward_s, weight_s=backward_s * rng.random(),
        once_s=once_s,
    )  # fmt: skip
