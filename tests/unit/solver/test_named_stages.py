"""Plans with named stages have as many stages as were named, also where others do not fit."""

import pytest

from autopar.errors import ConfigError
from autopar.plan.types import ScheduleKind
from autopar.solver.stages_problem import StageProblem
from tests.cases.test_buckets import uneven
from tests.unit.solver.test_search import plan_for


@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 2, "zero": 1}, {}, {"virtual": 1}])
def test_all_candidates_have_the_named_stages(degrees):
    plan, _ = plan_for(
        uneven().graph, "4:cpu", num_microbatches=2, boundaries=("frozen",), **degrees
    )
    for mesh in (plan.mesh, *(candidate.mesh for candidate in plan.runners_up)):
        assert mesh.num_stages == 2, mesh


def test_a_problem_has_a_start_for_each_stage():
    with pytest.raises(ConfigError, match=r"1 fixed starts, but 4 stages need 3"):
        StageProblem(
            blocks=(), boundary_s=(), pp=2, virtual=2, num_microbatches=2,
            schedule=ScheduleKind.INTERLEAVED, in_flight=(1, 1, 1, 1), limit_bytes=1,
            fixed_starts=(1,),
        )  # fmt: skip
