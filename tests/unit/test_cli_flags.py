"""At the command line texts name flags, not the keywords of Python."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.cli.decisions import decisions
from autopar.cli.flags import as_flags, in_flags
from autopar.cli.parser import build_parser
from tests.scripts import SMALL_NET

PLAN = build_parser().parse_args(["plan", "m:f", "--devices", "1"]).flags
REPLAN = build_parser().parse_args(["replan", "m:f", "p.json"]).flags
KEYWORD = re.compile(r"\b[a-z]+(?:_[a-z]+)*=(?![.\d])|\b\w+_\w+ (?:is|out)\b")


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        (
            REPLAN,
            "replan: name the new devices=, or what changed: lost= or slower=",
            "replan: name the new --devices, or what changed: --lost or --slower",
        ),
        (
            REPLAN,
            "(reading it is not in the seconds: give checkpoint_bytes_per_s=)",
            "(reading it is not in the seconds: give --checkpoint-speed)",
        ),
        (REPLAN, "thorough=True (--thorough) searches all", "--thorough searches all"),
        (REPLAN, "constraint tp=2: 3 heads", "constraint tp=2: 3 heads"),  # replan has no --tp
        (
            PLAN,
            "constraints tp=2 and pp=2 contradict each other",
            "constraints --tp 2 and --pp 2 contradict each other",
        ),
        (PLAN, "zero=[1, 2] for 2 stages", "--zero 1,2 for 2 stages"),
        (PLAN, "constraint warmup=(1,) goes with", "constraint --warmup 1 goes with"),
        (PLAN, "dp=any, zero=[1]", "--dp any, --zero 1"),
        (PLAN, "sequence_parallel=False and", "--no-sequence-parallel and"),
        (PLAN, "placements={'*.up': 'S(0)'}", "--placement '*.up=S(0)'"),
        (PLAN, "stages=['a.b', 'c']", "--stage a.b --stage c"),
        (PLAN, "constraint placements: 'x' names", "constraint --placement: 'x' names"),
        (PLAN, "leave schedule out, or", "leave --schedule out, or"),
        (PLAN, "schedule: zbv -> 1f1b", "schedule: zbv -> 1f1b"),  # a line of a comparison
        (PLAN, "schedule: 'x' is none", "--schedule: 'x' is none"),
        (PLAN, "memory_limit is 0 bytes", "--memory-limit is 0 bytes"),
        (
            PLAN,
            "give cost_per_hour={'h100-sxm': ...}, or cost_per_hour of the device in a file",
            "give --cost-per-hour h100-sxm=..., or cost_per_hour of the device in a file",
        ),
        (PLAN, "ask why_not(tp=2) for a plan", "ask autopar why-not ... --tp 2 for a plan"),
        (PLAN, "pass loss=, or leave it out", "pass loss=, or leave it out"),  # takes a script
        (PLAN, "p.grad_zero=1 of x.dp=2 'tp=3'", "p.grad_zero=1 of x.dp=2 'tp=3'"),
    ],
)
def test_keywords_become_flags(flags, before, after):
    assert as_flags(before, flags) == after
    assert in_flags({"what": [before, 1]}, flags) == {"what": [after, 1]}


def test_flags_that_are_told_are_read_back_as_the_same_decisions():
    given = {
        "dp": 2, "zero": [2, 1], "schedule": "1f1b", "warmup": [3, 1], "recompute": {"a.*": "full"},
        "placements": {"*.up": "S(0)", "b": "R"}, "stages": ["c"], "sequence_parallel": False,
        "offload": ["optimizer", "activations"],
    }  # fmt: skip
    text = as_flags(", ".join(f"{name}={value!r}" for name, value in given.items()), PLAN)
    words = shlex.split(re.sub(r", (?=--)", " ", text))
    args = build_parser().parse_args(["plan", "m:f", "--devices", "2", *words])
    assert decisions(args) == given


def test_the_readme_has_every_flag_with_its_commands():
    readme = (Path(autopar.__file__).parent / "cli" / "README.md").read_text()
    documented: dict[str, set[str]] = {}
    commands = {
        "plan",
        "report",
        "explain",
        "why-not",
        "diff",
        "replan",
        "verify",
        "run",
        "profile",
    }
    for flags, given in re.findall(r"^\| (`--[^|]*) \| ([^|]*) \|", readme, re.MULTILINE):
        named = commands if given == "all" else set(given.split(", "))
        assert named <= commands
        for flag in re.findall(r"`(--?[a-z-]+)`", flags):
            assert flag not in documented
            documented[flag] = named
    words = {
        "plan": ["m:f", "--devices", "1"], "report": ["p"], "explain": ["p"], "profile": [],
        "why-not": ["m:f", "p"], "diff": ["a", "b"], "replan": ["m:f", "p"],
        "verify": ["m:f", "p"], "run": ["m:f", "p"],
    }  # fmt: skip
    found: dict[str, set[str]] = {}
    for command in commands:
        for flag in build_parser().parse_args([command, *words[command]]).flags:
            found.setdefault(flag, set()).add(command)
    del found["-h"], found["--help"]
    assert documented == found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and a plan of it."""
    folder = tmp_path_factory.mktemp("flags")
    script, plan = folder / "flagged_net.py", folder / "plan.json"
    script.write_text(SMALL_NET)
    path = list(sys.path)
    words = ["plan", f"{script}:build", "--devices", "2x1:h100-sxm", "-o", str(plan), "--json"]
    assert main([*words, "--dp", "2"]) == 0
    sys.path[:] = path
    return f"{script}:build", str(plan)


