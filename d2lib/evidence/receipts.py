"""The receipt: what ran, with what, on what, and what came of it. Written once, read strictly."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from d2lib.errors import ExitStatus, Refused
from d2lib.evidence.layout import is_receipts_own
from d2lib.files import (
    FileRecord,
    Hashed,
    Record,
    canonical_json,
    digest_tree,
    is_unfinished,
    parse_json,
    record_file,
    walk,
)
from d2lib.strict import DIGEST_PATTERN, malformed

SCHEMA_VERSION = 1
_CHUNK = 1 << 20

Status = Literal["done", "failed", "refused", "interrupted"]
Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

DIGEST = Field(pattern=DIGEST_PATTERN)


class NotebookRecord(Record):
    """The notebook: its source, and how much of it ran."""

    path: str
    source_sha256: str = DIGEST
    """Digest of the source file's bytes."""
    cells_sha256: str = DIGEST
    """Digest of the source's cells (type, text), which the receipt's notebook shows again."""


class FinalNotebook(NotebookRecord):
    """The notebook once it has run."""

    receipt_sha256: str = DIGEST
    """Digest of receipt.ipynb."""


class Opening(Record):
    """Everything that is known before a phase starts; on disk for as long as it runs."""

    schema_version: int = SCHEMA_VERSION
    namespace: str
    phase: str
    job: str | None
    attempt: int = Field(ge=1)
    started: str
    """UTC, ISO 8601."""
    notebook: NotebookRecord
    parameters: dict[str, Any]
    parameters_sha256: str = DIGEST
    d2lib_version: str
    d2lib_sha256: str = DIGEST
    environment: dict[str, Any]
    environment_sha256: str = DIGEST


class InputRecord(Record):
    """A file or folder that a phase read, as it was before use and still was when the result was recorded."""

    label: str
    path: str
    """From the run root when it lies there, else absolute."""
    kind: Literal["file", "folder"]
    size: int = Field(ge=0)
    sha256: str = DIGEST
    """Of the file's bytes, or of the folder's names, sizes and digests."""
    files: dict[str, tuple[int, Annotated[str, DIGEST]]] | None = None
    """A folder's files: relative path → (size, digest)."""


class OutputRecord(Record):
    """A file that a phase made."""

    label: str
    path: str
    """From the run root."""
    size: int = Field(ge=0)
    sha256: str = DIGEST


class ParentRecord(Record):
    """An earlier receipt that an input comes from."""

    label: str
    namespace: str
    phase: str
    job: str | None
    attempt: int = Field(ge=1)
    receipt_json_sha256: str = DIGEST


class CellCounts(Record):
    """How much of a notebook ran: code cells with text, those that ran, those that raised."""

    code: int = Field(ge=0)
    ran: int = Field(ge=0)
    errors: int = Field(ge=0)


class Receipt(Opening):
    """A phase's attempt, whatever came of it."""

    ended: str
    seconds: float = Field(ge=0)
    status: Status
    verdict: Verdict | None
    exit_status: int = Field(ge=0, le=4)
    message: str | None
    cells: CellCounts
    notebook: FinalNotebook
    inputs: list[InputRecord]
    outputs: list[OutputRecord]
    parents: list[ParentRecord]
    result: dict[str, Any] | None

    @property
    def name(self) -> str:
        """PHASE or PHASE-JOB."""
        return self.phase if self.job is None else f"{self.phase}-{self.job}"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.exit_status != exit_status(self.status, self.verdict):
            raise ValueError(f"exit_status {self.exit_status} does not go with {self.status}, {self.verdict}")
        if self.status == "done" and (self.result is None or self.cells.ran != self.cells.code or self.cells.errors):
            raise ValueError("status done needs a result and every code cell run without an error")
        if self.status != "done" and (self.result is not None or self.verdict is not None):
            raise ValueError(f"status {self.status} has neither result nor verdict")
        return self


