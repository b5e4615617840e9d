"""Commands that make, print, compare and check plans, and measure machines."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, cast

from autopar.cli.decisions import amount, costs, decisions
from autopar.cli.models import load_model
from autopar.cli.output import check_folder, show_answer, show_plan
from autopar.interruption import ends_at_once
from autopar.plan.io import json_record, load_plan, save_plan
from cost_models.plan_simulation import device_words, plan_memory
from cost_models.profile import profile_cache_path
from cost_models.trace import trace_events, write_trace
from cost_models.whole_step import whole_step

if TYPE_CHECKING:
    from autopar.plan.types import Plan


def plan(args: argparse.Namespace) -> int:
    """``autopar plan``."""
    with ends_at_once():
        from autopar import api  # here, since torch takes seconds and "report" does without

    check_folder("--output", args.output)
    check_folder("--trace", args.trace)
    model, inputs = load_model(args.model, args.batch)
    devices = int(args.devices) if args.devices.isdecimal() else args.devices
    limit = None if args.memory_limit is None else amount("--memory-limit", args.memory_limit)
    compiled = api.compile(
        model,
        devices=devices,
        inputs=inputs,
        memory_limit=limit,
        optimizer=args.optimizer,
        mode=args.mode,
        time_limit_s=args.time_limit,
        precision=args.precision,
        objective=args.objective,
        cost_limit=args.cost_limit,
        cost_per_hour=costs(args.cost_per_hour),
        profile=args.profile,
        **decisions(args),
    )
    made = cast("Plan", compiled.plan)
    if args.output:
        save_plan(made, args.output)
    if args.trace:
        _write_trace(made, args.trace)
    show_plan(made, args)
    return 0


def report(args: argparse.Namespace) -> int:
    """``autopar report``."""
    saved = load_plan(args.plan, accept_edits=args.accept_edits)
    if args.trace:
        _write_trace(saved, args.trace)
    show_plan(saved, args)
    return 0


def _write_trace(plan: Plan, path: str) -> None:
    step = whole_step(plan)
    events = trace_events(
        step.simulation,
        plan_memory(plan, step.simulation),
        rank_words=lambda rank: f"pipeline rank {rank}, {device_words(plan, rank)}",
        remainders=step.remainders,
    )
    write_trace(path, events)


def diff(args: argparse.Namespace) -> int:
    """``autopar diff``."""
    before = load_plan(args.plan, accept_edits=args.accept_edits)
    after = load_plan(args.other, accept_edits=args.accept_edits)
    show_answer(before.diff(after), args)
    return 0


def profile(args: argparse.Namespace) -> int:
    """``autopar profile``."""
    with ends_at_once():
        from autopar.api.profiling import profile_machine
    from cost_models.profile import dump_profile

    named = args.model
    path, found = profile_machine(
        args.out,
        budget_s=args.budget,
        only_if_missing=args.if_missing,
        resume=args.resume,
        build=None if named is None else lambda: load_model(named, args.batch),
    )
    if os.environ.get("RANK", "0") != "0":  # rank 0 speaks for all
        return 0
    if args.json:
        print(dump_profile(found))
    else:
        rest = "" if found.is_complete else "; out of time, go on with --resume"
        print(f"{found.machine}: {len(found.points)} points of {found.date} in {path}{rest}")
    return 0


def interruption_words(args: argparse.Namespace) -> str:
    """How to go on with a command that was interrupted: a profile that was begun, no other."""
    if args.command != "profile" or not (args.out or profile_cache_path()).exists():
        return ""
    return "; --resume goes on with what was measured"


def verify(args: argparse.Namespace) -> int:
    """``autopar verify``."""
    saved = load_plan(args.plan, accept_edits=args.accept_edits)
    with ends_at_once():
        from autopar import api  # after a damaged plan was refused: torch takes seconds

    model, inputs = load_model(args.model, args.batch)
    result = api.verify(model, saved, inputs)
    print(json.dumps(json_record(result), indent=1) if args.json else result)
    return 0
