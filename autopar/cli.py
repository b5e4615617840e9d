"""The command line: parse, call the API, print. ``python -m autopar --help`` lists the commands.

A model is named as ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``. The function returns the model and
one global batch, ``(model, inputs)``; if it has a parameter ``batch``, ``--batch`` is handed to it.

Exit codes: 0 done; 2 the user can mend it (the message says how); 130 interrupted; 1 anything else.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import autopar
from autopar.errors import AutoparError, ConfigError
from autopar.plan.io import Json, json_record, load_plan, plan_hash, save_plan
from autopar.report.text import LEAST_WIDTH, print_plan
from autopar.units import parse_bytes
from cost_models.plan_simulation import device_words, plan_memory, simulate_plan
from cost_models.trace import trace_events, write_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from autopar.api.options import ConstraintOptions
    from autopar.plan.types import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    try:
        return cast("Callable[[argparse.Namespace], int]", args.run)(args)
    except AutoparError as error:
        if args.debug:
            raise
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        rest = "; --resume goes on with what was measured" if args.run is _profile else ""
        print(f"autopar: interrupted{rest}", file=sys.stderr)
        return 130  # as shells do
    except BrokenPipeError:  # the reader of our output, such as "head", has gone
        sys.stderr.close()
        return 1


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("--json", action="store_true", help="print JSON instead of text")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("model", metavar="MODULE:FUNCTION", help="returns (model, inputs)")
    model.add_argument("--batch", type=int, help="handed to FUNCTION as its parameter 'batch'")
    saved = argparse.ArgumentParser(add_help=False)
    saved.add_argument("--accept-edits", action="store_true", help="take a plan edited by hand")

    parser = argparse.ArgumentParser(prog="autopar", description=_summary())
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", parents=[model, common], help="make a plan for a model")
    plan.add_argument("--devices", required=True, help="a count, '4x8:h100-sxm', or a cluster file")
    plan.add_argument("--memory-limit", metavar="AMOUNT", help="bytes per device, such as 16GiB")
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
    plan.add_argument("--optimizer", default="adamw", help="kind to keep state for; adamw")
    plan.add_argument("--mode", choices=["train", "inference"], help="inference: forwards only")
    plan.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="compute in it, float32 masters"
    )
    plan.add_argument("--time-limit", type=float, metavar="SECONDS", help="guard of the search")
    fixed = plan.add_argument_group("decisions", "what is left out is the solver's to decide")
    for name in ("dp", "tp", "pp", "virtual", "num-microbatches", "zero"):
        fixed.add_argument(f"--{name}", type=int, metavar="N")
    kinds = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]
    fixed.add_argument("--schedule", choices=kinds)
    fixed.add_argument(
        "--warmup", metavar="N,N,...", type=_depths, help="1F1B: forwards before the first backward"
    )
    fixed.add_argument("--recompute", choices=["none", "selective", "full"])
    plan.set_defaults(run=_plan)

    report = commands.add_parser("report", parents=[saved, common], help="print a saved plan")
    report.add_argument("plan", metavar="PLAN.json")
    report.add_argument(
        "--width", type=_width, metavar="N", help="columns of the text; those of the terminal"
    )
    report.add_argument(
        "--trace", metavar="FILE", help="write the simulated step for ui.perfetto.dev"
    )
    report.set_defaults(run=_report)

    profile = commands.add_parser(
        "profile", parents=[common], help="measure this machine; later plans made here use it"
    )
    profile.add_argument("--out", metavar="FILE", type=Path, help="not where plans look for it")
    profile.add_argument("--budget", metavar="SECONDS", type=float, default=60.0)
    profile.add_argument(
        "--model", metavar="MODULE:FUNCTION", help="measure its operators too, at a rank's shapes"
    )
    profile.add_argument("--batch", type=int, help="handed to FUNCTION as its parameter 'batch'")
    kept = profile.add_mutually_exclusive_group()
    kept.add_argument(
        "--resume", action="store_true", help="measure what the file lacks; also for more ranks"
    )
    kept.add_argument("--if-missing", action="store_true", help="keep an existing profile")
    profile.set_defaults(run=_profile)

    verify = commands.add_parser(
        "verify", parents=[model, saved, common], help="compare a plan's numbers with one device"
    )
    verify.add_argument("plan", metavar="PLAN.json")
    verify.set_defaults(run=_verify)
    return parser


def _summary() -> str:
    return (
        "Plan how a PyTorch model is trained on a cluster, and check and show such plans. Plans "
        "run in your own script: autopar.compile() under torchrun."
    )


def _plan(args: argparse.Namespace) -> int:
    from autopar import api  # here, since torch takes seconds and "report" does without

    if args.output and not Path(args.output).resolve().parent.is_dir():
        raise ConfigError(
            f"--output: there is no folder {Path(args.output).resolve().parent} for the plan; make "
            "it, or choose another"
        )
    model, inputs = load_model(args.model, args.batch)
    devices = int(args.devices) if args.devices.isdecimal() else args.devices
    compiled = api.compile(
        model,
        devices=devices,
        inputs=inputs,
        memory_limit=None if args.memory_limit is None else _bytes(args.memory_limit),
        optimizer=args.optimizer,
        mode=args.mode,
        time_limit_s=args.time_limit,
        precision=args.precision,
        **_decisions(args),
    )
    plan = cast("Plan", compiled.plan)
    if args.output:
        save_plan(plan, args.output)
    _show(plan, as_json=args.json)
    return 0


def _decisions(args: argparse.Namespace) -> ConstraintOptions:
    """The decisions that were given, as arguments of ``compile``."""
    names = ("dp", "tp", "pp", "virtual", "num_microbatches", "zero", "schedule", "recompute",
             "warmup")  # fmt: skip
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return cast("ConstraintOptions", given)


def _report(args: argparse.Namespace) -> int:
    plan = load_plan(args.plan, accept_edits=args.accept_edits)
    if args.trace:
        simulation = simulate_plan(plan)
        events = trace_events(
            simulation,
            plan_memory(plan, simulation),
            rank_words=lambda rank: f"pipeline rank {rank}, {device_words(plan, rank)}",
        )
        write_trace(args.trace, events)
    _show(plan, as_json=args.json, width=args.width)
    return 0


def _profile(args: argparse.Namespace) -> int:
    from autopar.api.profiling import profile_machine
    from cost_models.profile import dump_profile

    named = args.model
    path, profile = profile_machine(
        args.out,
        budget_s=args.budget,
        only_if_missing=args.if_missing,
        resume=args.resume,
        build=None if named is None else lambda: load_model(named, args.batch),
    )
    if os.environ.get("RANK", "0") != "0":  # rank 0 speaks for all
        return 0
    if args.json:
        print(dump_profile(profile))
    else:
        rest = "" if profile.is_complete else "; out of time, go on with --resume"
        print(f"{profile.machine}: {len(profile.points)} points of {profile.date} in {path}{rest}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    plan = load_plan(args.plan, accept_edits=args.accept_edits)
    from autopar import api  # after a damaged plan was refused: torch takes seconds

    model, inputs = load_model(args.model, args.batch)
    result = api.verify(model, plan, inputs)
    print(json.dumps(json_record(result), indent=1) if args.json else result)
    return 0


def _show(plan: Plan, *, as_json: bool, width: int | None = None) -> None:
    if as_json:
        print(json.dumps(plan_summary(plan), indent=1))
    else:
        print_plan(plan, width=width)


def _depths(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of depths, such as 3,2,1")
    return [int(part) for part in parts]


def _width(text: str) -> int:
    columns = int(text) if text.isdecimal() else 0
    if columns < LEAST_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is no width; the least is {LEAST_WIDTH}")
    return columns


def plan_summary(plan: Plan) -> dict[str, Json]:
    """The plan without its splits, for programs: plain values, units in the names."""
    table = json_record(plan)
    del table["splits"]
    table["hash"] = plan_hash(plan)
    table["num_ranks"] = plan.mesh.num_ranks
    table["idle_ranks"] = list(range(plan.mesh.num_ranks, plan.num_devices))
    return table


def load_model(name: str, batch: int | None) -> tuple[torch.nn.Module, Mapping[str, object]]:
    """Call the user's function that returns a model and a batch.

    Args:
        name: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``; modules are looked up from the current
            folder first, as Python's ``-m`` does.
        batch: For the function's parameter ``batch``; None leaves its default.

    Raises:
        ConfigError: There is no such module or function, or it returns something else.
    """
    module_name, _, function_name = name.rpartition(":")
    if not module_name:
        raise ConfigError(f"{name!r} names no function; write MODULE:FUNCTION or FILE.py:FUNCTION")
    function = getattr(_import(module_name), function_name, None)
    if not callable(function):
        raise ConfigError(f"{module_name} has no function {function_name!r}; check the spelling")
    if batch is None:
        result = function()
    elif "batch" in inspect.signature(function).parameters:
        result = function(batch=batch)
    else:
        raise ConfigError(f"{name} has no parameter 'batch'; add one, or leave --batch out")
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"{name} returned {type(result).__name__}, not a pair; return (model, inputs)"
        )
    return cast("tuple[torch.nn.Module, Mapping[str, object]]", result)


def _import(name: str) -> object:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"there is no file {name}; check the path")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{name} can't be imported; name a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        _look_in(path.resolve().parent)  # as for a script: it may import what lies beside it
        spec.loader.exec_module(module)
        return module
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # the user's module is there, something that it imports is not
        raise ConfigError(f"there is no module {name!r}; check the spelling") from None


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory-limit: {error}") from None
