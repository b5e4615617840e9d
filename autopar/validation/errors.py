"""Why a record is left out."""

from __future__ import annotations


class SkipRecord(Exception):  # noqa: N818  a verdict about data, not a fault of the program
    """The record can't be predicted; ``str`` is the reason, without the record's name."""
