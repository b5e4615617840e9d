"""Every option of the recompute menus, forced in all blocks: equal to one device, and as priced."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from autopar.cluster.parse import parse_devices
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.solver.analysis import Analysis
from autopar.solver.candidates import Shape
from autopar.solver.chain_sums import exchange_steps
from autopar.solver.constraints import Constraints
from autopar.solver.exact import Setting, exact_figures
from autopar.solver.force import ProportionalCostModel
from autopar.solver.ranked import Ranked, decisions_for
from autopar.solver.ranking import Ranker
from tests.equivalence.harness import Problem, actions_for, problem_of
from tests.zoo import build

PLANS = {
    "mb2": (MeshShape(), 2),
    "tp2": (MeshShape(tp=2), 1),
    "dp2 x tp2": (MeshShape(dp=2, tp=2), 1),
    "pp2": (MeshShape(pp=2), 2),
}
MEMORY = 1 << 40


@dataclass(frozen=True)
class Menus:
    """A small model with the menus of its blocks on a mesh."""

    problem: Problem
    analysis: Analysis
    ranked: Ranked

    @property
    def count(self) -> int:
        return max(len(b.options) for b in self.ranked.stage_problem.blocks)

    def forced(self, index: int) -> Ranked:
        """Every block with its option ``index``, or with its last one."""
        options = [min(index, len(b.options) - 1) for b in self.ranked.stage_problem.blocks]
        return replace(self.ranked, stages=replace(self.ranked.stages, options=tuple(options)))


def menus_of(
    name: str, mesh: MeshShape, count: int, dtype: torch.dtype = torch.float32, **sizes: int
) -> Menus:
    model, batch = build(name, **sizes)
    problem = problem_of(model.to(dtype), batch)
    analysis = Analysis(
        problem.graph, parse_devices(f"{mesh.num_ranks}:cpu"), ProportionalCostModel(),
        Constraints(zero=0), "adamw",
    )  # fmt: skip
    found = Ranker(analysis, MEMORY).rank(Shape(mesh, count, ScheduleKind.ONE_F_ONE_B))
    assert isinstance(found, Ranked)
    return Menus(problem, analysis, found)


@pytest.mark.parametrize(
    ("degrees", "layers"),
    [
        pytest.param(PLANS["tp2"], 1, id="tp2, one layer"),
        *(pytest.param(d, 2, id=name, marks=pytest.mark.slow) for name, d in PLANS.items()),
    ],
)
def test_a_step_with_any_option_equals_one_device(degrees, layers):
    mesh, count = degrees
    menus = menus_of("llama", mesh, count, layers=layers)
    assert menus.count >= 5
    seen = set()
    for index in range(menus.count):
        decisions = decisions_for(menus.analysis, menus.forced(index))
        programs = localize(menus.problem.graph, decisions, menus.problem.signatures)
        actions = actions_for(programs, mesh, count, ScheduleKind.ONE_F_ONE_B, ())
        verify_programs(menus.problem.graph, programs, mesh, actions, menus.problem.values)
        seen.add(decisions.recompute)
    assert len(seen) == menus.count


@pytest.mark.parametrize("degrees", [PLANS["mb2"], PLANS["tp2"]], ids=["mb2", "tp2"])
def test_bytes_and_seconds_of_an_option_are_those_of_its_programs(degrees):
    mesh, count = degrees
    menus = menus_of("llama", mesh, count, layers=3)
    first_s = 0.0
    for index in range(menus.count):
        ranked = menus.forced(index)
        decisions = decisions_for(menus.analysis, ranked)
        programs = localize(menus.problem.graph, decisions, menus.problem.signatures)
        stage = exact_figures(programs, _setting(menus, mesh, count)).stages[0]
        blocks = ranked.stage_problem.blocks
        chosen = [b.options[o] for b, o in zip(blocks, ranked.stages.options, strict=True)]
        saved = sum(o.saved_bytes for o in chosen)
        assert stage.held.saved_bytes == pytest.approx(saved, rel=0.02), index
        first_s = first_s or stage.time.backward_s
        extra_s = sum(o.total_s - b.options[0].total_s for b, o in zip(blocks, chosen, strict=True))
        assert stage.time.backward_s - first_s == pytest.approx(extra_s, rel=1e-6, abs=1e-12)


def _setting(menus: Menus, mesh: MeshShape, count: int) -> Setting:
    analysis = menus.analysis
    return Setting(
        cluster=analysis.cluster, model=analysis.model, mesh=mesh,
        schedule=ScheduleKind.ONE_F_ONE_B, num_microbatches=count,
        zero_levels=(0,) * mesh.num_stages, optimizer="adamw", optimizer_s_per_byte=0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("degrees", "dtype"),
    [
        pytest.param(PLANS["mb2"], torch.float32, id="mb2"),
        pytest.param(PLANS["tp2"], torch.float32, id="tp2"),
        # norms read a copy of what enters their block
        pytest.param(PLANS["mb2"], torch.bfloat16, id="mb2, bfloat16"),
    ],
)
def test_no_option_costs_less_than_the_bound_of_what_giving_up_saved_values_costs(degrees, dtype):
    mesh, count = degrees
    menus = menus_of("llama", mesh, count, dtype, layers=3)
    ranker = Ranker(menus.analysis, MEMORY)
    body = ranker.bodies.body((count, mesh.dp, mesh.tp))
    _, steps = exchange_steps([b.options for b in body.least])
    blocks = menus.ranked.stage_problem.blocks
    for index in range(menus.count):
        chosen = [b.options[min(index, len(b.options) - 1)] for b in blocks]
        least_s = sum(b.options[0].total_s for b in body.least)
        room = sum(o.saved_bytes for o in chosen)
        room -= sum(b.options[0].saved_bytes for b in body.least)
        for step in steps:
            if room >= 0:
                break
            moved = min(1.0, -room / step.bytes)
            least_s += moved * step.seconds
            room += moved * step.bytes
        assert room >= -1, index
        assert sum(o.total_s for o in chosen) >= least_s * (1 - 1e-9), index
        held = sum(b.options[0].held_bytes for b in body.least)
        assert 0 < held <= sum(o.held_bytes for o in chosen), index
    if mesh.tp == 1:  # no layout makes values smaller: the leanest keep what enters a layer
        lean = sum(b.options[-1].saved_bytes for b in body.least)
        assert lean >= 0.9 * sum(min(o.saved_bytes for o in b.options) for b in blocks)
