"""Schedules with fewer micro-batches than stages, and what a rank says before it waits."""

from __future__ import annotations

import re

import pytest
import torch

import autopar
from autopar.errors import ConfigError
from autopar.plan.types import MeshShape, ScheduleKind
from autopar.runtime.failure import _limit_from_environment
from tests.equivalence.harness import fuzz_decisions, problem_of, simulate, worst_difference


class Chain(torch.nn.Module):
    """Six layers and a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE])
def test_fewer_microbatches_than_stages_compute_what_one_device_computes(microbatches, kind):
    problem = problem_of(Chain(), {"x": torch.randn(6, 8)})
    decisions = fuzz_decisions(problem, microbatches=microbatches, dp=1, tp=1, stages=4, seed=3)
    _, step = simulate(problem, decisions, MeshShape(pp=4), kind)
    ratio, name = worst_difference(step, problem.reference())
    assert ratio <= 1.0, name


@pytest.mark.parametrize("microbatches", [1, 2])
def test_fewer_microbatches_than_interleaved_stages_compute_what_one_device_computes(microbatches):
    problem = problem_of(Chain(), {"x": torch.randn(6, 8)})
    decisions = fuzz_decisions(problem, microbatches=microbatches, dp=1, tp=1, stages=4, seed=3)
    mesh = MeshShape(pp=2, virtual=2)
    _, step = simulate(problem, decisions, mesh, ScheduleKind.INTERLEAVED)
    ratio, name = worst_difference(step, problem.reference())
    assert ratio <= 1.0, name


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_time_out_that_is_no_number_of_seconds_is_refused(monkeypatch, text):
    monkeypatch.setenv("AUTOPAR_TIMEOUT_S", text)
    with pytest.raises(ConfigError, match=re.escape(f"AUTOPAR_TIMEOUT_S={text!r}: give seconds")):
        _limit_from_environment()


def test_a_time_out_of_compile_is_a_number_of_seconds():
    with pytest.raises(ConfigError, match="timeout_s='long' is a str; give seconds above 0"):
        autopar.compile(torch.nn.Linear(2, 2), devices=1, timeout_s="long")
