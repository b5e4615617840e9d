"""Commands that ask why: text, JSON, exit codes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.plan.io import load_plan, save_plan
from autopar.plan.types import AppliedConstraint, MeshShape
from autopar.units import format_time
from tests.scripts import SMALL_NET


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model's name, and the file of a plan for it."""
    folder = tmp_path_factory.mktemp("small")
    script = folder / "small_net.py"
    script.write_text(SMALL_NET)
    plan = folder / "plan.json"
    words = ["plan", f"{script}:build", "--devices", "2:h100-sxm", "--tp", "2", "-o", str(plan)]
    path = list(sys.path)
    assert main([*words, "--trace", str(folder / "trace.json"), "--json"]) == 0
    sys.path[:] = path
    return f"{script}:build", plan


def spoken(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


def test_plan_writes_a_trace(small, capsys):
    trace = json.loads(small[1].with_name("trace.json").read_text())
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X", "C"}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid"} <= set(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0


def test_explain_of_a_plan_file_needs_no_model(small, capsys):
    assert main(["explain", str(small[1]), "--width", "60"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("What binds\n  memory of ranks 0-1: ")
    assert max(map(len, text.splitlines())) <= 60
    assert main(["explain", str(small[1]), "up.weight", "--json"]) == 0
    told = spoken(capsys)
    assert told["parameters"] == ["up.weight"]
    assert told["decided_by"] == "the solver"


def test_explain_with_the_model_tells_shadow_prices_and_alternatives(small, capsys):
    model, plan = small
    assert main(["explain", model, str(plan), "--json"]) == 0
    told = spoken(capsys)
    assert {p["method"] for p in told["prices"]} == {"re-solved", "re-simulated"}
    assert main(["explain", model, str(plan), "*.weight", "--json"]) == 0
    told = spoken(capsys)
    assert told["parameters"] == ["up.weight", "down.weight"]
    assert told["alternatives"]
    assert set(told["alternatives"][0]) == {"placement", "delta_s", "text"}


def test_why_not_answers_in_words_and_in_json(small, capsys):
    model, plan = small
    assert main(["why-not", model, str(plan), "--tp", "1"]) == 0
    assert capsys.readouterr().out.startswith("tp=1: ")
    assert main(["why-not", model, str(plan), "--placement", "up.weight=R", "--json"]) == 0
    told = spoken(capsys)
    assert told["asked"] == "placements={'up.weight': 'R'}"
    assert told["headline"].startswith(told["asked"])
    assert told["before_s"] == load_plan(plan).time_s
    assert main(["why-not", model, str(plan), "--tp", "64", "--json"]) == 0
    assert spoken(capsys)["verdict"] == "refused"


def test_why_not_of_nothing_is_a_usage_error(small, capsys):
    assert main(["why-not", small[0], str(small[1])]) == 2
    assert "asks for nothing" in capsys.readouterr().err
    assert (
        main(["why-not", small[0], str(small[1]), "--recompute", "a", "--recompute", "b=full"]) == 2
    )
    assert "write PATTERN=VALUE" in capsys.readouterr().err


def test_a_model_of_another_batch_is_refused(small, capsys):
    assert main(["why-not", small[0], str(small[1]), "--tp", "1", "--batch", "4"]) == 2
    assert "the plan was made for a model with hash" in capsys.readouterr().err


def test_a_plan_for_a_cluster_file_asks_for_the_file(small, capsys, tmp_path):
    model, path = small
    plan = replace(load_plan(path), assumptions=("figures from cluster file 'lab.json'",))
    save_plan(plan, tmp_path / "p.json")
    assert main(["why-not", model, str(tmp_path / "p.json"), "--tp", "1"]) == 2
    assert "--devices FILE" in capsys.readouterr().err


def test_infeasible_and_contradictory_are_refusals(small, capsys):
    words = ["plan", small[0], "--devices", "2:h100-sxm", "--memory-limit", "1KiB", "--json"]
    assert main(words) == 1
    error = spoken(capsys)["error"]
    assert error["type"] == "InfeasibleError"
    assert error["shortfalls"][0]["available"] == 1024
    assert error["relaxations"]
    assert set(error["relaxations"][0]) == {"what", "time_s", "plan", "peak_bytes"}
    assert main(["plan", small[0], "--devices", "2:h100-sxm", "--tp", "2", "--pp", "2"]) == 1
    assert "constraints --tp 2 and --pp 2 contradict each other" in capsys.readouterr().err


def test_diff_of_two_files(example_plan, tmp_path, capsys):
    pinned = AppliedConstraint(name="dp", value="8", origin="user")
    other = replace(
        example_plan, mesh=MeshShape(dp=8), stages=example_plan.stages[:1], constraints=(pinned,)
    )
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    save_plan(example_plan, first)
    save_plan(other, second)
    assert main(["diff", str(first), str(second)]) == 0
    assert "  mesh: pp2 x dp2 x tp2 -> dp8\n" in capsys.readouterr().out
    assert main(["diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out.startswith("The plans are the same\n")
    assert main(["diff", str(first), str(second), "--json"]) == 0
    assert {"what": "mesh", "before": "pp2 x dp2 x tp2", "after": "dp8"} in spoken(capsys)["shape"]


def test_explain_without_a_plan_file_says_how(capsys):
    assert main(["explain", "train:build"]) == 2
    assert "no plan file is named" in capsys.readouterr().err


def test_replan_tells_what_travels(small, capsys, tmp_path):
    out = tmp_path / "new.json"
    words = ["replan", small[0], str(small[1]), "--devices", "1:h100-sxm"]
    plan = load_plan(small[1])
    free = replace(plan, constraints=tuple(c for c in plan.constraints if c.origin != "user"))
    save_plan(free, tmp_path / "free.json")
    words[2] = str(tmp_path / "free.json")
    assert main([*words, "-o", str(out), "--json"]) == 0
    told = spoken(capsys)
    assert told["plan"]["num_devices"] == 1
    assert load_plan(out).num_devices == 1
    assert main([*words, "--width", "60"]) == 0
    printed = capsys.readouterr().out
    assert "to move: " in printed
    assert max(map(len, printed.splitlines())) <= 60
    assert main([*words[:3]]) == 2
    assert "replan: name the new --devices" in capsys.readouterr().err
    assert main([*words[:3], "--slower", "half"]) == 2
    assert "write MACHINE=FACTOR" in capsys.readouterr().err


def test_cost_is_asked_for_in_the_shell(small, capsys, tmp_path):
    out = tmp_path / "cheap.json"
    words = ["plan", small[0], "--devices", "2:h100-sxm", "--objective", "cost", "-o", str(out)]
    assert main(words) == 2
    assert "give --cost-per-hour h100-sxm=..." in capsys.readouterr().err
    assert main([*words, "--cost-per-hour", "h100-sxm=dear"]) == 2
    assert "write DEVICE=PRICE, such as h100-sxm=2.5" in capsys.readouterr().err
    assert main([*words, "--cost-per-hour", "h100-sxm=3", "--json"]) == 0
    told = spoken(capsys)
    assert told["cost_per_step"] == pytest.approx(told["time_s"] / 1200 * told["num_ranks"])
    asked = ["why-not", small[0], str(out), "--tp", "2", "--cost-per-hour", "3", "--json"]
    assert main(asked) == 0
    answer = spoken(capsys)
    assert answer["verdict"] == "dearer"
    assert answer["costs"][1] > answer["costs"][0] == pytest.approx(told["cost_per_step"])
    assert answer["headline"].startswith("tp=2: dearer by ")


def test_run_trains_here_where_one_device_is_enough(small, capsys, tmp_path):
    plan = tmp_path / "one.json"
    assert main(["plan", small[0], "--devices", "1:cpu", "-o", str(plan), "--json"]) == 0
    capsys.readouterr()
    assert main(["run", small[0], str(plan), "--steps", "2", "--json"]) == 0
    told = spoken(capsys)
    assert told["launched"] is True
    assert len(told["steps"]) == 2
    assert told["steps"][1]["loss"] < told["steps"][0]["loss"]


def test_run_says_how_to_launch_what_this_machine_does_not_have(small, capsys, tmp_path):
    plan = replace(load_plan(small[1]), num_devices=2, cluster="2x1:h100-sxm")
    save_plan(plan, tmp_path / "far.json")
    assert main(["run", small[0], str(tmp_path / "far.json"), "--json"]) == 1
    told = spoken(capsys)
    assert told["launched"] is False
    words = [small[0], str(tmp_path / "far.json")]
    script = f"-m autopar run {words[0]} {words[1]} --steps 3 --lr 0.0001 --json"
    assert told["command"] == (
        "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
        f"{script}"
    )
    assert told["note"] == "on every machine; HOST: the address of one of them"
    assert main(["run", *words]) == 1
    assert f"  {told['command'].removesuffix(' --json')}\n" in capsys.readouterr().out


def test_run_gives_a_command_for_one_machine_that_runs_as_it_stands(small, capsys, tmp_path):
    model, path = small
    assert main(["run", model, str(path), "--json"]) == 1
    told = spoken(capsys)
    script = f"-m autopar run {model} {path} --steps 3 --lr 0.0001 --json"
    assert told["command"] == f"torchrun --nproc-per-node 2 {script}"
    assert told["note"] == ""
    named = replace(load_plan(path), cluster="2:lab-gpu")  # of a file
    save_plan(named, tmp_path / "lab.json")
    assert main(["run", model, str(tmp_path / "lab.json"), "--json"]) == 1
    told = spoken(capsys)
    assert told["command"].startswith("torchrun --nnodes MACHINES --nproc-per-node N ")
    assert told["note"] == "on every machine, N: its devices; HOST: the address of one of them"
    unequal = replace(named, cluster="1x1:h100-sxm + 1x2:h100-sxm", num_devices=3)
    save_plan(unequal, tmp_path / "unequal.json")
    assert main(["run", model, str(tmp_path / "unequal.json"), "--json"]) == 1
    assert spoken(capsys)["note"].startswith("on every machine, N = 1, 2; HOST: ")


def test_run_tells_whether_its_prediction_was_measured(small, capsys, tmp_path):
    plan = tmp_path / "one.json"
    assert main(["plan", small[0], "--devices", "1:cpu", "-o", str(plan), "--json"]) == 0
    for prices, note in (("roofline", ", unprofiled (see autopar profile)"), ("profile of x", "")):
        save_plan(replace(load_plan(plan), provenance={"prices": prices}), plan)
        capsys.readouterr()
        assert main(["run", small[0], str(plan), "--steps", "1"]) == 0
        predicted = capsys.readouterr().out.splitlines()[-1]
        assert predicted == f"predicted: {format_time(load_plan(plan).time_s)} per step{note}"
        assert main(["run", small[0], str(plan), "--steps", "1", "--json"]) == 0
        assert spoken(capsys)["prices"] == prices


def test_why_not_another_precision(small, capsys):
    model, plan = small
    assert main(["why-not", model, str(plan), "--precision", "bf16", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["asked"] == "precision='bf16'"
    assert any("the numbers change: bf16 is computed in" in text for text in answer["reasons"])
    assert any("bf16" in text for text in answer["differences"])
    assert main(["why-not", model, str(plan), "--precision", "bf16", "--tp", "1"]) == 0
    assert "tp=1, precision='bf16': " in capsys.readouterr().out