def exit_status(status: Status, verdict: Verdict | None) -> ExitStatus:
    """The exit status that goes with a receipt's status and verdict."""
    if status == "done":
        return ExitStatus.DONE if verdict in (None, "PASS") else ExitStatus.VERDICT
    return {
        "refused": ExitStatus.REFUSED,
        "interrupted": ExitStatus.INTERRUPTED,
        "failed": ExitStatus.UNEXPECTED,
    }[status]


def now() -> str:
    """UTC now as ISO 8601, to the microsecond, the same number of characters each time."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def to_bytes(record: Record) -> bytes:
    """The canonical bytes of a record's file, with a newline."""
    return canonical_json(record.model_dump(mode="json")) + b"\n"


def parse_receipt(data: bytes, *, where: object = None) -> Receipt:
    """A receipt from its file's bytes.

    Raises:
        Refused: empty, not strict JSON, not in canonical form, an unknown or missing field, or a newer schema.
    """
    if not data:
        raise Refused("a receipt is empty", expected="canonical JSON", found="0 bytes", where=where)
    value = parse_json(data, where=where)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise Refused(
            "a receipt was written by a newer version",
            expected=f"schema_version {SCHEMA_VERSION}",
            found=version,
            where=where,
            remedy="use the version of d2 that wrote it",
        )
    if version != SCHEMA_VERSION:
        raise Refused("not a receipt", expected=f"schema_version {SCHEMA_VERSION}", found=version, where=where)
    try:
        receipt = Receipt.model_validate_json(data)
    except ValidationError as error:
        raise malformed("a receipt is malformed", error, where) from None
    if to_bytes(receipt) != data:
        raise Refused("a receipt is not in canonical form", expected="RFC 8785 and a newline", where=where)
    return receipt


def read_receipt(path: Path) -> Receipt:
    """A receipt from disk; raises Refused when it is missing, a link, or anything but a sound receipt."""
    record_file(path)  # refuses links and everything but a regular file
    return parse_receipt(path.read_bytes(), where=path)


def record_input(label: str, path: Path, shown: str, *, progress: Callable[[int], None] | None = None) -> InputRecord:
    """Hash a file, or every file of a folder; links, hard links and devices are refused."""
    if path.is_dir() and not path.is_symlink():
        records = {name: record_file(file, progress=progress) for name, file in folder_files(path)}
        return InputRecord(
            label=label,
            path=shown,
            kind="folder",
            size=sum(record.size for record in records.values()),
            sha256=str(digest_tree(records)),
            files={name: (record.size, str(record.sha256)) for name, record in records.items()},
        )
    record = record_file(path, progress=progress)
    return InputRecord(label=label, path=shown, kind="file", size=record.size, sha256=str(record.sha256))


def folder_files(path: Path) -> list[tuple[str, Path]]:
    """(relative name, path) of a folder's files, without receipts, locks and unfinished work that may lie in it."""
    names = ((file.relative_to(path).as_posix(), file) for file in walk(path, skip=is_unfinished))
    return [(name, file) for name, file in names if not is_receipts_own(name)]


def files_of(record: InputRecord) -> dict[str, FileRecord]:
    """An input's files by path: a folder's are `path/name`."""
    if record.files is None:
        return {record.path: FileRecord(record.size, Hashed.parse(record.sha256))}
    return {
        f"{record.path}/{name}": FileRecord(size, Hashed.parse(digest)) for name, (size, digest) in record.files.items()
    }


def hash_prefixes(
    path: Path, sizes: Iterable[int], step: Callable[[int], None] = lambda _: None
) -> tuple[int, dict[int, str]]:
    """A file's size and the digests of the whole and of its first `size` bytes, for each size that it has.

    Raises:
        OSError: the file cannot be read, or is a link.
    """
    wanted = sorted({size for size in sizes if size >= 0})
    found: dict[int, str] = {}
    digest, position = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        while True:
            while wanted and wanted[0] == position:
                found[wanted.pop(0)] = f"sha256:{digest.hexdigest()}"
            chunk = stream.read(min(_CHUNK, wanted[0] - position) if wanted else _CHUNK)
            if not chunk:
                break
            digest.update(chunk)
            position += len(chunk)
            step(len(chunk))
    found[position] = f"sha256:{digest.hexdigest()}"
    return position, found
