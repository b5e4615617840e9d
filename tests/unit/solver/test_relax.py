"""Ways out of a refusal: each is true, and they are sorted by their price."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.cluster import parse_devices
from autopar.errors import ConstraintError, InfeasibleError, Relaxation
from autopar.plan.types import Plan, ScheduleKind
from autopar.solver import relax, search
from autopar.solver.mixed import too_dear
from autopar.solver.question import Asker, Question, grown
from autopar.solver.relax import solve_or_explain
from autopar.solver.search import solve
from autopar.units import parse_bytes
from cost_models.analytic import AnalyticCostModel
from tests import questions
from tests.joint_graphs import residual_network

pytestmark = pytest.mark.slow  # each asks for several searches

DEEP = residual_network(2, rows=64, width=16, hidden=64)  # activations, hardly weights


def question(devices: str = "1:cpu", limit: int | None = None, **given: object) -> Question:
    return questions.question(DEEP, devices, limit, **given)


def refusal(asked: Question, **limits: object) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        solve_or_explain(Asker(asked, **limits))  # type: ignore[arg-type]
    return caught.value


def again(asked: Question, **changed: object) -> Plan:
    """The search itself under a change."""
    varied = replace(asked, **changed)  # type: ignore[arg-type]
    return solve(
        varied.graph, "hash", varied.cluster, constraints=varied.constraints,
        optimizer=varied.optimizer, memory_limit_bytes=varied.limit_bytes,
        cost_model=AnalyticCostModel(varied.cluster),
    )[0]  # fmt: skip


def test_every_way_out_is_true_and_they_are_sorted_by_price():
    asked = question(limit=130 << 10, recompute="none", num_microbatches=1, tp=1, dp=1, pp=1)
    error = refusal(asked)
    assert error.shortfalls[0].needed > error.shortfalls[0].available == 130 << 10
    times = [way.time_s for way in error.relaxations]
    assert times == sorted(times)
    tried = 0
    for way in error.relaxations:
        plan = _followed(asked, way)
        if plan is not None:
            tried += 1
            assert plan.time_s == pytest.approx(way.time_s)
            assert plan.peak_bytes == way.peak_bytes
    assert tried >= 2
    text = str(error)
    assert "ways out, each tried, fastest first:" in text
    assert text.index("  - memory of a device") < text.index("ways out")


def _followed(asked: Question, way: Relaxation) -> Plan | None:
    """What comes of following a way out; None for kinds that are followed elsewhere."""
    given = asked.constraints
    if memory := re.match(r"give each device ([\d.]+ [KM]iB) \(", way.what):
        return again(asked, limit_bytes=parse_bytes(memory[1]))
    if way.what.startswith("allow recompute"):
        return again(asked, constraints=replace(given, recompute=None))
    if freed := re.match(r"leave (\w+)=\d+ out", way.what):
        return again(asked, constraints=replace(given, **{freed[1]: None}))
    return None


def test_a_constraint_that_is_not_to_blame_is_no_way_out():
    asked = question(limit=40 << 10, recompute="none", schedule=ScheduleKind.ONE_F_ONE_B)
    error = refusal(asked)
    assert not any("schedule" in way.what for way in error.relaxations)
    (vain,) = (note for note in error.notes if note.startswith("leave schedule='1f1b' out: "))
    assert re.search(r"memory of a device with .* still needs [\d.]+ KiB, has 40.00 KiB$", vain)


def test_the_least_memory_is_close_to_what_is_not_enough():
    error = refusal(question(limit=32 << 10))
    (found,) = (w for w in error.relaxations if "no plan was found with" in w.what)
    enough, there, short = (parse_bytes(text) for text in re.findall(r"[\d.]+ [KM]iB", found.what))
    assert there == 32 << 10
    assert short < enough
    assert found.peak_bytes <= enough
    # what is said to be needed is no more than what is told to be enough
    needs = [s.needed for s in error.shortfalls]
    assert needs == sorted(needs)
    assert needs[0] <= found.peak_bytes


def test_without_searches_left_nothing_is_promised():
    error = refusal(question(limit=32 << 10), max_solves=1)
    assert error.relaxations == ()
    assert all("not tried" in note for note in error.notes)
    assert error.shortfalls


def test_a_lighter_optimizer_is_a_way_out_where_state_is_what_fills_the_memory():
    heavy = residual_network(2, rows=2, width=256, hidden=1024)
    asked = replace(question(limit=16 << 20), graph=heavy)
    error = refusal(asked)
    names = [w.what for w in error.relaxations if w.what.startswith("use the optimizer")]
    assert names
    plan = again(
        asked, optimizer=re.match(r"use the optimizer ([\w-]+) \(now adamw\)", names[0])[1]
    )  # type: ignore[index]
    assert plan.peak_bytes <= 16 << 20


def test_another_program_is_tried():
    small = residual_network(1, rows=2, width=8, hidden=8)
    asked = replace(question(limit=32 << 10), programs={"take the small one": lambda: small})
    assert any(w.what == "take the small one" for w in refusal(asked).relaxations)


def test_ways_out_of_a_limit_of_cost_are_told_in_cost():
    def dear(asked: Question, _: object) -> None:
        raise too_dear(2e-3 if asked.optimizer == "adamw" else 1e-3, 1.0, 1e-6)

    other = residual_network(1, rows=64, width=16, hidden=64)
    asked = replace(question(), pipelines=dear, programs={"compute in less": lambda: other})
    error = refusal(asked)
    assert not error.relaxations  # the other program's plan is searched for time, not within cost
    assert "use the optimizer sgd (now adamw): still needs 0.001 per step, has 1e-06" in str(error)
    assert " B, has" not in str(error)


def test_ways_out_of_a_long_search_are_looked_for_nearby_and_are_true(monkeypatch):
    asked = question(devices="2:cpu", limit=40 << 10)
    everywhere = refusal(asked)
    monkeypatch.setattr(relax, "DEAR", 0)
    nearby = refusal(asked)
    assert nearby.num_tried > 0
    assert nearby.notes[-1].startswith(f"all other shapes: {nearby.num_tried} were worked out")
    assert not any("all other shapes" in note for note in everywhere.notes)
    ways = [way for way in nearby.relaxations if way.what.startswith("give each device")]
    assert ways
    for way in ways:
        assert "no plan was found with" not in way.what  # other shapes were not asked
        limit = parse_bytes(re.match(r"give each device ([\d.]+ [KM]iB) \(", way.what)[1])  # type: ignore[index]
        assert way.peak_bytes <= limit
        assert again(asked, limit_bytes=limit).time_s <= way.time_s * (1 + 1e-9)
    (larger,) = [way for way in nearby.relaxations if re.match(r"use \d+ devices", way.what)]
    count = int(larger.what.split()[1])
    plan = again(replace(asked, cluster=parse_devices(f"{count}:cpu")))
    assert plan.time_s <= larger.time_s * (1 + 1e-9)


def test_a_clock_ends_a_search_that_finds_nothing(monkeypatch):
    monkeypatch.setattr(search, "PATIENCE", 0)
    monkeypatch.setattr(search, "LEAST_TRIED", 0)
    error = refusal(replace(question(limit=32 << 10), time_limit_s=30.0))
    assert "times the time limit of 30 s" in error.message
    assert "raise the time limit" in error.message


@pytest.mark.parametrize(
    ("given", "named", "free"),
    [
        ({"tp": 4, "pp": 3, "zero": 0}, "tp=4 and pp=3", "zero"),
        ({"dp": 2, "num_microbatches": 64, "zero": 1}, "dp=2 and num_microbatches=64", "zero"),
        ({"pp": 3, "virtual": 2, "recompute": "full"}, "pp=3 and virtual=2", "recompute"),
    ],
)
def test_constraints_that_contradict_are_named_as_a_pair(given, named, free):
    with pytest.raises(ConstraintError, match=f"{named} contradict each other: ") as caught:
        solve_or_explain(Asker(question("8:cpu", **given)))
    assert free not in str(caught.value).partition("contradict")[0]


def test_one_impossible_constraint_is_told_as_it_is():
    with pytest.raises(ConstraintError, match=r"^constraint dp=7: does not divide the batch"):
        solve_or_explain(Asker(question("8:cpu", dp=7, recompute="full")))


def test_a_larger_cluster_is_of_the_same_kind():
    assert str(grown(parse_devices("2x8:h100-sxm + 8:a100-80gb"), 2)) == (
        "4x8:h100-sxm + 2x8:a100-80gb"
    )
