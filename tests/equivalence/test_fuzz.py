"""Random legal plans equal one device: nothing here depends on what a solver would choose."""

from __future__ import annotations

import random

import pytest

from autopar.plan.types import MeshShape, ScheduleKind
from tests.equivalence.harness import (
    Problem,
    fuzz_decisions,
    problem_of,
    simulate,
    worst_difference,
)
from tests.zoo import build

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "resnet")
SEEDS = range(4)
MANY_SEEDS = range(100, 190)


@pytest.fixture(scope="module")
def problems() -> dict[str, tuple[Problem, dict[str, object]]]:
    return {}


def _problem(name: str, problems: dict) -> tuple[Problem, dict]:
    if name not in problems:
        dropout = {} if name == "resnet" else {"dropout": 0.1}
        problem = problem_of(*build(name, **dropout))
        problems[name] = (problem, problem.reference())
    return problems[name]


def _check(name: str, seed: int, problems: dict) -> None:
    problem, reference = _problem(name, problems)
    rng = random.Random(seed)
    dp, tp, stages = rng.choice([1, 2]), rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3])
    # a batch norm mixes the samples of different micro-batches
    microbatches = 1 if name == "resnet" else rng.choice([1, 2, 4])
    decisions = fuzz_decisions(
        problem,
        microbatches=microbatches,
        dp=dp,
        tp=tp,
        stages=stages,
        seed=seed,
        zero=[rng.choice([0, 1, 2, 3]) for _ in range(stages)],
        recompute_share=rng.choice([0.0, 0.5, 1.0]),
    )
    kind = rng.choice([ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
    _, step = simulate(problem, decisions, MeshShape(dp=dp, tp=tp, pp=stages), kind)
    ratio, tensor = worst_difference(step, reference)
    assert ratio <= 1, f"{tensor}: {ratio:.3g} times the allowance"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_equal_one_device(name: str, seed: int, problems: dict) -> None:
    _check(name, seed, problems)


@pytest.mark.slow
@pytest.mark.parametrize("seed", MANY_SEEDS)
@pytest.mark.parametrize("name", MODELS)
def test_many_random_plans_equal_one_device(name: str, seed: int, problems: dict) -> None:
    _check(name, seed, problems)
