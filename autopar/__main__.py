"""``python -m autopar`` calls the command line."""

from __future__ import annotations

import sys

from autopar.interruption import ends_at_once


def run() -> int:
    """The command line, whose modules are imported first."""
    with ends_at_once():
        from autopar.cli import main
    return main()


if __name__ == "__main__":
    sys.exit(run())
