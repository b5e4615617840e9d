"""The words of the command line."""

from __future__ import annotations

import argparse
from math import isfinite
from pathlib import Path

import autopar
from autopar.cli import asking, commands, running
from autopar.report.text import LEAST_WIDTH

SUMMARY = (
    "Plan how a PyTorch model is trained on a cluster, ask why the plan is as it is, check it and "
    "run it. Exit codes: 0 done, 1 refused (nothing fits, constraints contradict), 2 usage."
)


def build_parser() -> argparse.ArgumentParser:
    """All commands; ``args.run`` is the function of the one that was given."""
    parser = argparse.ArgumentParser(prog="autopar", description=SUMMARY)
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    found = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    _plan(found)
    _report(found)
    _explain(found)
    _why_not(found)
    _diff(found)
    _replan(found)
    _profile(found)
    _verify(found)
    _run(found)
    for command in found.choices.values():  # for texts that name them
        command.set_defaults(flags=frozenset(command._option_string_actions))
    return parser


Commands = argparse._SubParsersAction  # argparse has no public name for what adds commands


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _prices(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--profile", metavar="FILE", help="prices from 'autopar profile --out FILE'; this machine's"
    )


def _text() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--width", type=_width, metavar="N", help="columns of the text; those of the terminal"
    )
    return parser


def _model() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="returns (model, inputs)")
    _batch(parser)
    return parser


def _batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, help="handed to FUNCTION as its parameter 'batch'")


def _saved() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--accept-edits", action="store_true", help="take a plan edited by hand")
    return parser


def _trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", metavar="FILE", help="write the simulated step for ui.perfetto.dev"
    )


def _plan(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "plan", parents=[_model(), _common(), _text()], help="make a plan for a model"
    )
    parser.add_argument(
        "--devices", required=True, help="a count, '4x8:h100-sxm', or a cluster file"
    )
    parser.add_argument("--memory-limit", metavar="AMOUNT", help="bytes per device, such as 16GiB")
    _prices(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--optimizer", default="adamw", help="kind to keep state for; adamw")
    parser.add_argument("--mode", choices=["train", "inference"], help="inference: forwards only")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="compute in it, float32 masters"
    )
    _time_limit(parser, "guard of the search")
    _trace(parser)
    _goal(parser)
    _decisions(parser, "decisions", "what is left out is the solver's to decide")
    parser.set_defaults(run=commands.plan)


def _goal(parser: argparse.ArgumentParser) -> None:
    goal = parser.add_argument_group("what is minimised")
    goal.add_argument(
        "--objective", choices=["time", "cost", "time within cost"], default="time", help="time"
    )
    goal.add_argument("--cost-limit", type=float, metavar="PRICE", help="of a step, for the last")
    _costs(goal)


def _costs(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--cost-per-hour", action="append", metavar="DEVICE=PRICE",
        help="of one device, in any currency; a number alone for all",
    )  # fmt: skip


def _time_limit(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--time-limit", type=_seconds, metavar="SECONDS", help=text)


def _decisions(parser: argparse.ArgumentParser, title: str, text: str) -> None:
    """Everything that ``autopar.compile`` takes as a constraint."""
    fixed = parser.add_argument_group(title, text)
    for name in ("dp", "tp", "pp", "virtual", "num-microbatches"):
        fixed.add_argument(f"--{name}", type=int, metavar="N")
    fixed.add_argument("--zero", metavar="N", help="ZeRO level, or one for each stage: N,N,...")
    fixed.add_argument(
        "--schedule", metavar="WORD", help="gpipe, 1f1b, interleaved, zero_bubble, zbv"
    )
    fixed.add_argument(
        "--warmup", metavar="N,N,...", help="1F1B: forwards of each rank before its first backward"
    )
    fixed.add_argument(
        "--recompute", action="append", metavar="WORD", help="none, selective, full; or MODULE=WORD"
    )
    fixed.add_argument(
        "--placement", action="append", metavar="PATTERN=PLACEMENT", help="'*.up.weight=S(0)'"
    )
    fixed.add_argument(
        "--stage", action="append", metavar="MODULE", help="begins a stage but the first"
    )
    fixed.add_argument(
        "--sequence-parallel", action=argparse.BooleanOptionalAction, default=None,
        help="force or forbid norms on shards of the sequence",
    )  # fmt: skip
    fixed.add_argument("--microbatch-statistics", action="store_true", default=None)
    fixed.add_argument("--expert-capacity", type=float, metavar="SHARES")
    fixed.add_argument(
        "--offload", metavar="WORD[,WORD]",
        help="never, allowed; optimizer: its state in host memory; activations: saved values there",
    )  # fmt: skip


def _report(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "report", parents=[_saved(), _common(), _text()], help="print a saved plan"
    )
    parser.add_argument("plan", metavar="PLAN.json")
    _trace(parser)
    parser.set_defaults(run=commands.report)


def _explain(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "explain",
        parents=[_saved(), _common(), _text()],
        help="what binds, what more would be worth, who lost and why",
        usage="autopar explain [MODULE:FUNCTION] PLAN.json [PATTERN] [options]",
        description="Without the model the plan alone is asked. PATTERN names parameters.",
    )
    parser.add_argument("words", nargs="+", metavar="[MODULE:FUNCTION] PLAN.json [PATTERN]")
    _batch(parser)
    _devices_of_plan(parser)
    parser.set_defaults(run=asking.explain)


def _devices_of_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", help="those of the plan if left out")
    _prices(parser)
    _time_limit(parser, "guard of each search")
    _costs(parser)


def _why_not(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "why-not",
        parents=[_model(), _saved(), _common(), _text()],
        help="what another decision would do: solved again under it",
    )
    parser.add_argument("plan", metavar="PLAN.json")
    _devices_of_plan(parser)
    _decisions(parser, "the other decision", "at least one")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="compute in it: numbers change"
    )
    parser.set_defaults(run=asking.why_not)


