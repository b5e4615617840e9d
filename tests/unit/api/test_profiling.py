"""Which prices a plan gets on this machine, and what a profile learns from a plan."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.api.profiling import prices_for, profile_machine, saved_profile
from autopar.capture.tracing import capture
from autopar.cluster import parse_devices
from autopar.errors import ConfigError
from cost_models.analytic import AnalyticCostModel
from cost_models.local import local_cluster
from cost_models.measure import measure_local_device
from cost_models.profile import PointKind, Profile, profile_cache_path, save_profile
from cost_models.profiled import ProfiledCostModel

K = PointKind


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def profile() -> Profile:
    ticks = itertools.count()
    return measure_local_device(1.0, clock=lambda: float(next(ticks)))


@pytest.fixture(scope="module")
def graph():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    return capture(model, (torch.zeros(4, 8),), {}).graph


def test_without_a_profile_prices_are_those_of_the_cluster():
    assert saved_profile() is None
    assert isinstance(prices_for(parse_devices("2:cpu")), AnalyticCostModel)


def test_a_saved_profile_prices_this_machine_and_no_other(profile):
    save_profile(profile, profile_cache_path())
    here = parse_devices(2, local=local_cluster(profile))
    assert isinstance(prices_for(here), ProfiledCostModel)
    for other in ("8:h100-sxm", "2:cpu"):  # the second by its preset
        assert isinstance(prices_for(parse_devices(other)), AnalyticCostModel)


def test_operators_that_the_profile_lacks_are_measured_once_and_kept(profile, graph):
    save_profile(profile, profile_cache_path())
    here = parse_devices(1, local=local_cluster(profile))
    prices_for(here, graph=graph)
    kept = saved_profile()
    names = {p.name.partition("(")[0] for p in kept.of_kind(K.OP)}
    assert "aten.gelu.default" in names
    assert kept.points[: len(profile.points)] == profile.points
    prices_for(here, graph=graph)
    assert saved_profile() == kept


def test_nothing_is_measured_for_a_profile_of_another_machine(profile, graph, caplog):
    other = replace(profile, machine="another")
    save_profile(other, profile_cache_path())
    here = parse_devices(1, local=local_cluster(other))
    with caplog.at_level(logging.WARNING):
        assert isinstance(prices_for(here, graph=graph), ProfiledCostModel)
    assert "machine is 'another', here it is" in caplog.text
    assert saved_profile() == other


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
def test_a_budget_that_is_no_time_is_refused_before_anything_is_measured(tmp_path, budget_s):
    with pytest.raises(ConfigError, match="--budget"):
        profile_machine(tmp_path / "p.json", budget_s=budget_s)
    assert not list(tmp_path.iterdir())


def test_a_folder_as_output_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't be written"):
        profile_machine(tmp_path, budget_s=1.0)
