"""``python -m tests.zoo_models [--write] [name ...]``: the table; exit status 1 if a row fails."""

from __future__ import annotations

import argparse
import sys
import warnings

import transformers
from rich.console import Console

from tests.zoo_models import ZOO
from tests.zoo_models.rows import Row, make_row
from tests.zoo_models.table import rich_table, write


def main(arguments: list[str] | None = None) -> int:
    """Make the rows one by one, say how each went, and print the table."""
    parser = argparse.ArgumentParser(prog="tests.zoo_models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help="all models if none is given")
    parser.add_argument("--write", action="store_true", help="put rows that pass into the README")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in ZOO]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; the zoo has {', '.join(ZOO)}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    wide = Console(width=200 if not sys.stdout.isatty() else None)
    names = given.names or list(ZOO)
    rows: list[Row] = []
    for name in names:
        row = make_row(name)
        rows.append(row)
        if given.write:
            write([row])
        _say(wide, row, len(rows), len(names))
    wide.print(rich_table(rows))
    failed = [row.name for row in rows if not row.passed]
    wide.print(
        f"[red]{len(failed)} of {len(rows)} rows failed: {', '.join(failed)}[/]"
        if failed
        else f"[green]{len(rows)} rows passed[/]"
    )
    return 1 if failed else 0


def _say(console: Console, row: Row, number: int, total: int) -> None:
    state = "[green]passed[/]" if row.passed else "[red]FAILED[/]"
    console.print(f"{number}/{total} {row.name}: {state} in {row.seconds:.1f} s", highlight=False)
    details = [f"{h}: {c.text}: {c.detail}" for h, c in row.cells.items() if c.detail]
    if row.replicated:
        details.append(row.replicated)
    for detail in details:
        console.print("    " + detail, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
