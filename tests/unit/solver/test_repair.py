"""Choices of splits some of whose values can't reach their readers."""

from __future__ import annotations

import random

from autopar.cluster import parse_devices
from autopar.solver.analysis import Analysis
from autopar.solver.constraints import Constraints
from autopar.solver.repair import repaired
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import SplitsProblem, choice_terms_s
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network

CLUSTER = parse_devices("2x2:h100-sxm")
NETWORK = residual_network(2, rows=64, width=256, hidden=1024, is_tied=True)


def problem_at(level: int) -> SplitsProblem:
    model = AnalyticCostModel(CLUSTER)
    analysis = Analysis(NETWORK, CLUSTER, model, Constraints(), "adamw")
    return analysis.problem((2, 2, 2), level)


def seconds(problem: SplitsProblem, options: tuple[int, ...]) -> float | None:
    terms = choice_terms_s(problem, options)
    return None if terms is None else sum(terms.values())


def test_a_choice_whose_values_all_arrive_stays_as_it_is() -> None:
    problem = problem_at(1)
    best = solve_splits(problem).options
    assert repaired(problem, best) == best


def test_options_beside_a_value_that_does_not_arrive_are_chosen_anew() -> None:
    problem, draw = problem_at(1), random.Random(0)
    best = solve_splits(problem)
    num_mended = 0
    for _ in range(300):
        changed = list(best.options)
        for at in draw.sample(range(len(changed)), 2):
            changed[at] = draw.randrange(len(problem.variables[at].options))
        options = tuple(changed)
        found = repaired(problem, options)
        if seconds(problem, options) is not None:
            assert found == options
        elif found is not None:
            num_mended += 1
            mended_s = seconds(problem, found)
            assert mended_s is not None
            assert mended_s >= best.objective_s * (1 - 1e-9)
            assert 0 < sum(a != b for a, b in zip(found, options, strict=True)) <= 4
    assert num_mended > 10


def test_the_two_ends_of_one_value_get_the_options_that_cost_least() -> None:
    problem = problem_at(1)
    best = solve_splits(problem)
    num_mended = 0
    for at, variable in enumerate(problem.variables):
        for option in range(len(variable.options)):
            options = (*best.options[:at], option, *best.options[at + 1 :])
            if seconds(problem, options) is not None:
                continue
            num_mended += 1
            found = repaired(problem, options)
            assert found is not None
            mended_s = seconds(problem, found)
            # going back to the best choice is one of the changes that it tries
            assert mended_s is not None
            assert mended_s <= best.objective_s * (1 + 1e-9)
    assert num_mended > 0
