"""The ledger: one line an attempt, each carrying the digest of the line before; only ever appended to.

A line is a function of the receipt, its place and the line before. A writer that dies between a receipt and its line,
or in the middle of the line, therefore loses nothing: the next writer completes the line.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from d2lib.errors import Refused
from d2lib.evidence.layout import LEDGER, LOCK, NOTEBOOK, RECEIPT, WORKING_NOTEBOOK, split_attempt
from d2lib.evidence.receipts import DIGEST, Receipt, Status, Verdict, read_receipt, to_bytes
from d2lib.files import (
    Hashed,
    Record,
    canonical_json,
    fsync_folder,
    naming,
    parse_json,
    publish,
    record_file,
    sha256_bytes,
)
from d2lib.strict import first_problem


class LedgerLine(Record):
    """One attempt: which, when it ended, what came of it, and the digests that bind its two files."""

    seq: int = Field(ge=1)
    previous: str = DIGEST
    """Digest of the line before, newline included; the first line's is `genesis(namespace)`."""
    time: str
    phase: str
    job: str | None
    attempt: int = Field(ge=1)
    status: Status
    verdict: Verdict | None
    receipt_json_sha256: str = DIGEST
    receipt_sha256: str = DIGEST

    @property
    def name(self) -> str:
        """PHASE or PHASE-JOB."""
        return self.phase if self.job is None else f"{self.phase}-{self.job}"


@dataclass(frozen=True)
class Problem:
    """What is wrong with one line of a ledger (counted from 1)."""

    line: int
    message: str
    expected: str
    found: str


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold an exclusive lock on a file that is made when missing and never removed.

    The descriptor is closed on exec, so that no child keeps the lock, and the file's inode is compared after locking,
    so that a file that was removed and made again has one holder.

    Raises:
        Refused: another process holds it and `wait` is false, or the file is not a plain file.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise Refused(
                "a lock cannot be opened", expected="a plain file", found=error.strerror, where=path
            ) from None
        try:
            try:
                _flock(descriptor, wait)
            except BlockingIOError:
                raise Refused(
                    "another process is at this already", where=path, remedy="wait until it has ended"
                ) from None
            held = os.fstat(descriptor)
            try:
                named = path.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(held.st_mode):
                raise Refused("a lock is not a plain file", where=path)
            if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
                yield
                return
        finally:
            os.close(descriptor)


def _flock(descriptor: int, wait: bool) -> None:
    """Lock, or give up after a moment: `is_held` of another process may hold the lock for an instant."""
    for _ in range(0 if wait else 5):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now; makes and changes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def genesis(namespace: str) -> Hashed:
    """What the first line carries in place of a line before: the namespace's own digest."""
    return sha256_bytes(canonical_json({"ledger": namespace, "schema_version": 1}))


def make_line(receipt: Receipt, seq: int, previous: Hashed) -> bytes:
    """The line of a receipt at a place in the ledger: canonical JSON and a newline."""
    return to_bytes(
        LedgerLine(
            seq=seq,
            previous=str(previous),
            time=receipt.ended,
            phase=receipt.phase,
            job=receipt.job,
            attempt=receipt.attempt,
            status=receipt.status,
            verdict=receipt.verdict,
            receipt_json_sha256=str(sha256_bytes(to_bytes(receipt))),
            receipt_sha256=receipt.notebook.receipt_sha256,
        )
    )


def check_lines(data: bytes, namespace: str) -> tuple[list[LedgerLine], list[Problem], bytes]:
    """Walk a ledger's bytes.

    Returns: the lines that parse, the problems, and the torn piece after the last newline (empty in a sound ledger).
    """
    whole, newline, torn = data.rpartition(b"\n")
    lines, problems, previous = list[LedgerLine](), list[Problem](), genesis(namespace)
    seen: set[tuple[str, int]] = set()
    for number, raw in enumerate(whole.split(b"\n") if newline else [], 1):
        try:
            parse_json(raw)
            line = LedgerLine.model_validate_json(raw)
        except Refused as error:
            problems.append(Problem(number, "a ledger line is not strict JSON", "one JSON object", error.message))
        except ValidationError as error:
            field, expected, found = first_problem(error)
            problems.append(Problem(number, "a ledger line is malformed", f"{field}: {expected}", str(found)))
        else:
            if to_bytes(line) != raw + b"\n":
                problems.append(Problem(number, "a ledger line is not in canonical form", "RFC 8785", "another form"))
            if line.seq != number:
                problems.append(Problem(number, "a ledger line is out of order", f"seq {number}", f"seq {line.seq}"))
            if line.previous != str(previous):
                problems.append(Problem(number, "the ledger's chain is broken", f"previous {previous}", line.previous))
            if (line.name, line.attempt) in seen:
                problems.append(
                    Problem(number, "an attempt stands twice", "one line", f"{line.name} attempt {line.attempt}")
                )
            seen.add((line.name, line.attempt))
            lines.append(line)
        previous = sha256_bytes(raw + b"\n")
    return lines, problems, torn


