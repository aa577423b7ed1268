"""One row of a table of checks: what was expected, what was found, where, and whether it holds."""

from __future__ import annotations

from pydantic import Field

from d2lib.files import Record


class CheckRow(Record):
    """A named check's outcome, readable by itself."""

    name: str = Field(min_length=1)
    expected: str
    found: str
    where: str
    holds: bool


def thousands(count: int, noun: str) -> str:
    """`1 file`, `2,031 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
