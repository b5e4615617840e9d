"""Native solvers on several threads at once against the same ones alone, on random programs."""

from __future__ import annotations

from functools import partial

from autopar.errors import InfeasibleError
from autopar.solver.lanes import Lanes
from autopar.solver.menus import Menus
from autopar.solver.recompute import menu_corners, recompute_menu
from autopar.solver.splits import solve_splits
from autopar.solver.splits_problem import SplitsProblem, SplitsSolution
from tests.oracle.test_recompute_menus import drawn
from tests.oracle.test_solver_splits import random_problem

NUM_PROGRAMS = 200  # of splits; fewer blocks, each of which has some twenty
NUM_BLOCKS = 20
SIZES = (3, 8, 24)


def answer(problem: SplitsProblem) -> SplitsSolution | str:
    try:
        return solve_splits(problem)
    except InfeasibleError as error:
        return str(error)


def test_programs_solved_side_by_side_have_the_answers_that_they_have_alone() -> None:
    problems = [random_problem(seed) for seed in range(NUM_PROGRAMS)]
    blocks = [drawn(seed).problem for seed in range(NUM_BLOCKS)]
    splits = [answer(problem) for problem in problems]
    menus = [recompute_menu(block) for block in blocks]
    lanes = Lanes(3)
    with lanes.open():
        later = [lanes.ahead(partial(answer, problem)) for problem in problems]
        assert lanes.together([partial(recompute_menu, block) for block in blocks]) == menus
        assert [one.result() for one in later] == splits


def test_a_menu_that_goes_on_from_known_corners_is_the_menu_from_nothing() -> None:
    for seed in range(NUM_BLOCKS // 2):
        block = drawn(seed).problem
        corners = menu_corners(block)
        for size in SIZES:
            assert recompute_menu(block, size=size, corners=corners) == recompute_menu(
                block, size=size
            )


def test_menus_are_the_same_in_any_order_of_sizes_and_whether_expected_or_not() -> None:
    blocks = [drawn(seed).problem for seed in range(NUM_BLOCKS // 3)]
    alone = {size: [recompute_menu(b, size=size) for b in blocks] for size in SIZES}
    for num_threads in (0, 2):
        for order in (SIZES, SIZES[::-1]):
            lanes = Lanes(num_threads)
            menus = Menus(lanes)
            with lanes.open():
                menus.expect(blocks[::2], order[0])
                menus.drop(blocks[::4], order[0])
                found = {size: menus.of([*blocks, *blocks], size) for size in order}
            assert found == {size: alone[size] * 2 for size in SIZES}
