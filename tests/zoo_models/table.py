"""The zoo's rows as a table: for a terminal, and for the README between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

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


def markdown(rows: Sequence[Row]) -> str:
    """The table for the README, with refusals as notes under it."""
    notes: list[str] = []

    def text(cell: Cell | None) -> str:
        if cell is None:
            return ""
        if not cell.detail:
            return cell.text
        note = cell.detail.split("; use")[0].split(" (operands")[0].splitlines()
        short = " ".join(part.strip() for part in note[:2])
        if short not in notes:
            notes.append(short)
        return f"{cell.text} [{notes.index(short) + 1}]"

    lines = [
        f"| {' | '.join(('model', *SHARES, *HEADINGS))} |",
        "|---" * (1 + len(SHARES) + len(HEADINGS)) + "|",
    ]
    for row in rows:
        cells = [text(row.cells.get(heading)) for heading in HEADINGS]
        lines.append(f"| {' | '.join((row.name, *shares(row), *cells))} |")
    lines += ["", *(f"{i}. {_relative(note)}" for i, note in enumerate(notes, 1))]
    return "\n".join(lines)


def _relative(note: str) -> str:
    """Without the folder that a library is installed in."""
    return " ".join(
        word.rpartition("/")[2] if word.startswith("/") else word for word in note.split()
    )


def models_in_readme(text: str) -> list[str]:
    """Names in the table of a README."""
    table = text.split(BEGIN)[1].split(END)[0]
    names = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    return names[1:]


def write(rows: Sequence[Row], readme: Path = README) -> None:
    """Put the table between the markers of a README."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n\n{markdown(rows)}\n\n{END}{after}", encoding="utf-8")
