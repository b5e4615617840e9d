"""The command line: parse, call the API, print. ``python -m autopar --help`` lists the commands.

A model is named as ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``. The function returns the model and
one global batch, ``(model, inputs)``; if it has a parameter ``batch``, ``--batch`` is handed to it.

Exit codes: 0 done; 1 refused: no plan fits, constraints contradict, a model can't be captured, a
plan's numbers are wrong (the message says what would help); 2 usage: an argument, a file or an
option is wrong; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import cast

from autopar.cli.commands import interruption_words
from autopar.cli.flags import as_flags, in_flags
from autopar.cli.models import load_model
from autopar.cli.output import error_record, exit_code, plan_summary, progress_shown
from autopar.cli.parser import build_parser
from autopar.errors import AutoparError, ConfigError, InfeasibleError

__all__ = ["load_model", "main", "plan_summary"]
_OF_OPTIONS = (ConfigError, InfeasibleError)
"""Errors about what was asked for; others may quote the user's own lines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    args = build_parser().parse_args(argv)
    try:
        with progress_shown():
            return cast("Callable[[argparse.Namespace], int]", args.run)(args)
    except AutoparError as error:
        if args.debug:
            raise
        flags: frozenset[str] = args.flags if isinstance(error, _OF_OPTIONS) else frozenset()
        if args.json:
            print(json.dumps(in_flags(error_record(error), flags), indent=1))
        print(f"autopar: {as_flags(str(error), flags)}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        print(f"autopar: interrupted{interruption_words(args)}", file=sys.stderr)
        return 130  # as shells do
    except BrokenPipeError:  # the reader of our output, such as "head", has gone
        sys.stderr.close()
        return 1
