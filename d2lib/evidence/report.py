"""What verification found: rows, and whether everything holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from d2lib.errors import one_line

State = Literal[
    "holds",
    "running",
    "elsewhere",
    "unchecked",
    "scratch",
    "changed",
    "missing",
    "extra",
    "link",
    "broken",
    "foreign",
    "unfinished",
    "leftover",
    "unsigned",
]
SOUND: frozenset[State] = frozenset({"holds", "running", "elsewhere", "unchecked", "scratch"})


@dataclass(frozen=True)
class Row:
    """One finding: its state, what it concerns (a path from the run root), and what was expected and found."""

    state: State
    where: str
    message: str
    expected: str | None = None
    found: str | None = None

    @property
    def holds(self) -> bool:
        """Whether this is as it should be."""
        return self.state in SOUND


@dataclass(frozen=True)
class Report:
    """Everything that was found in one run."""

    root: Path
    rows: tuple[Row, ...]
    receipts: int
    files: int
    size: int
    """Bytes read."""
    head: str | None
    """Digest of the ledger's last line: whoever keeps it elsewhere can tell that no line was cut off the end."""

    @property
    def holds(self) -> bool:
        """Whether everything is as it should be."""
        return all(row.holds for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "root": str(self.root),
            "holds": self.holds,
            "receipts": self.receipts,
            "files": self.files,
            "bytes": self.size,
            "head": self.head,
            "rows": [{**asdict(row), "holds": row.holds} for row in self.rows],
        }

    def render_text(self) -> str:
        """The report for a terminal: what is wrong stands last, next to the conclusion."""
        lines = [f"{one_line(self.root)}: {self.receipts} receipts, {self.files} files, {self.size:,} bytes"]
        for row in sorted(self.rows, key=lambda row: not row.holds):
            text = f"  {row.state:<10} {row.where}: {row.message}"
            if row.expected is not None:
                text += f"; expected: {row.expected}"
            if row.found is not None:
                text += f"; found: {row.found}"
            lines.append(f"  {one_line(text[2:])}")
        broken = sum(not row.holds for row in self.rows)
        lines.append(f"ledger head {self.head}" if self.head else "no ledger head")
        lines.append("everything holds" if not broken else f"{broken} {'problem' if broken == 1 else 'problems'}")
        return "\n".join(lines)
