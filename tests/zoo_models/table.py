"""The zoo's rows as a table: for a terminal, and for the README between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from tests.zoo_models import ZOO
from tests.zoo_models.rows import FORCED, PROGRAM, SOLVED, Cell, Row

README = Path(__file__).resolve().parents[2] / "autopar" / "sharding" / "README.md"
BEGIN = "<!-- zoo: made by `make zoo ARGS=--write` -->"
END = "<!-- zoo ends -->"
HEADINGS = (PROGRAM, *FORCED, *SOLVED)
SHARES = ("operators", "no rule", "repeated")


def rich_table(rows: Sequence[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="Model zoo", header_style="bold")
    for heading in ("model", *SHARES, *HEADINGS, "seconds"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        cells = [_coloured(row.cells.get(heading)) for heading in HEADINGS]
        table.add_row(row.name, *shares(row), *cells, f"{row.seconds:.0f}")
    return table


def shares(row: Row) -> tuple[str, str, str]:
    """Number of operators; share of arithmetic without a rule; share repeated by data ranks."""
    found = row.coverage
    if found is None:
        return ("", "", "")
    return (
        str(found.num_ops),
        f"{100 * found.unruled_flops_share:.2f} %",
        f"{100 * found.whole_flops_share:.2f} %",
    )


def _coloured(cell: Cell | None) -> str:
    if cell is None:
        return ""
    colour = "red" if not cell.passed else "yellow" if cell.detail else "green"
    return f"[{colour}]{cell.text}[/]"


def markdown(rows: Sequence[Row], before: str = "") -> str:
    """The table for the README, with what was refused under it.

    Args:
        rows: The rows; none that failed.
        before: An earlier table, whose rows of other models are kept.
    """
    lines, notes = _parsed(before)
    for row in rows:
        cells = [cell.text if (cell := row.cells.get(h)) else "" for h in HEADINGS]
        lines[row.name] = f"| {' | '.join((row.name, *shares(row), *cells))} |"
        details = dict.fromkeys(_short(cell.detail) for cell in row.cells.values() if cell.detail)
        notes.pop(row.name, None)
        if details:
            notes[row.name] = f"* {row.name}: {'; '.join(details)}"
    order = [name for name in (*ZOO, *lines) if name in lines]
    head = [
        f"| {' | '.join(('model', *SHARES, *HEADINGS))} |",
        "|---" * (1 + len(SHARES) + len(HEADINGS)) + "|",
    ]
    listed = [notes[name] for name in dict.fromkeys(order) if name in notes]
    return "\n".join(
        [*head, *(lines[n] for n in dict.fromkeys(order)), "", "Refused:", "", *listed]
    )


def _parsed(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Rows and notes of a table, by model."""
    rows = {
        line.split("|")[1].strip(): line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith("| model |")
    }
    notes = {
        line[2:].partition(": ")[0]: line for line in text.splitlines() if line.startswith("* ")
    }
    return rows, notes


def _short(detail: str) -> str:
    """A refusal without remedy, operands and the folder that a library is installed in."""
    lines = detail.split("; use")[0].split(" (operands")[0].splitlines()[:2]
    words = " ".join(lines).split()
    return " ".join(w.rpartition("/")[2] if w.startswith("/") else w for w in words)


def _cut(text: str) -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands after it."""
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    return before, table, after


def models_in_readme(text: str) -> list[str]:
    """Names in the table of a README."""
    return list(_parsed(_cut(text)[1])[0])


def write(rows: Sequence[Row], readme: Path = README) -> None:
    """Put rows that passed into the table between the markers of a README."""
    before, table, after = _cut(readme.read_text(encoding="utf-8"))
    new = markdown([row for row in rows if row.passed], table)
    readme.write_text(f"{before}{BEGIN}\n\n{new}\n\n{END}{after}", encoding="utf-8")
