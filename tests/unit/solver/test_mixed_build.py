"""Problems of several kinds of devices: whoever prices blocks beside or before others."""

from __future__ import annotations

import pytest

from autopar.cluster import parse_devices
from autopar.solver.constraints import Constraints
from autopar.solver.lanes import Lanes
from autopar.solver.mixed_build import Built, MixedBuilder
from cost_models.analytic import AnalyticCostModel
from tests.joint_graphs import residual_network

NET = residual_network(2, rows=4, width=64, hidden=256)
CLUSTER = parse_devices("2x2:h100-sxm + 1:a100-80gb")


def builder(num_threads: int) -> MixedBuilder:
    made = MixedBuilder(NET, Constraints(), "adamw", AnalyticCostModel)
    made._lanes = Lanes(num_threads)
    return made


def same(one: Built, other: Built) -> bool:
    return (
        one.problem.kinds == other.problem.kinds
        and one.problem.gradient_bytes == other.problem.gradient_bytes
        and list(one.priced) == list(other.priced)
        and all(one.priced[k].options == other.priced[k].options for k in one.priced)
        and all(one.priced[k].table.menus == other.priced[k].table.menus for k in one.priced)
    )


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_change_nothing(num_threads: int):
    assert same(builder(0).build(CLUSTER), builder(num_threads).build(CLUSTER))


def test_a_builder_that_knows_another_cluster_builds_the_same():
    warm = builder(1)
    warm.build(CLUSTER)
    for lost in (0, 2):
        left = CLUSTER.without_machines((lost,))
        assert same(warm.build(left), builder(0).build(left))


def test_sizes_are_priced_as_when_each_is_asked_for_alone():
    whole = builder(0).build(CLUSTER)
    wanted = {(tp, samples) for _, tp, samples in whole.priced}
    part = builder(0).build(CLUSTER, wanted=wanted)
    for key, priced in whole.priced.items():
        assert part.priced[key].options == priced.options
        assert part.priced[key].table.menus == priced.table.menus
