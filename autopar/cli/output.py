"""What commands print: text that keeps to a width, JSON with stable keys, progress, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autopar.cli.flags import as_flags
from autopar.errors import AutoparError, ConfigError, ConstraintError, InfeasibleError
from autopar.plan.answers import Sections
from autopar.plan.io import Json, json_record, plan_hash
from autopar.report.answers import print_answer
from autopar.report.text import print_plan, terminal_width

if TYPE_CHECKING:
    from autopar.plan.types import Plan

REFUSED = 1
USAGE = 2
PROGRESS = "autopar.progress"


class Answer(Protocol):
    """An answer to a question about a plan."""

    def sections(self) -> Sections:
        """Titles, each with its sentences."""
        ...


def exit_code(error: AutoparError) -> int:
    """1 for what was understood and refused, 2 for a wrong argument, file or option."""
    is_usage = isinstance(error, ConfigError) and not isinstance(error, ConstraintError)
    return USAGE if is_usage else REFUSED


def error_record(error: AutoparError) -> dict[str, Json]:
    """An error for programs: ``{"error": {"type", "message", "shortfalls", "relaxations"}}``."""
    found: dict[str, Json] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, InfeasibleError):
        found["message"] = error.message
        found["shortfalls"] = [json_record(shortfall) for shortfall in error.shortfalls]
        found["relaxations"] = [json_record(relaxation) for relaxation in error.relaxations]
        found["notes"] = list(error.notes)
        found["num_tried"] = error.num_tried
    return {"error": found}


def show_plan(plan: Plan, args: argparse.Namespace) -> None:
    """A plan as text, or without its splits as JSON."""
    if args.json:
        print(json.dumps(plan_summary(plan), indent=1))
    else:
        print_plan(plan, width=args.width)


def show_answer(answer: Answer, args: argparse.Namespace, **others: Json) -> None:
    """An answer as text, or its fields (and ``others``) as JSON."""
    if args.json:
        print(json.dumps({**json_record(answer), **others}, indent=1))
    else:
        print_answer(sections_in_flags(answer.sections(), args.flags), width=args.width)


def sections_in_flags(sections: Sections, flags: Collection[str]) -> Sections:
    """Sentences with the flags of a command; titles stay, which name what was asked."""
    return tuple(
        (title, tuple(as_flags(sentence, flags) for sentence in sentences))
        for title, sentences in sections
    )


def check_folder(option: str, path: str | None) -> None:
    """Refuse a file that can't be written where it is to be, before anything is worked out.

    Raises:
        ConfigError: There is no such folder, or the path is one itself.
    """
    if path and Path(path).is_dir():
        raise ConfigError(f"{option}: {path} is a folder; name a file, such as {path}/plan.json")
    if path and not Path(path).resolve().parent.is_dir():
        raise ConfigError(
            f"{option}: there is no folder {Path(path).resolve().parent} for {path}; make it, or "
            "choose another"
        )


def plan_summary(plan: Plan) -> dict[str, Json]:
    """The plan without its splits, for programs: plain values, units in the names."""
    table = json_record(plan)
    del table["splits"]
    table["hash"] = plan_hash(plan)
    table["num_ranks"] = plan.num_ranks
    table["idle_ranks"] = list(plan.idle_ranks)
    return table


class _OneLine(logging.Handler):
    """Shows the last line of progress on a terminal, in place."""

    def emit(self, record: logging.LogRecord) -> None:
        width = max(20, terminal_width() - 1)
        text = record.getMessage()[:width]
        sys.stderr.write(f"\r\033[2K{text}")
        sys.stderr.flush()


@contextlib.contextmanager
def progress_shown() -> Iterator[None]:
    """Show the search's progress while the body runs, if a person is looking."""
    if not sys.stderr.isatty():
        yield
        return
    logger, handler = logging.getLogger(PROGRESS), _OneLine()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        sys.stderr.write("\r\033[2K")
