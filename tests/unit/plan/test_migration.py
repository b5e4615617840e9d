"""What travels between two plans, against elements moved one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.cluster import parse_devices
from autopar.errors import ConfigError, PlanError
from autopar.ir.graph import Graph
from autopar.plan.holdings import holdings
from autopar.plan.migration import migration
from autopar.plan.pipelines import PipelinePlan, PipelineStage
from autopar.plan.types import MeshShape, Plan
from autopar.solver.force import forced_plan
from tests.joint_graphs import residual_network

NET = residual_network(4, rows=8, width=12, hidden=20)


def forced(graph: Graph, **degrees: object) -> Plan:
    return forced_plan(graph, "model", **degrees)  # type: ignore[arg-type]


def elements(plan: Plan, graph: Graph) -> dict[int, set[tuple[str, tuple[int, ...]]]]:
    """Rank -> every element of every parameter that it holds."""
    found: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for name, (_, rows) in holdings(plan, graph).items():
        for row in rows:
            for rank, box in row.boxes.items():
                points: list[tuple[int, ...]] = [()]
                for low, high in box:
                    points = [(*p, i) for p in points for i in range(low, high)]
                found.setdefault(rank, set()).update((name, p) for p in points)
    return found


SHAPES = (
    {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2, "zero": 1},
    {"dp": 4, "tp": 1, "pp": 2, "num_microbatches": 2, "zero": 0},
    {"dp": 2, "tp": 4, "pp": 1, "num_microbatches": 1, "zero": 3},
    {"dp": 1, "tp": 2, "pp": 4, "num_microbatches": 2, "zero": 0},
    {"dp": 8, "tp": 1, "pp": 1, "num_microbatches": 1, "zero": 2},
)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_those_of_elements_counted_one_by_one(seed: int):
    rng = random.Random(seed)
    first, second = rng.sample(SHAPES, 2)
    before, after = forced(NET, **first), forced(NET, **second)
    lost = set(rng.sample(range(8), rng.choice((0, 1, 3))))
    ranks = {r: r for r in range(8) if r not in lost}
    cluster = parse_devices("2x4:h100-sxm")
    moved = migration(before, after, NET, cluster, ranks=ranks)
    have, want = elements(before, NET), elements(after, NET)
    running = set().union(*(have.get(r, set()) for r in ranks))
    item = 4  # float32
    received = {
        rank: item * len((wanted & running) - (have.get(rank, set()) if rank in ranks else set()))
        for rank, wanted in want.items()
    }
    read: set[object] = set()
    for rank, wanted in sorted(want.items()):  # the first that needs it reads what is lost
        lost_here = wanted - running
        received[rank] += item * len(lost_here & read)
        read |= lost_here
    kept = sum(len(w & have.get(r, set())) for r, w in want.items() if r in ranks)
    gone = set().union(*want.values()) - running
    assert {r: n for r, n in received.items() if n} == dict(moved.received_bytes)
    assert moved.moved_bytes == sum(received.values()) == sum(moved.sent_bytes.values())
    assert moved.kept_bytes == item * kept
    assert moved.lost_bytes == item * len(gone)
    assert moved.between_bytes <= moved.moved_bytes


@pytest.mark.parametrize("shape", SHAPES)
def test_every_element_is_somewhere(shape: dict[str, object]):
    plan = forced(NET, **shape)
    assert len(set().union(*elements(plan, NET).values())) == sum(
        i.meta.numel for i in NET.inputs if i.requires_grad and i.meta is not None
    )


def test_a_checkpoint_takes_time_where_somebody_says_how_fast_it_is_read():
    before, after = forced(NET, **SHAPES[3]), forced(NET, **SHAPES[0])
    ranks = {r: r for r in range(4)}  # the second machine is another one
    cluster = parse_devices("2x4:h100-sxm")
    free = migration(before, after, NET, cluster, ranks=ranks)
    told = migration(before, after, NET, cluster, ranks=ranks, checkpoint_bytes_per_s=1e3)
    assert free.lost_bytes == told.lost_bytes > 0
    assert free.read_s is None
    assert "give checkpoint_bytes_per_s=" in str(free)
    assert told.read_s == told.lost_bytes / 1e3
    assert told.seconds == free.seconds + told.read_s
    with pytest.raises(ConfigError, match="checkpoint_bytes_per_s is 0, must be above 0"):
        migration(before, after, NET, cluster, ranks=ranks, checkpoint_bytes_per_s=0.0)


def test_the_same_plan_moves_nothing():
    plan = forced(NET, **SHAPES[0])
    moved = migration(plan, plan, NET, parse_devices("8:h100-sxm"))
    assert (moved.moved_bytes, moved.lost_bytes, moved.seconds) == (0, 0, 0.0)
    assert moved.kept_bytes > 0
    assert moved.parameters == {}


def test_optimizer_state_travels_with_its_parameter():
    before, after = forced(NET, **SHAPES[3]), forced(NET, **SHAPES[4])
    cluster = parse_devices("8:h100-sxm")
    alone = migration(before, after, NET, cluster)
    names = holdings(before, NET)
    with_state = migration(
        before, after, NET, cluster,
        state_bytes={name: 2 * meta.bytes for name, (meta, _) in names.items()},
    )  # fmt: skip
    assert with_state.moved_bytes == 3 * alone.moved_bytes
    assert with_state.seconds > alone.seconds


def test_sources_on_the_own_machine_come_first():
    """Four replicas on two machines: nothing goes between them."""
    before = forced(NET, dp=4, tp=1, pp=1)
    after = forced(NET, dp=2, tp=2, pp=1)
    cluster = parse_devices("2x2:h100-sxm")
    assert migration(before, after, NET, cluster).between_bytes == 0
    spread = migration(forced(NET, dp=1, tp=1, pp=1), after, NET, cluster, ranks={0: 0})
    assert spread.between_bytes > 0


def test_seconds_follow_the_slowest_link():
    before, after = forced(NET, dp=1, tp=1, pp=1), forced(NET, dp=2, tp=1, pp=1)
    near = migration(before, after, NET, parse_devices("2:h100-sxm"), ranks={0: 0})
    far = migration(before, after, NET, parse_devices("2x1:h100-sxm"), ranks={0: 0})
    link = parse_devices("2x1:h100-sxm").machines[0].inter
    assert far.seconds == pytest.approx(link.time_s(far.moved_bytes))
    assert near.seconds < far.seconds


def test_pipelines_hold_their_own_layers():
    def stage(device: str, ranks: tuple[int, ...], first: str, at: tuple[int, int]):
        return PipelineStage(
            device=device, devices=ranks, dp=1, tp=len(ranks), layers=at, first=first
        )

    chain = forced(NET, dp=1, tp=1, pp=2)
    mixed = replace(
        chain, mesh=MeshShape(), stages=(), splits={}, num_devices=3,
        pipelines=(
            PipelinePlan(
                num_microbatches=1, microbatch_samples=4,
                stages=(
                    stage("l4", (0,), chain.stages[0].first, (0, 1)),
                    stage("l4", (1,), chain.stages[1].first, (1, 2)),
                ),
            ),
            PipelinePlan(
                num_microbatches=1, microbatch_samples=4,
                stages=(stage("h100-sxm", (2,), chain.stages[0].first, (0, 2)),),
            ),
        ),
    )  # fmt: skip
    held = elements(mixed, NET)
    assert held[0] | held[1] == held[2]
    assert not held[0] & held[1]
    moved = migration(chain, mixed, NET, parse_devices("2:l4 + 1:h100-sxm"))
    assert set(moved.received_bytes) == {2}


def test_plans_of_different_models_are_refused():
    plan = forced(NET, dp=2)
    with pytest.raises(PlanError, match="plan the same model"):
        migration(plan, replace(plan, model_hash="other"), NET, parse_devices("2:h100-sxm"))
