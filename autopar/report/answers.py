"""Answers to questions about a plan as text that keeps to a width."""

from __future__ import annotations

import sys
from typing import TextIO

from autopar.plan.answers import Sections
from autopar.report.layout import Lines, indented, paragraph
from autopar.report.text import INDENT, LEAST_WIDTH, bold_titles, terminal_width


def render_answer(sections: Sections, *, width: int | None = None) -> str:
    """Titles with their sentences; no line is longer than the width.

    Args:
        sections: Of an answer (:mod:`autopar.plan.answers`); those without sentences are left out
            but for the first, whose title is the headline.
        width: Columns, at least 60. Left out: those of the terminal, or 100 where there is none.
    """
    columns = max(LEAST_WIDTH, terminal_width() if width is None else width)
    lines: Lines = []
    for position, (title, sentences) in enumerate(sections):
        if not sentences and position:
            continue
        body = [
            line
            for sentence in sentences
            for line in paragraph(sentence, columns - INDENT, indent="  ", first="")
        ]
        lines += [*([""] if lines else []), *paragraph(title, columns), *indented(body, INDENT)]
    return "\n".join(lines) + "\n"


def render_lines(text: str, *, width: int | None = None) -> str:
    """Lines that are sentences each, kept to a width as :func:`render_answer` keeps to it."""
    columns = max(LEAST_WIDTH, terminal_width() if width is None else width)
    lines = [found for line in text.splitlines() for found in _wrapped(line, columns)]
    return "\n".join(lines) + "\n"


def _wrapped(line: str, columns: int) -> Lines:
    return paragraph(line, columns, indent="  ", first="")


def print_answer(
    sections: Sections, *, width: int | None = None, file: TextIO | None = None
) -> None:
    """Write an answer to a file, standard output if left out; titles are bold on a terminal."""
    target = sys.stdout if file is None else file
    text = render_answer(sections, width=width)
    target.write(bold_titles(text) if target.isatty() else text)
