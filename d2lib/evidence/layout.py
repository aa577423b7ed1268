"""Where a run's evidence lies: names and paths, and nothing else.

runs/NAMESPACE/LEDGER.jsonl                             one line an attempt
runs/NAMESPACE/.lock, runs/NAMESPACE/PHASE[-JOB]/.lock  empty, held with flock, never removed
runs/NAMESPACE/PHASE[-JOB]/attempt-N/receipt.ipynb, receipt.json, receipt.dsse.json
runs/NAMESPACE/PHASE[-JOB]/attempt-N/working.*          while the attempt runs
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from d2lib.errors import Refused

LEDGER = "LEDGER.jsonl"
LOCK = ".lock"
RECEIPT = "receipt.json"
NOTEBOOK = "receipt.ipynb"
SIGNATURE = "receipt.dsse.json"
WORKING_NOTEBOOK = "working.ipynb"
OPENING = "working.json"
JOURNAL = "working.jsonl"
FINAL_NAMES = frozenset({RECEIPT, NOTEBOOK, SIGNATURE})
RESULT_MIME = "application/vnd.d2.result+json"
"""The type of the one output in which a notebook records its result."""
WORKING_NAMES = frozenset({WORKING_NOTEBOOK, OPENING, JOURNAL})
WORKING_FILES = (f".{WORKING_NOTEBOOK}.part", WORKING_NOTEBOOK, JOURNAL, OPENING)
"""In the order in which they are removed: as long as anything is left, an attempt can be told from a foreign folder."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ATTEMPT = re.compile(r"attempt-([1-9][0-9]{0,8})")
SHAPE = f"runs/NAMESPACE/PHASE[-JOB]/attempt-N/{NOTEBOOK}"


@dataclass(frozen=True)
class Attempt:
    """One attempt at one phase: its place under the run root."""

    root: Path
    """The run root, runs/NAMESPACE, absolute and free of links."""
    phase: str
    job: str | None
    number: int

    @property
    def namespace(self) -> str:
        """The run root's name."""
        return self.root.name

    @property
    def name(self) -> str:
        """PHASE or PHASE-JOB."""
        return self.phase if self.job is None else f"{self.phase}-{self.job}"

    @property
    def phase_folder(self) -> Path:
        """The folder of the phase's attempts."""
        return self.root / self.name

    @property
    def folder(self) -> Path:
        """The attempt's own folder."""
        return self.phase_folder / f"attempt-{self.number}"

    @property
    def lock(self) -> Path:
        """Held for as long as an attempt at this phase runs."""
        return self.phase_folder / LOCK

    def file(self, name: str) -> Path:
        """A file of the attempt's folder."""
        return self.folder / name


def parse_output(output: str | Path, phase: str) -> Attempt:
    """The attempt that an OUTPUT path names; raises Refused when it has another shape or passes through a link.

    Args:
        output: `<runs>/<NAMESPACE>/<PHASE[-JOB]>/attempt-<N>/receipt.ipynb`, from the working directory or absolute.
        phase: the notebook's phase.
    """
    path = Path(os.path.abspath(output))
    number = _ATTEMPT.fullmatch(path.parent.name)
    name = path.parent.parent.name
    if path.name != NOTEBOOK or number is None or len(path.parts) < 5:
        raise Refused("the output has no place among the receipts", expected=SHAPE, found=output)
    job = None if name == phase else name.removeprefix(f"{phase}-")
    if name != phase and (not name.startswith(f"{phase}-") or not _NAME.fullmatch(job or "")):
        raise Refused(
            "the output belongs to another phase", expected=f"a folder named {phase} or {phase}-JOB", found=name
        )
    root = path.parent.parent.parent
    if not _NAME.fullmatch(root.name):
        raise Refused("not a namespace", expected="letters, digits, dots, dashes, underscores", found=root.name)
    for part in (root, path.parent.parent, path.parent):
        if part.is_symlink():
            raise Refused("a link is not allowed here", expected="a real folder", found="a symbolic link", where=part)
    return Attempt(Path(os.path.realpath(root)), phase, job, int(number[1]))


def numbers(phase_folder: Path) -> list[int]:
    """The attempts at a phase that have begun, in order; a folder in which nothing was opened yet is none."""
    if not phase_folder.is_dir():
        return []
    found = [(_ATTEMPT.fullmatch(path.name), path) for path in phase_folder.iterdir()]
    begun = (OPENING, RECEIPT, NOTEBOOK)
    return sorted(int(match[1]) for match, path in found if match and any((path / name).exists() for name in begun))


def is_receipts_own(name: str) -> bool:
    """Whether a path inside a folder is a receipt's or a lock, and so never part of an input or output folder."""
    parts = PurePosixPath(name).parts
    return parts[-1] == LOCK or any(_ATTEMPT.fullmatch(part) for part in parts[:-1])


def split_attempt(folder: Path) -> tuple[str, int] | None:
    """(PHASE[-JOB], N) of an attempt's folder, or None for any other."""
    match = _ATTEMPT.fullmatch(folder.name)
    return (folder.parent.name, int(match[1])) if match else None
