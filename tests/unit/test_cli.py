"""The command line: exit codes, messages, JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from autopar.cli import load_model, main
from autopar.errors import ConfigError, PlanError
from autopar.plan.io import plan_hash, save_plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def saved(example_plan, tmp_path):
    path = tmp_path / "plan.json"
    save_plan(example_plan, path)
    return path


def test_report_prints_the_plan_as_text(saved, capsys):
    assert main(["report", str(saved)]) == 0
    assert "1F1B, 4 micro-batches\n" in capsys.readouterr().out


def test_report_takes_a_width(saved, capsys):
    assert main(["report", str(saved), "--width", "60"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60
    with pytest.raises(SystemExit):
        main(["report", str(saved), "--width", "20"])
    assert "the least is 60" in capsys.readouterr().err


def test_report_writes_a_trace(saved, capsys, tmp_path):
    path = tmp_path / "step.json"
    assert main(["report", str(saved), "--trace", str(path)]) == 0
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"pipeline rank 0, ranks 0-3", "pipeline rank 1, ranks 4-7"}
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert main(["report", str(saved), "--trace", str(tmp_path / "none" / "x.json")]) == 2
    assert "choose a file in a folder that exists" in capsys.readouterr().err


def test_report_prints_json_for_programs(saved, capsys, example_plan):
    assert main(["report", str(saved), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["hash"] == plan_hash(example_plan)
    assert summary["idle_ranks"] == [8]
    assert summary["stages"][0]["memory"]["activations_bytes"] == 2 * 2**30
    assert "splits" not in summary


def test_a_users_error_ends_with_code_2_and_the_message_alone(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autopar: can't read the plan")
    assert "Traceback" not in error


def test_debug_shows_where_an_error_came_from(tmp_path):
    with pytest.raises(PlanError):
        main(["report", str(tmp_path / "none.json"), "--debug"])


def test_an_edited_plan_needs_accept_edits(saved, capsys):
    saved.write_text(saved.read_text().replace('"num_microbatches": 4', '"num_microbatches": 8'))
    assert main(["report", str(saved)]) == 2
    assert "--accept-edits" in capsys.readouterr().err
    assert main(["report", str(saved), "--accept-edits"]) == 0


def test_report_does_not_load_torch(saved):
    code = (
        f"import sys; from autopar.cli import main; main(['report', {str(saved)!r}]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_module_and_version():
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"autopar {autopar.__version__}\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "my_model.py"
    path.write_text(
        "def build(batch=2):\n    return 'model', {'ids': batch}\n"
        "def fixed():\n    return 'model', {}\n"
        "def wrong():\n    return 'model'\n"
    )
    return path


def test_a_model_comes_from_a_file_or_a_module(script, monkeypatch):
    assert load_model(f"{script}:build", None) == ("model", {"ids": 2})
    assert load_model(f"{script}:build", 8) == ("model", {"ids": 8})
    monkeypatch.chdir(script.parent)
    assert load_model("my_model:fixed", None) == ("model", {})


@pytest.mark.parametrize(
    ("name", "batch", "message"),
    [
        ("{}", None, "names no function; write MODULE:FUNCTION"),
        ("{}:bild", None, "has no function 'bild'; check the spelling"),
        ("{}:fixed", 4, "has no parameter 'batch'; add one, or leave --batch out"),
        ("{}:wrong", None, r"returned str, not a pair; return \(model, inputs\)"),
        ("{}x.py:build", None, "there is no file"),
        ("no_such_module:build", None, "there is no module 'no_such_module'"),
    ],
)
def test_a_model_that_cannot_be_had_is_explained(script, name, batch, message):
    where = script.with_suffix("") if name == "{}" else script
    with pytest.raises(ConfigError, match=message):
        load_model(name.format(where), batch)


def test_profile_measures_once_and_keeps_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    assert main(["profile", "--budget", "0.5", "--out", str(out)]) == 0
    before = out.read_text()
    assert main(["profile", "--if-missing", "--out", str(out)]) == 0
    assert out.read_text() == before
    assert str(out) in capsys.readouterr().out


def test_profile_refuses_a_budget_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--budget", "0", "--out", "never-written.json"]) == 2
    assert "must be above 0" in capsys.readouterr().err


def test_a_missing_folder_for_the_plan_is_refused_before_planning(tmp_path, capsys):
    code = main(["plan", "nothing.py:build", "--devices", "2", "-o", str(tmp_path / "no" / "p")])
    assert code == 2
    assert "there is no folder" in capsys.readouterr().err


def test_plan_takes_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "small.py"
    script.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.a(x).square().sum()\n"
        "def build():\n"
        "    return Net(), {'x': torch.randn(8, 8)}\n"
    )
    words = ["plan", f"{script}:build", "--devices", "4:cpu", "--dp", "4", "--zero", "1", "--json"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["mesh"]["dp"] == 4
    assert plan["stages"][0]["zero_level"] == 1
    assert {c["name"] for c in plan["constraints"] if c["origin"] == "user"} == {"dp", "zero"}
    assert main([*words[:-2], "1,2"]) == 1
    assert "--zero 1,2 for 2 stages on 4 devices" in capsys.readouterr().err
    assert main([*words[:-2], "one"]) == 2
    assert "--zero 'one': write whole numbers" in capsys.readouterr().err
    assert main([*words, "--offload", "optimizer"]) == 0
    assert json.loads(capsys.readouterr().out)["offload"] == "optimizer"


def test_an_interrupted_profile_says_how_to_go_on_if_it_was_begun(monkeypatch, capsys, tmp_path):
    def interrupted(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.api.profiling.profile_machine", interrupted)
    file = tmp_path / "p.json"
    assert main(["profile", "--out", str(file)]) == 130
    assert capsys.readouterr().err == "autopar: interrupted\n"
    file.touch()
    assert main(["profile", "--out", str(file)]) == 130
    assert capsys.readouterr().err == (
        "autopar: interrupted; --resume goes on with what was measured\n"
    )