def read_ledger(root: Path) -> list[LedgerLine]:
    """A run's ledger; an absent one is empty. Raises Refused at the first line that is not sound."""
    lines, _, _ = _sound(root)
    return lines


def _sound(root: Path) -> tuple[list[LedgerLine], bytes, bytes]:
    path = root / LEDGER
    if path.is_symlink():
        raise Refused("the ledger is a link", expected="a regular file", where=path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    lines, problems, torn = check_lines(data, root.name)
    if problems:
        first = problems[0]
        raise Refused(
            first.message,
            expected=first.expected,
            found=first.found,
            where=f"{path}, line {first.line}",
            remedy=f"see d2 verify {root}",
        )
    return lines, data, torn


def settle(root: Path) -> list[LedgerLine]:
    """Give every receipt its line, in the order in which they ended, and complete a torn line.

    The caller holds the ledger's lock; a receipt without a line is then one whose writer died.

    Raises:
        Refused: the ledger is not sound, or its torn end belongs to no receipt.
    """
    lines, data, torn = _sound(root)
    known = {(line.name, line.attempt) for line in lines}
    waiting = []
    for path in sorted(root.glob(f"*/attempt-*/{RECEIPT}")):
        place = split_attempt(path.parent)
        if place is not None and place not in known:
            receipt = read_receipt(path)
            if (receipt.namespace, receipt.name, receipt.attempt) != (root.name, *place):
                raise Refused(
                    "a receipt lies in another's place",
                    expected=f"{root.name}/{place[0]}/attempt-{place[1]}",
                    found=f"{receipt.namespace}/{receipt.name}/attempt-{receipt.attempt}",
                    where=path,
                )
            finish_notebook(path.parent, receipt)
            waiting.append(receipt)
    waiting.sort(key=lambda receipt: (receipt.ended, receipt.name, receipt.attempt))
    whole = data[: len(data) - len(torn)]
    previous = sha256_bytes(whole[whole.rfind(b"\n", 0, -1) + 1 :]) if lines else genesis(root.name)
    if torn:  # the line that was being written comes first
        waiting.sort(key=lambda receipt: not make_line(receipt, len(lines) + 1, previous).startswith(torn))
        if not waiting or not make_line(waiting[0], len(lines) + 1, previous).startswith(torn):
            raise Refused("the ledger's end belongs to no receipt", found=torn[:80], where=root / LEDGER)
    if not waiting:
        return lines
    descriptor = os.open(root / LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with naming(root / LEDGER):
            for receipt in waiting:
                line = make_line(receipt, len(lines) + 1, previous)
                _write(descriptor, line[len(torn) :])
                torn, previous = b"", sha256_bytes(line)
                lines.append(LedgerLine.model_validate_json(line))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fsync_folder(root)
    return lines


def finish_notebook(folder: Path, receipt: Receipt) -> None:
    """Publish the notebook that a receipt names, where that has not been done yet."""
    if not (folder / NOTEBOOK).exists():
        working = folder / WORKING_NOTEBOOK
        found = str(record_file(working).sha256)
        if found != receipt.notebook.receipt_sha256:
            raise Refused(
                "a receipt's notebook is not the one that it names",
                expected=receipt.notebook.receipt_sha256,
                found=found,
                where=working,
            )
        publish(working, folder / NOTEBOOK)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def ledger_lock(root: Path) -> Iterator[None]:
    """Hold the run root's lock: publishing a receipt and writing its line happen under it."""
    with locked(root / LOCK, wait=True):
        yield