BAD_PLANS = [
    "--dp 0", "--tp -1", "--pp 3", "--virtual 0", "--num-microbatches 0", "--num-microbatches 5",
    "--zero 9", "--zero 1,2,3", "--schedule foo", "--schedule gpipe --virtual 2",
    "--schedule gpipe --warmup 1", "--warmup 1,2,3", "--recompute foo", "--placement x=R",
    "--placement up.weight=foo", "--stage nothing", "--stage down --pp 1", "--expert-capacity 0",
    "--expert-capacity 1.5", "--offload foo", "--memory-limit 0", "--memory-limit 1KiB",
    "--optimizer foo", "--cost-limit 3", "--objective cost", "--cost-per-hour -2",
    "--objective cost --cost-per-hour l4=3", "--mode inference --schedule 1f1b",
    "--profile /no/such.json", "--tp 2 --pp 2", "--mode inference --recompute full",
]  # fmt: skip
BAD_REPLANS = [
    "", "--lost 7", "--lost -1", "--slower 0=0", "--slower 9=0.5", "--lost 0 --slower 0=0.5",
    "--devices 4:h100-sxm --lost 0", "--lost 0 --lost 1", "--lost 0 --checkpoint-speed 0",
    "--devices 1:h100-sxm --before 9:h100-sxm",
]  # fmt: skip


@pytest.mark.parametrize("words", BAD_PLANS)
def test_what_is_wrong_with_a_plan_is_told_with_flags(small, capsys, words):
    code = main(["plan", small[0], "--devices", "2x1:h100-sxm", "--json", *words.split()])
    told = capsys.readouterr()
    if code:
        assert not KEYWORD.search(told.err), told.err
        assert not KEYWORD.search(json.loads(told.out)["error"]["message"])


@pytest.mark.parametrize("words", BAD_REPLANS)
def test_what_is_wrong_with_a_change_is_told_with_flags(small, capsys, words):
    code = main(["replan", *small, *words.split()])
    told = capsys.readouterr()
    assert code in (1, 2)
    assert not KEYWORD.search(told.err), told.err


def test_the_old_cluster_is_called_before_and_not_devices(small, capsys):
    assert main(["replan", *small, "--devices", "1:h100-sxm", "--before", "9:h100-sxm"]) == 2
    assert "--before names 9 (8:h100-sxm + 1:h100-sxm); leave --before out" in (
        capsys.readouterr().err
    )
    assert main(["replan", *small, "--devices", "1:h100-sxm", "--before", "9:foo"]) == 2
    assert "--before: no device is called 'foo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--slower 0=0", "--slower '0=0': give a factor above 0"),
        ("--slower 0=nan", "--slower '0=nan': give a factor above 0"),
        ("--lost 7 --lost 8", "has no machine 7, its machines are 0 to 1"),
        ("--lost 0 --lost 1", "all 2 machines of 2x1:h100-sxm are lost"),
    ],
)
def test_machines_that_are_lost_or_slow_are_checked(small, capsys, words, message):
    assert main(["replan", *small, *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_several_stages_on_one_rank_are_refused(small, capsys):
    words = ["plan", small[0], "--devices", "2:h100-sxm", "--virtual", "2", "--pp", "1"]
    assert main(words) == 1
    assert "constraints --virtual 2 and --pp 1: stages of one rank" in capsys.readouterr().err


def test_a_learning_rate_below_0_is_refused(small, capsys):
    with pytest.raises(SystemExit):
        main(["run", *small, "--lr", "-1"])
    assert "'-1' is no learning rate" in capsys.readouterr().err


def test_a_file_that_is_needed_is_asked_for_with_the_flag(small, capsys, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(Path(small[1]).read_text())
    assert main(["why-not", small[0], str(path), "--devices", "9:h100-sxm", "--tp", "2"]) == 2
    assert not KEYWORD.search(capsys.readouterr().err)
