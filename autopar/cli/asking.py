"""Commands that ask why a plan is as it is."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.decisions import amount, costs, decisions
from autopar.cli.flags import as_flags
from autopar.cli.models import load_model
from autopar.cli.output import check_folder, plan_summary, show_answer
from autopar.errors import ConfigError
from autopar.interruption import ends_at_once
from autopar.plan.io import Json, json_record, load_plan, save_plan
from autopar.report.answers import print_answer, render_lines

if TYPE_CHECKING:
    from autopar.api.questions import Questions
    from autopar.plan.types import Plan
    from autopar.solver.replan import Replan


_DEVICES = re.compile(r"\bdevices(?==| out)|^devices(?=:)")


def explain(args: argparse.Namespace) -> int:
    """``autopar explain``: of a plan alone, or with the model."""
    model, path, pattern = _explain_words(args.words)
    plan = load_plan(path, accept_edits=args.accept_edits)
    if model is None:
        show_answer(plan.explain(pattern), args)
    else:
        show_answer(_questions(args, model, plan, devices=args.devices).explain(pattern), args)
    return 0


def why_not(args: argparse.Namespace) -> int:
    """``autopar why-not``."""
    wished: dict[str, object] = dict(decisions(args))
    if args.precision:
        wished["precision"] = args.precision
    plan = load_plan(args.plan, accept_edits=args.accept_edits)
    answer = _questions(args, args.model, plan, devices=args.devices).why_not(wished)
    show_answer(answer, args, headline=answer.headline)
    return 0


def replan(args: argparse.Namespace) -> int:
    """``autopar replan``."""
    plan = load_plan(args.plan, accept_edits=args.accept_edits)
    check_folder("--output", args.output)
    slower = dict(_slower(text) for text in args.slower or ())
    try:
        asked = _questions(args, args.model, plan, devices=args.before)
    except ConfigError as error:  # what is wrong with the old cluster: devices= are the new one
        raise type(error)(_DEVICES.sub("before", str(error))) from error
    speed = args.checkpoint_speed
    answer = asked.replan(
        args.devices,
        tuple(args.lost or ()),
        slower,
        thorough=args.thorough,
        checkpoint_bytes_per_s=None if speed is None else amount("--checkpoint-speed", speed),
    )
    if args.output:
        save_plan(answer.plan, args.output)
    if args.json:
        print(json.dumps(replan_record(answer), indent=1))
    else:
        print(render_lines(as_flags(str(answer), args.flags), width=args.width))
        print_answer(answer.diff.sections(), width=args.width)
    return 0


def _slower(text: str) -> tuple[int, float]:
    machine, _, factor = text.partition("=")
    try:
        number, speed = int(machine), float(factor)
    except ValueError:
        raise ConfigError(f"--slower {text!r}: write MACHINE=FACTOR, such as 3=0.5") from None
    if not (isfinite(speed) and speed > 0):
        raise ConfigError(f"--slower {text!r}: give a factor above 0; --lost takes what is gone")
    return number, speed


def replan_record(answer: Replan) -> dict[str, Json]:
    """An answer of ``replan`` for programs; numbers that are infinite are null."""

    def finite(number: float) -> float | None:
        return number if isfinite(number) else None

    stay = answer.stay
    return {
        "plan": plan_summary(answer.plan),
        "stay": None if stay is None else plan_summary(stay),
        "diff": json_record(answer.diff),
        "migration": json_record(answer.migration),
        "stay_migration": None
        if answer.stay_migration is None
        else json_record(answer.stay_migration),
        "saved_s": finite(answer.saved_s),
        "break_even_steps": finite(answer.break_even_steps),
        "break_even_s": finite(answer.break_even_s),
        "is_thorough": answer.is_thorough,
    }


def _explain_words(words: Sequence[str]) -> tuple[str | None, str, str | None]:
    """(Model, plan file, pattern) of ``[MODULE:FUNCTION] PLAN.json [PATTERN]``.

    Raises:
        ConfigError: There is no plan file among the words, or there are too many words.
    """
    at = next((i for i, w in enumerate(words) if w.endswith(".json") or Path(w).is_file()), None)
    if at is None or at > 1:
        raise ConfigError(
            f"explain {' '.join(words)}: no plan file is named; write "
            "explain [MODULE:FUNCTION] PLAN.json [PATTERN]"
        )
    if len(words) > at + 2:
        raise ConfigError(
            f"explain: {' '.join(words[at + 2 :])!r} is too much; give one pattern after the plan, "
            "in quotes"
        )
    return words[0] if at else None, words[at], words[at + 1] if len(words) > at + 1 else None


def _questions(
    args: argparse.Namespace, name: str, plan: Plan, *, devices: str | None
) -> Questions:
    with ends_at_once():
        from autopar.api.asking import questions_of  # here, since torch takes seconds

    prices = costs(args.cost_per_hour)
    model, inputs = load_model(name, args.batch)
    return questions_of(
        model,
        inputs,
        plan,
        devices=devices,
        cost_per_hour=prices,
        time_limit_s=args.time_limit,
        profile=args.profile,
    )
