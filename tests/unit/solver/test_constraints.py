"""What constraints refuse, and how they are reported."""

from __future__ import annotations

import pytest

from autopar.errors import ConstraintError
from autopar.plan.types import ScheduleKind
from autopar.sharding.placement import R, Shard
from autopar.solver.constraints import (
    Constraints,
    applied_constraints,
    check_constraints,
    parameter_placements,
)
from tests.joint_graphs import residual_network

GRAPH = residual_network(2)


def refuse(match: str, *, devices: int = 8, **given: object) -> None:
    with pytest.raises(ConstraintError, match=match):
        check_constraints(GRAPH, Constraints(**given), devices)  # type: ignore[arg-type]


def test_degrees_below_one_are_refused():
    refuse(r"constraint dp=0: the least is 1", dp=0)


def test_more_devices_than_there_are():
    refuse(r"dp=4, tp=4: need 16 devices, the cluster has 8", dp=4, tp=4)


def test_a_pattern_that_names_no_parameter():
    refuse(r"'layer\.\*' names no parameter; parameters are such as", placements={"layer.*": "R"})


def test_two_patterns_that_disagree():
    refuse(
        r"parameter 'layers\.0\.up' is S\(1\) by '\*\.up' and R by 'layers\.0\.\*'",
        placements={"*.up": "S(1)", "layers.0.*": "R"},
    )


def test_a_placement_that_is_none():
    refuse(r"given 'P\(sum\)'; a parameter is 'R' or 'S\(dim\)'", placements={"*": "P(sum)"})
    refuse(r"given 'split'", placements={"*": "split"})


def test_a_placement_beyond_the_shape():
    refuse(r"puts S\(2\) on parameter 'embed\.weight' of shape \(8, 8\)", placements={"*": "S(2)"})


def test_a_placement_that_leaves_a_rank_empty():
    refuse(r"5 ranks over 8 rows leave one empty", tp=5, placements={"embed.weight": "S(0)"})


def test_boundaries_must_match_the_number_of_stages():
    refuse(
        r"2 modules begin 3 stages, but pp=2 and virtual=1 make 2; name 1",
        pp=2,
        boundaries=("layers.0", "layers.1"),
    )


def test_boundaries_must_name_modules_that_run():
    refuse(r"'layers\.7' names no module that runs", boundaries=("layers.7",))


def test_a_recompute_pattern_must_name_a_module():
    refuse(r"recompute: 'blocks\.\*' names no module", recompute={"blocks.*": "full"})


def test_recompute_takes_three_words():
    refuse(r"recompute='some': must be one of none, selective, full", recompute="some")


def test_1f1b_has_one_stage_per_rank():
    refuse(r"use schedule='interleaved'", schedule=ScheduleKind.ONE_F_ONE_B, virtual=2)


def test_the_first_recompute_pattern_that_fits_counts():
    wish = Constraints(recompute={"layers.0": "full", "layers.*": "none"})
    assert wish.recompute_of("layers.0.up") == "full"
    assert wish.recompute_of("layers.1") == "none"
    assert wish.recompute_of("head") is None


def test_patterns_give_placements_by_input():
    found = parameter_placements(GRAPH, {"*.up": "S(1)", "head.weight": "R"}, 2)
    assert found == {"layers__0__up": Shard(1), "layers__1__up": Shard(1), "head__weight": R}


def test_what_is_in_force_is_listed_with_its_origin():
    wish = Constraints(tp=2, placements={"*.up": "S(1)"}, recompute="full")
    listed = applied_constraints(wish, {"tp inside a machine": ("True", "groups do not cross")})
    assert [(c.name, c.value, c.origin) for c in listed] == [
        ("tp", "2", "user"),
        ("recompute", "full", "user"),
        ("placements", "*.up: S(1)", "user"),
        ("tp inside a machine", "True", "default"),
    ]


@pytest.mark.parametrize(
    ("given", "devices", "match"),
    [
        (
            {"zero": 3, "dp": 1},
            8,
            r"zero=3 and dp=1: ZeRO splits over data ranks, and there is one",
        ),
        ({"zero": 1, "tp": 2}, 2, r"zero=1, tp=2: .* need 4 devices, and the cluster has 2"),
        ({"zero": 2, "tp": 2, "pp": 2}, 6, r"tp=2, pp=2: .* need 8 devices, and .* has 6"),
        ({"zero": 3}, 1, r"constraint zero=3: ZeRO splits over 2 data ranks or more, .* has 1"),
    ],
)
def test_zero_without_data_ranks_is_refused(given, devices: int, match: str):
    refuse(match, devices=devices, **given)


def test_level_zero_needs_no_data_ranks():
    check_constraints(GRAPH, Constraints(zero=0, dp=1), 1)
