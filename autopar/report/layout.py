"""Plain-text tables and paragraphs that keep to a width without cutting a number.

A table that is too wide first wraps its columns of words. If that does not do, columns that may go
are left out; then a table of numbers is split into several, each with the first column again, and
any other is stacked: a block of ``heading value`` pairs per row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Lines: TypeAlias = list[str]

GAP = 2
_GLUE = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:B|[KMGT]iB|s|ms|us|ns|%|x)(?![A-Za-z]))")
_BREAKS = re.compile(r"[^./,:\[]*[./,:\[]?")


@dataclass(frozen=True, slots=True)
class Column:
    """A column.

    Attributes:
        heading: Its title.
        is_number: Aligned to the right and never wrapped.
        is_words: May be wrapped.
        least: Characters below which it is not made narrower, if it holds words.
        may_go: Left out where the table would not fit otherwise.
    """

    heading: str
    is_number: bool = False
    is_words: bool = False
    least: int = 18
    may_go: bool = False

    @property
    def is_name(self) -> bool:
        """Whether it is text that is never wrapped."""
        return not self.is_number and not self.is_words


def numbers(*headings: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(heading, is_number=True) for heading in headings)


def words(*headings: str, least: int = 18, may_go: bool = False) -> tuple[Column, ...]:
    """Columns that may be wrapped, down to ``least`` characters."""
    return tuple(Column(h, is_words=True, least=least, may_go=may_go) for h in headings)


def names(*headings: str) -> tuple[Column, ...]:
    """Columns that stand to the left and are not wrapped."""
    return tuple(Column(heading) for heading in headings)


def paragraph(text: str, width: int, *, indent: str = "", first: str | None = None) -> Lines:
    """Text wrapped at spaces; a number stays with its unit.

    Args:
        text: One paragraph.
        width: Columns.
        indent: Before every line but the first.
        first: Before the first line; ``indent`` if left out.
    """
    start = indent if first is None else first
    glued = _UNIT.sub(_GLUE, text)
    room = width - max(len(indent), len(start))
    parts = [piece for word in glued.split(" ") for piece in _pieces(word, room)]
    lines: Lines = []
    line = start
    is_empty = True
    for piece, is_joined in parts:
        gap = "" if is_empty or is_joined else " "
        if not is_empty and len(line) + len(gap) + len(piece) > width:
            lines.append(line)
            line, gap = indent, ""
        line += gap + piece
        is_empty = False
    return [text.replace(_GLUE, " ").rstrip() for text in [*lines, line]]


def bullets(texts: Iterable[str], width: int) -> Lines:
    """Paragraphs with a dash before each."""
    return [line for text in texts for line in paragraph(text, width, indent="  ", first="- ")]


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Lines:
    """A table, in the first form that is within the width.

    Args:
        columns: Columns; the first names the row.
        rows: Cells, as many as columns.
        width: Columns of text, >= 40.
    """
    sizes = [
        max([len(column.heading), *(len(row[i]) for row in rows)])
        for i, column in enumerate(columns)
    ]
    excess = sum(sizes) + GAP * (len(sizes) - 1) - width
    if excess > 0:
        narrowed = _narrowed(columns, sizes, excess)
        if narrowed is not None:
            sizes = narrowed
        elif any(column.may_go for column in columns):
            stay = [i for i, column in enumerate(columns) if not column.may_go]
            fewer = [[row[i] for i in stay] for row in rows]
            return table([columns[i] for i in stay], fewer, width)
        elif not all(column.is_number for column in columns[1:]):
            return stacked(columns, rows, width)
        else:
            return _split(columns, rows, sizes, width)
    return _drawn(columns, rows, sizes)


def stacked(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Lines:
    """Per row its names, then the other cells with their headings; dashes are left out."""
    lines: Lines = []
    num_names = 1
    while num_names < len(columns) and columns[num_names].is_name:
        num_names += 1
    for row in rows:
        parts = [
            _glued(column.heading) + _GLUE + (cell if column.is_words else _glued(cell))
            for column, cell in zip(columns[num_names:], row[num_names:], strict=True)
            if cell not in ("", "-")
        ]
        title = " ".join(row[:num_names])
        title = f"{columns[0].heading} {title}" if title.isdecimal() else title
        lines += paragraph(f"{title}: {', '.join(parts)}", width, indent="  ", first="")
    return lines


def _glued(text: str) -> str:
    return text.replace(" ", _GLUE)


def _pieces(word: str, room: int) -> list[tuple[str, bool]]:
    """A word as (piece, whether it continues the piece before it); whole if it has room."""
    if len(word) <= room:
        return [(word, False)]
    found: list[tuple[str, bool]] = []
    for part in _BREAKS.findall(word):
        for at in range(0, len(part), max(1, room)):
            found.append((part[at : at + room], bool(found)))
    return found


def _narrowed(columns: Sequence[Column], sizes: Sequence[int], excess: int) -> list[int] | None:
    """Sizes with the columns of words made narrower; None if that is not enough."""
    result = list(sizes)
    for _ in range(excess):
        at = max(
            (
                i
                for i, column in enumerate(columns)
                if column.is_words and result[i] > max(column.least, len(column.heading))
            ),
            key=lambda i: result[i],
            default=None,
        )
        if at is None:
            return None
        result[at] -= 1
    return result


def _split(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], sizes: Sequence[int], width: int
) -> Lines:
    """Several tables side by side, one below the other, each with the first column."""
    groups: list[list[int]] = [[0]]
    used = sizes[0]
    for at in range(1, len(columns)):
        if used + GAP + sizes[at] > width and len(groups[-1]) > 1:
            groups.append([0])
            used = sizes[0]
        groups[-1].append(at)
        used += GAP + sizes[at]
    lines: Lines = []
    for group in groups:
        part = _drawn(
            [columns[i] for i in group],
            [[row[i] for i in group] for row in rows],
            [sizes[i] for i in group],
        )
        lines += ["", *part] if lines else part
    return lines


def _drawn(columns: Sequence[Column], rows: Sequence[Sequence[str]], sizes: Sequence[int]) -> Lines:
    lines = [_row([c.heading for c in columns], columns, sizes)]
    lines.append("─" * (sum(sizes) + GAP * (len(sizes) - 1)))
    for row in rows:
        cells = [
            paragraph(cell, size) if column.is_words else [cell]
            for column, cell, size in zip(columns, row, sizes, strict=True)
        ]
        lines += [
            _row([c[at] if at < len(c) else "" for c in cells], columns, sizes)
            for at in range(max(map(len, cells)))
        ]
    return lines


def _row(cells: Sequence[str], columns: Sequence[Column], sizes: Sequence[int]) -> str:
    padded = [
        cell.rjust(size) if column.is_number else cell.ljust(size)
        for cell, column, size in zip(cells, columns, sizes, strict=True)
    ]
    return (" " * GAP).join(padded).rstrip()


def pairs(rows: Iterable[tuple[str, str]], width: int) -> Lines:
    """Names and values without a heading, the values wrapped."""
    found = list(rows)
    size = max((len(name) for name, _ in found), default=0) + GAP
    return [
        line
        for name, value in found
        for line in paragraph(value, width, indent=" " * size, first=name.ljust(size))
    ]


def indented(lines: Iterable[str], by: int = 2) -> Lines:
    """Lines moved to the right; empty ones stay empty."""
    return [f"{' ' * by}{line}" if line else "" for line in lines]
