"""Further architectures under forced plans equal one device, or are refused by name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from autopar.errors import ConstraintError
from autopar.plan.decisions import decisions_of
from autopar.runtime.equivalence import verify_programs
from autopar.sharding.build import localize
from autopar.solver.force import forced_plan
from tests.equivalence.harness import actions_for, problem_of
from tests.more_models import MODELS

PLANS: Mapping[str, dict[str, object]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "num_microbatches": 2},
    "dp2 x tp2 x pp2, ZeRO 3": {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 2, "zero": 3},
}
# a contrastive loss reads all pairs of samples; no rule says how a strided scatter may be cut
MIXES_SAMPLES = {"clip": "_log_softmax", "swin": "as_strided_scatter"}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_more_architectures_equal_one_device(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    problem = problem_of(model.train(), batch)
    for degrees in PLANS.values():
        if name in MIXES_SAMPLES and "num_microbatches" in degrees:
            with pytest.raises(ConstraintError, match=f"{MIXES_SAMPLES[name]}.*mixes samples"):
                forced_plan(problem.graph, "hash", **degrees)  # type: ignore[arg-type]
            continue
        plan = forced_plan(problem.graph, "hash", **degrees)  # type: ignore[arg-type]
        programs = localize(problem.graph, decisions_of(plan, problem.graph), problem.signatures)
        zero = [stage.zero_level for stage in plan.stages]
        actions = actions_for(programs, plan.mesh, plan.num_microbatches, plan.schedule, zero)
        verify_programs(problem.graph, programs, plan.mesh, actions, problem.values)
