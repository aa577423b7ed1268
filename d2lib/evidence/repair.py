"""What writers that died leave beside what they had published, and its removal.

    .NAME.<12 hex>.part        a file at work, maybe a second name of the file published from it
    attempt-N/working.*        beside the attempt's receipt and its line, or where nothing was opened yet

Nothing else is ever removed: no final file, nothing of a running attempt, nothing of one that waits for its receipt
(the next attempt gives it that).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from d2lib.errors import Refused
from d2lib.evidence.layout import LOCK, NOTEBOOK, OPENING, RECEIPT, WORKING_FILES, split_attempt
from d2lib.evidence.ledger import is_held, ledger_lock, locked, read_ledger, settle
from d2lib.files import remove_abandoned


def repair(root: Path, *, held: Path | None = None, remove: bool = True) -> list[Path]:
    """Remove what dead writers left in a run, and return it.

    Args:
        root: the run root.
        held: the phase folder whose lock the caller holds; the others are locked here, or passed over when held.
        remove: false only lists.

    Raises:
        Refused: the root is not a run's folder, or its ledger is not sound.
    """
    if root.is_symlink() or not root.is_dir():
        raise Refused("not a run root", expected="the folder runs/NAMESPACE, not a link", where=root)
    known = {(line.name, line.attempt) for line in read_ledger(root)}
    found = remove_abandoned(root, remove=remove)
    for phase in sorted({attempt.parent for attempt in root.glob("*/attempt-*") if split_attempt(attempt)}):
        with ExitStack() as stack:
            if phase != held:
                if is_held(phase / LOCK):
                    continue
                if remove:
                    try:
                        stack.enter_context(locked(phase / LOCK, wait=False))
                    except Refused:
                        continue
            for path in _left_in(phase, known):
                found.append(path)
                if remove:
                    path.unlink(missing_ok=True)
    return sorted(found)


def _left_in(phase: Path, known: set[tuple[str, int]]) -> Iterator[Path]:
    """The working files of a phase's attempts that nothing needs any more."""
    for folder in sorted(phase.iterdir()):
        place = split_attempt(folder)
        if place is None or folder.is_symlink():
            continue
        recorded = place in known and (folder / RECEIPT).exists() and (folder / NOTEBOOK).exists()
        unopened = not any((folder / name).exists() for name in (RECEIPT, NOTEBOOK, OPENING))
        if recorded or unopened:
            yield from (folder / name for name in WORKING_FILES if (folder / name).is_file())


def complete(root: Path, *, held: Path | None = None) -> None:
    """Finish what dead writers began: every receipt its notebook and line, then `repair`.

    Raises:
        Refused: the ledger is not sound, or a receipt's notebook is not the one that it names.
    """
    if root.is_dir():
        read_ledger(root)
        with ledger_lock(root):
            settle(root)
        repair(root, held=held)
