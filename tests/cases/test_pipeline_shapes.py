"""Batches of other sizes than the planned one: the numbers of one device, or a refusal."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.capture.reference import bind_inputs
from autopar.capture.tracing import capture
from autopar.errors import InputError, ShardingError
from autopar.ir.promote import promote
from autopar.plan.decisions import decisions_of
from autopar.plan.types import MeshShape, Plan
from autopar.runtime.equivalence import verify_programs
from autopar.runtime.fitting import FittedData, how_fitted
from autopar.runtime.variants import schedule_actions, transfer, with_storage_of
from autopar.sharding.build import localize, signatures_of
from tests.cases.small_models import SmallGPT, tokens
from tests.plans import hand_made_plan


def check_other_batch(
    model: nn.Module,
    planned: Mapping[str, object],
    batch: Mapping[str, object],
    mesh: MeshShape,
    microbatches: int,
    zero: int = 0,
) -> tuple[FittedData, Plan]:
    """A batch under the plan of another one, on simulated ranks against one device."""
    first = capture(model, (), planned)
    plan = hand_made_plan(first, mesh, num_microbatches=microbatches, zero=zero)
    decisions = decisions_of(plan, first.graph)
    home = localize(first.graph, decisions, signatures_of(first.graph))
    captured = capture(model, (), batch)
    decisions, fitted = transfer(decisions, first.graph, captured.graph)
    graph = promote(captured.graph)
    local = with_storage_of(home, localize(graph, decisions, signatures_of(graph)))
    now = replace(plan, num_microbatches=fitted.num_microbatches)
    actions = schedule_actions(local, now, backward=True, has_loss=captured.has_loss)
    values = bind_inputs(captured, model, (), batch, graph=graph)
    verify_programs(graph, local, plan.mesh, actions, values)
    return fitted, plan


MESHES = {
    "pp2": (MeshShape(pp=2), 4, 0),
    "dp2": (MeshShape(dp=2), 1, 3),
    "dp2 x pp2": (MeshShape(dp=2, pp=2), 2, 1),
    "tp2 x pp2 interleaved": (MeshShape(tp=2, pp=2, virtual=2), 4, 0),
}


@pytest.mark.parametrize("size", [10, 7, 3, 1, 16])
@pytest.mark.parametrize("name", MESHES)
def test_a_batch_of_any_size_has_the_gradients_of_one_device(name: str, size: int) -> None:
    torch.manual_seed(0)
    mesh, microbatches, zero = MESHES[name]
    check_other_batch(SmallGPT(), tokens(8), tokens(size), mesh, microbatches, zero)


@pytest.mark.parametrize("length", [16, 24, 8])
def test_a_batch_of_any_length_has_the_gradients_of_one_device(length: int) -> None:
    torch.manual_seed(0)
    for size in (8, 5):
        check_other_batch(
            SmallGPT(), tokens(8), tokens(size, length), MeshShape(pp=2, tp=2), microbatches=4
        )
