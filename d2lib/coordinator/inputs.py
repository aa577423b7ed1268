"""The inputs of a full run: hashed when it is staged, and hashed again before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from d2lib.errors import Refused
from d2lib.evidence.receipts import InputRecord, record_input
from d2lib.files import canonical_json
from d2lib.progress import bar

_BAR_FROM = 1 << 28


def record_inputs(places: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Label → record of every input file or folder, each file of a folder by itself, as plain JSON.

    Raises:
        Refused: an input is missing, or is or holds a link.
    """
    total = sum(_size(path) for path in places.values())
    found = {}
    with _bar(total) as progress:
        for label, path in places.items():
            if not path.exists():
                raise Refused(f"--{label.replace('_', '-')} is missing", expected="a file or folder", where=path)
            record = record_input(label, path, str(path), progress=lambda size: (progress.update(size), None)[1])
            found[label] = record.model_dump(mode="json")
    return found


def check_inputs_unchanged(staged: Mapping[str, Any], places: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Every input has the bytes with which the run was staged; returns their records.

    Raises:
        Refused: names the first file that differs, and how.
    """
    now = record_inputs(places)
    if canonical_json(now) == canonical_json(dict(staged)):
        return now
    for label in sorted(now.keys() | staged.keys()):
        if label not in now or label not in staged:
            raise Refused("the staged inputs are other ones", expected=sorted(staged), found=sorted(now))
        before, after = (InputRecord.model_validate_json(canonical_json(value[label])) for value in (staged, now))
        if before != after:
            raise Refused(
                f"the input --{label.replace('_', '-')} is not what was staged",
                expected=before.sha256,
                found=_difference(before, after),
                where=places[label],
                remedy="put the file back; another input is another run with its own pilot",
            )
    return now


def _difference(before: InputRecord, after: InputRecord) -> str:
    if before.path != after.path or before.kind != after.kind:
        return f"{after.kind} {after.path}"
    if before.files is None or after.files is None:
        return f"{after.path} has other bytes"
    for name in sorted(before.files.keys() | after.files.keys()):
        if name not in after.files:
            return f"{name} is missing"
        if name not in before.files:
            return f"{name} is new"
        if before.files[name] != after.files[name]:
            return f"{name} has other bytes"
    return "the same files under another digest"


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if file.is_file())


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    with bar(total, "hashing inputs", "B", shown=total >= _BAR_FROM, unit_scale=True) as shown:
        yield shown