def _diff(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "diff", parents=[_saved(), _common(), _text()], help="what differs between two plans"
    )
    parser.add_argument("plan", metavar="BEFORE.json")
    parser.add_argument("other", metavar="AFTER.json")
    parser.set_defaults(run=commands.diff)


def _replan(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "replan",
        parents=[_model(), _saved(), _common(), _text()],
        help="plan again after the cluster changed: what differs, what travels, when it pays",
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--devices", help="the new cluster; or say what changed:")
    parser.add_argument(
        "--lost", type=int, action="append", metavar="MACHINE", help="index of one that is gone"
    )
    parser.add_argument(
        "--slower", action="append", metavar="MACHINE=FACTOR", help="such as 3=0.5: half the speed"
    )
    parser.add_argument("--before", metavar="DEVICES", help="the old cluster, if it was a file")
    parser.add_argument("--thorough", action="store_true", help="search all shapes")
    _prices(parser)
    parser.add_argument(
        "--checkpoint-speed", metavar="AMOUNT", help="read in a second by all ranks, such as 10GB"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the new plan as JSON")
    _time_limit(parser, "guard of each search")
    _costs(parser)
    parser.set_defaults(run=asking.replan)


def _profile(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "profile", parents=[_common()], help="measure this machine; later plans made here use it"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path,
        help="instead of where plans look for it; for --profile FILE of plan",
    )  # fmt: skip
    parser.add_argument(
        "--budget", metavar="SECONDS", type=float, default=60.0,
        help="no further point is started after it; 60",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="measure its operators too, at a rank's shapes"
    )
    _batch(parser)
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--resume", action="store_true", help="measure what the file lacks; also for more ranks"
    )
    kept.add_argument("--if-missing", action="store_true", help="keep an existing profile")
    parser.set_defaults(run=commands.profile)


def _verify(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "verify",
        parents=[_model(), _saved(), _common()],
        help="compare a plan's numbers with one device",
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.set_defaults(run=commands.verify)


def _run(found: Commands[argparse.ArgumentParser]) -> None:
    parser = found.add_parser(
        "run",
        parents=[_model(), _saved(), _common()],
        help="train a few steps on one batch under a plan, and time them",
        description="Starts the ranks itself where this machine has the devices of the plan, and "
        "says how to start them elsewhere. Under torchrun each rank runs.",
    )
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--steps", type=_positive, default=3, metavar="N", help="3")
    parser.add_argument("--lr", type=_rate, default=1e-4, metavar="RATE", help="learning rate")
    parser.set_defaults(run=running.run)


def _width(text: str) -> int:
    columns = int(text) if text.isdecimal() else 0
    if columns < LEAST_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is no width; the least is {LEAST_WIDTH}")
    return columns


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds above 0, such as 30")
    return seconds


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not (isfinite(rate) and rate >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no learning rate; give one of at least 0")
    return rate


def _positive(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps; the least is 1")
    return count
