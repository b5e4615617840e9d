"""What the solver says a plan costs, against the programs that the plan becomes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from autopar.ir.graph import InputKind
from autopar.plan.decisions import decisions_of
from autopar.plan.types import Plan
from autopar.sharding.build import localize
from autopar.sharding.programs import StagePrograms
from autopar.solver.force import forced_plan
from cost_models.memory import peak_transient_bytes, saved_bytes
from tests.equivalence.harness import Problem, problem_of
from tests.zoo import build

DEGREES: Mapping[str, dict[str, int]] = {
    "one device": {},
    "dp2": {"dp": 2},
    "dp2, ZeRO 3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2 x tp2": {"dp": 2, "tp": 2},
    "two micro-batches": {"num_microbatches": 2},
    "tp2, two micro-batches": {"tp": 2, "num_microbatches": 2},
}


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    return {name: problem_of(*build(name)) for name in ("gpt2", "llama", "bert", "vit")}


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_objective_of_one_stage_is_the_cost_of_its_programs(
    name: str, degrees: str, problems: dict[str, Problem]
) -> None:
    # time_s is priced program by program after localizing; nothing of the solver's is in it
    plan = forced_plan(problems[name].graph, "hash", **DEGREES[degrees])
    assert plan.objective_s == pytest.approx(plan.time_s, rel=1e-9)


def _stage(problem: Problem, recompute: str) -> tuple[Plan, StagePrograms]:
    plan = forced_plan(problem.graph, "hash", recompute=recompute, num_microbatches=2)
    decisions = decisions_of(plan, problem.graph)
    return plan, localize(problem.graph, decisions, problem.signatures).stages[0]


def test_full_recompute_keeps_what_crosses_blocks_and_nothing_else() -> None:
    problem = problem_of(*build("gpt2", layers=6))
    everything, programs = _stage(problem, "none")
    full, remade = _stage(problem, "full")
    # six layers of two blocks each, and the ends: their inputs are kept, no layer's inside
    assert saved_bytes(remade.forward) < 0.1 * saved_bytes(programs.forward)
    # one block is alive at a time when it is made again
    freed = (InputKind.SAVED,)
    peak = saved_bytes(remade.forward) + peak_transient_bytes(remade.backward, freed_inputs=freed)
    assert peak < 0.4 * saved_bytes(programs.forward)
    assert full.time_s < 1.4 * everything.time_s


def test_pipelines_and_recompute_are_estimated_within_two_percent(
    problems: dict[str, Problem],
) -> None:
    for degrees in ({"pp": 2, "num_microbatches": 4}, {"recompute": "full", "num_microbatches": 2}):
        plan = forced_plan(problems["gpt2"].graph, "hash", **degrees)  # type: ignore[arg-type]
        assert plan.objective_s == pytest.approx(plan.time_s, rel=0.02)
