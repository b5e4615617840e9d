"""Commands that ask why a plan is as it is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.decisions import decisions
from autopar.cli.models import load_model
from autopar.cli.output import show_answer
from autopar.errors import ConfigError
from autopar.plan.io import load_plan

if TYPE_CHECKING:
    from autopar.api.questions import Questions
    from autopar.plan.types import Plan


def explain(args: argparse.Namespace) -> int:
    """``autopar explain``: of a plan alone, or with the model."""
    model, path, pattern = _explain_words(args.words)
    plan = load_plan(path, accept_edits=args.accept_edits)
    if model is None:
        show_answer(plan.explain(pattern), args)
    else:
        show_answer(_questions(args, model, plan).explain(pattern), args)
    return 0


def why_not(args: argparse.Namespace) -> int:
    """``autopar why-not``."""
    wished = decisions(args)
    plan = load_plan(args.plan, accept_edits=args.accept_edits)
    answer = _questions(args, args.model, plan).why_not(wished)
    show_answer(answer, args, headline=answer.headline)
    return 0


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


def _questions(args: argparse.Namespace, name: str, plan: Plan) -> Questions:
    from autopar.api.asking import questions_of  # here, since torch takes seconds

    model, inputs = load_model(name, args.batch)
    return questions_of(model, inputs, plan, devices=args.devices, time_limit_s=args.time_limit)
