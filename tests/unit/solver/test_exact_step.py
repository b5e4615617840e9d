"""Seconds of a plan's step from its order as numbers are those of the simulator."""

from __future__ import annotations

import random

import pytest

from autopar.plan.actions import ActionKind
from autopar.plan.types import MeshShape, ScheduleKind, StagePlacement
from autopar.solver.exact_step import ExactStep
from cost_models.lanes import Lane, Segment
from cost_models.memory_timeline import ProgramMemory, StageMemory, order_peak
from cost_models.simulate import StageSeconds

ONCE = (
    ActionKind.PROLOGUE,
    ActionKind.UNSHARD,
    ActionKind.REDUCE_GRAD,
    ActionKind.FETCH_TIED,
    ActionKind.SYNC_TIED,
)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_counted_seconds_are_those_of_the_simulation(kind: ScheduleKind) -> None:
    rng = random.Random(f"{kind}")
    for _ in range(40):
        step = _step(rng, kind)
        assert step.is_plain
        expected = step.simulation().makespan_s
        assert step.makespan_s() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_lists_without_micro_batches_tell_the_same_bytes(kind: ScheduleKind) -> None:
    rng = random.Random(f"bytes {kind}")
    for _ in range(40):
        step = _step(rng, kind, levels=(0, 1, 2, 3))
        held = [_memory(rng, level) for level in step.zero_levels]
        lists = step.rank_lists()
        for rank, actions in enumerate(step.memory_lists()):
            assert lists[rank] == step.rank_list(rank)
            own = {s: held[s] for s in step.mesh.stages_of(rank)}
            rows = [own, *({s: memory} for s, memory in own.items())]
            for stages in rows:
                expected = order_peak(rank, lists[rank], stages).parts
                assert order_peak(rank, actions, stages).parts == expected


def _memory(rng: random.Random, level: int) -> StageMemory:
    def size() -> int:
        return rng.randint(0, 9)

    kinds = (
        ActionKind.UNSHARD, ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT, ActionKind.REDUCE_GRAD,
    )  # fmt: skip
    programs = {k: ProgramMemory((size(), size() - 4, size())) for k in kinds if rng.random() < 0.8}
    return StageMemory(
        params_bytes=size(), gathered_bytes=size(), grads_bytes=size(), optimizer_bytes=size(),
        unreduced_bytes=size() if level >= 2 else 0, buffers_bytes=size(), saved_bytes=10 + size(),
        weight_saved_bytes=size(), gathers_again=level >= 3, programs=programs,
    )  # fmt: skip


def test_parameters_that_are_gathered_in_turns_are_simulated() -> None:
    step = _step(random.Random(1), ScheduleKind.INTERLEAVED, levels=(3,), virtual=2)
    assert not step.is_plain
    assert step.makespan_s() == step.simulation().makespan_s


def test_values_that_skip_stages_are_simulated() -> None:
    step = _step(random.Random(1), ScheduleKind.ONE_F_ONE_B, pp=3)
    step.forward_edges |= {(0, 2)}
    assert not step.is_plain
    assert step.makespan_s() == step.simulation().makespan_s


def test_programs_that_copy_beside_computing_are_simulated() -> None:
    step = _step(random.Random(1), ScheduleKind.ONE_F_ONE_B, pp=3)
    segments = {ActionKind.FORWARD: (Segment(lane=Lane.COPY, seconds=1.0, overlaps=True),)}
    step.stages = [StageSeconds(segments=segments), *step.stages[1:]]
    assert not step.is_plain
    assert step.makespan_s() == step.simulation().makespan_s


def _step(
    rng: random.Random,
    kind: ScheduleKind,
    *,
    levels: tuple[int, ...] = (0, 1, 2),
    pp: int = 0,
    virtual: int = 0,
) -> ExactStep:
    pp, count = pp or rng.randint(1, 5), rng.randint(1, 13)
    if kind is ScheduleKind.ZBV:
        mesh = MeshShape(dp=2, pp=pp, virtual=2, placement=StagePlacement.V)
    else:
        many = kind in (ScheduleKind.INTERLEAVED, ScheduleKind.GPIPE, ScheduleKind.FORWARD)
        mesh = MeshShape(dp=2, pp=pp, virtual=virtual or (rng.randint(1, 3) if many else 1))
    warmup = None
    if kind is ScheduleKind.ONE_F_ONE_B and rng.random() < 0.5:
        warmup = tuple(sorted((rng.randint(1, 7) for _ in range(pp)), reverse=True))
    stages = range(mesh.num_stages)
    ahead = [(s - 1, s) for s in stages[1:]]
    back = [] if kind is ScheduleKind.FORWARD else [(s, s - 1) for s in stages[1:]]
    if mesh.virtual == 1:
        levels = (*levels, 3)
    pairs = [(a, b) for a in stages for b in stages if a < b]
    return ExactStep(
        kind=kind,
        mesh=mesh,
        num_microbatches=count,
        warmup=warmup,
        zero_levels=tuple(rng.choice(levels) for _ in stages),
        forward_edges=frozenset(ahead),
        backward_edges=frozenset(back),
        ties=tuple(rng.sample(pairs, min(len(pairs), rng.randint(0, 3)))),
        stages=[_stage(rng) for _ in stages],
        links={edge: rng.random() / 2 for edge in (*ahead, *back) if rng.random() < 0.9},
    )


def _stage(rng: random.Random) -> StageSeconds:
    backward_s = rng.random()
    return StageSeconds(
        forward_s=rng.random(),
        backward_s=backward_s,
        weight_s=backward_s * rng.random(),
        once_s={kind: rng.random() for kind in ONCE},
    )
