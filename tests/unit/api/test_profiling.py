"""Which prices a plan gets on this machine, and what a profile learns from a plan."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import autopar
from autopar.api.environment import local_machine
from autopar.api.profiling import prices_for, profile_machine, saved_profile
from autopar.capture.tracing import capture
from autopar.cluster import parse_devices
from autopar.errors import ConfigError
from cost_models.analytic import AnalyticCostModel
from cost_models.local import local_cluster
from cost_models.measure import measure_local_device
from cost_models.profile import Point, PointKind, Profile, profile_cache_path, save_profile
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


def test_operators_that_are_measured_are_told(profile, graph, caplog):
    save_profile(profile, profile_cache_path())
    with caplog.at_level(logging.WARNING):
        prices_for(parse_devices(1, local=local_cluster(profile)), graph=graph)
    assert re.search(r"measured (\d+) of \1 operators that profile .* lacked; kept", caplog.text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"machine": "another, 2 cores"}, "machine is 'another, 2 cores', here it is"),
        ({"versions": {"torch": "1.0"}}, "torch is '1.0', here it is"),
    ],
)
def test_the_saved_profile_of_another_machine_or_torch_is_refused(profile, graph, changes, message):
    other = replace(profile, **changes)
    save_profile(other, profile_cache_path())
    here = parse_devices(1, local=local_cluster(other))
    with pytest.raises(ConfigError, match=f"{message}.*profile this machine"):
        prices_for(here, graph=graph)
    assert saved_profile() == other
    # what is planned for other devices needs no profile of this machine
    assert isinstance(prices_for(parse_devices("8:h100-sxm")), AnalyticCostModel)


def test_the_saved_profile_of_another_device_is_refused(profile):
    save_profile(replace(profile, device="cuda"), profile_cache_path())
    with pytest.raises(
        ConfigError, match="device is 'cuda', here it is 'cpu'; profile this machine"
    ):
        local_machine()


def test_ranks_that_are_bound_to_fewer_cores_use_the_profile(profile, graph, caplog):
    kind = profile.machine.rpartition(",")[0]
    other = replace(profile, machine=f"{kind}, 512 cores", num_cores=512)
    save_profile(other, profile_cache_path())
    here = parse_devices(1, local=local_cluster(other))
    with caplog.at_level(logging.WARNING):
        assert isinstance(prices_for(here, graph=graph), ProfiledCostModel)
    assert "priced by its curves, not measured" in caplog.text
    assert saved_profile() == other


def test_a_named_profile_prices_plans_for_its_machine_and_no_other(profile, tmp_path):
    other = replace(profile, machine="another, 512 cores", num_cores=512)
    path = tmp_path / "p.json"
    save_profile(other, path)
    here = parse_devices(2, local=local_machine(path))
    assert here.devices[0].source.startswith("profile of another, 512 cores")
    found = prices_for(here, path)
    assert isinstance(found, ProfiledCostModel)
    assert found.source.startswith("profile of another, 512 cores")
    assert isinstance(prices_for(parse_devices("2x4:cpu"), path), ProfiledCostModel)
    with pytest.raises(ConfigError, match="is of another, 512 cores .cpu., the plan is for 8:h100"):
        prices_for(parse_devices("8:h100-sxm"), path)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        prices_for(here, tmp_path / "none.json")


def test_a_model_is_planned_and_asked_about_with_a_named_profile(profile, tmp_path, caplog):
    path = tmp_path / "p.json"
    call = Point(K.STEP, "float32", (1,), 0.5, name="call")
    other = replace(profile, machine="another, 2 cores", num_cores=2).with_points([call])
    save_profile(other, path)
    model, batch = torch.nn.Linear(8, 8), {"input": torch.zeros(4, 8)}
    compiled = autopar.compile(model, 2, batch, profile=path, loss=lambda out, _: out.sum())
    assert dict(compiled.plan.provenance)["prices"].startswith("profile of another, 2 cores")
    assert any("500 ms of a step lie outside" in text for text in compiled.plan.assumptions)
    assert not profile_cache_path().exists()
    assert compiled.why_not(tp=2).verdict != "refused"
    assert "not measured" not in caplog.text  # it is not this machine's to be completed
    with pytest.raises(ConfigError, match="profile=7 is a int; give the path of a file"):
        autopar.compile(torch.nn.Linear(8, 8), 2, batch, profile=7)


def test_a_model_that_is_not_there_is_refused_before_anything_is_measured(tmp_path):
    def build():
        raise ConfigError("there is no such model")

    with pytest.raises(ConfigError, match="no such model"):
        profile_machine(tmp_path / "p.json", budget_s=1.0, build=build)
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
def test_a_budget_that_is_no_time_is_refused_before_anything_is_measured(tmp_path, budget_s):
    with pytest.raises(ConfigError, match="--budget"):
        profile_machine(tmp_path / "p.json", budget_s=budget_s)
    assert not list(tmp_path.iterdir())


def test_a_folder_as_output_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't be written"):
        profile_machine(tmp_path, budget_s=1.0)


def test_the_bound_holds_for_pipelines_whose_ranks_share_cores(profile, tmp_path):
    path = tmp_path / "p.json"
    matmuls = [p for p in profile.points if p.kind in (K.MATMUL, K.STREAM, K.LAUNCH)]
    shared = replace(profile, machine="another, 1 cores", num_cores=1, points=tuple(matmuls))
    save_profile(shared, path)

    def plan(**given):
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        return autopar.compile(
            torch.nn.Sequential(*layers), 4, {"input": torch.zeros(8, 64)}, profile=path,
            loss=lambda out, _: out.square().mean(), **given,
        ).plan  # fmt: skip

    pipeline = plan(pp=4)
    assert pipeline.time_s < pipeline.objective_s / 2  # while others wait, a rank has the core
    assert plan().bound_s <= pipeline.time_s
    assert pipeline.bound_s < pipeline.time_s
