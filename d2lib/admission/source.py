"""The pilot's source: a snapshot with a file map, and the files whose bytes a verdict hangs on."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from d2lib.data.manifest import Digest
from d2lib.errors import Refused
from d2lib.evidence.environment import library_folder
from d2lib.files import (
    Hashed,
    Record,
    inside,
    read_json,
    record_file,
    record_tree,
    sha256_file,
    write_exclusive,
    write_json,
)

SOURCE_MAP = "SOURCE_MAP.json"

NUMERICAL = (
    "data/assembly.py",
    "data/sample.py",
    "drafter/",
    "gates/evaluate.py",
    "gates/g2.py",
    "gates/parity.py",
    "gates/pilot.py",
    "gates/scoring.py",
    "train/full.py",
    "train/loop.py",
)
"""Where a verdict's numbers are made, modules and packages of d2lib; everything that these import belongs to them."""


class MappedFile(Record):
    """One file of a snapshot."""

    size: int
    sha256: Digest


def snapshot_source(destination: Path, sources: Mapping[str, Path] | None = None) -> Hashed:
    """Copy source files into a new folder and write its SOURCE_MAP.json; returns the map's digest.

    Args:
        destination: the new folder.
        sources: name in the snapshot → folder to copy; by default the running d2lib alone. Byte code is left out.
    Raises Refused: the destination exists, or a source holds a link.
    """
    try:
        destination.mkdir(parents=True)
    except FileExistsError:
        raise Refused("a snapshot exists already and is never overwritten", where=destination) from None
    found = {}
    for name, folder in ({"d2lib": library_folder()} if sources is None else sources).items():
        for path in _source_files(folder):
            place = f"{name}/{path}"
            target = destination / place
            target.parent.mkdir(parents=True, exist_ok=True)
            write_exclusive(target, (folder / path).read_bytes())
            record = record_file(target)
            found[place] = {"size": record.size, "sha256": str(record.sha256)}
    return write_json(destination / SOURCE_MAP, found)


def check_source(folder: Path, pinned: Hashed) -> dict[str, MappedFile]:
    """Compare a snapshot with its file map, and the map with its pinned digest.

    Raises:
        Refused: the map is another one; a file is missing, extra (byte code included), changed, or a link.
    """
    path = inside(folder, SOURCE_MAP)
    digest = sha256_file(path)
    if digest != pinned:
        raise Refused("the file map is not the pinned one", expected=pinned, found=digest, where=path)
    value = read_json(path)
    if not isinstance(value, dict) or not value:
        raise Refused("not a file map", expected="path: {size, sha256}", where=path)
    files = {name: _mapped(entry, f"{path}: {name}") for name, entry in value.items()}
    found = record_tree(folder, skip=lambda name: name == SOURCE_MAP)
    for name in sorted(files.keys() | found.keys()):
        if name not in found:
            raise Refused("a source file is missing", expected=files[name].sha256, where=folder / name)
        if name not in files:
            raise Refused("a file is not in the map", found=name, where=folder)
        record = found[name]
        if (record.size, str(record.sha256)) != (files[name].size, files[name].sha256):
            raise Refused("a source file is modified", expected=files[name].sha256, found=record.sha256, where=name)
    return files


def numerical_files(library: Path) -> set[str]:
    """The files of a d2lib that its verdict's numbers pass through, which must be byte-identical to the pilot's.

    The modules of NUMERICAL and, in turn, every module of d2lib that they import anywhere, inside functions and for
    type checking too, with the packages' __init__.py that this runs.

    Args:
        library: the folder d2lib.
    """
    present = {name for name in _source_files(library) if name.endswith(".py")}
    found: set[str] = set()
    waiting = {name for name in present if any(name == entry or name.startswith(entry) for entry in NUMERICAL)}
    while waiting:
        name = waiting.pop()
        found.add(name)
        try:
            imported = _imported((library / name).read_bytes(), name)
        except (SyntaxError, ValueError) as error:
            raise Refused("a source file is not Python", found=str(error)[:200], where=library / name) from None
        waiting |= (imported & present) - found
    return found


@lru_cache(maxsize=1024)
def _imported(source: bytes, name: str) -> frozenset[str]:
    """Paths under d2lib that a module's imports may mean, and its own packages' __init__.py."""
    package = name.split("/")[:-1]
    modules = {"/".join(package)} if package else {""}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: from the package that is `level - 1` above this module's own
                base = ".".join(part for part in ("d2lib", *package[: len(package) + 1 - node.level], base) if part)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        modules |= {each.replace(".", "/").removeprefix("d2lib").lstrip("/") for each in names if _is_ours(each)}
    found = set()
    for module in modules:
        parts = module.split("/") if module else []
        found |= {"/".join((*parts[:depth], "__init__.py")) for depth in range(len(parts) + 1)}
        found.add(f"{module}.py")
    return frozenset(found)


def _is_ours(module: str) -> bool:
    return module == "d2lib" or module.startswith("d2lib.")


def check_numerical(folder: Path, today: Path | None = None) -> int:
    """Compare the numerical files of a snapshot's d2lib with today's, byte by byte; returns how many there are.

    Raises:
        Refused: names the first file that differs or exists on one side only, and counts the rest.
    """
    today = library_folder() if today is None else today
    sides = [numerical_files(root) for root in (folder / "d2lib", today)]
    differing = sorted(
        name
        for name in sides[0] | sides[1]
        if not (folder / "d2lib" / name).is_file()
        or not (today / name).is_file()
        or (folder / "d2lib" / name).read_bytes() != (today / name).read_bytes()
    )
    if differing or not sides[0]:
        raise Refused(
            "numerical files or the verdict's code differ from the pilot's",
            expected="byte-identical files",
            found=f"{len(differing)} that are not; the first: d2lib/{differing[0]}" if differing else "no files",
            where=folder,
        )
    return len(sides[0])


def _source_files(folder: Path) -> list[str]:
    """Relative paths of a source folder's files, without byte code and editors' leftovers; a link is refused."""
    found = []
    for place, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name not in {"__pycache__", ".ipynb_checkpoints"})
        for name in [*names, *files]:
            if os.path.islink(os.path.join(place, name)):
                raise Refused("a link is not allowed here", found="a symbolic link", where=os.path.join(place, name))
        found += [
            Path(place, name).relative_to(folder).as_posix()
            for name in sorted(files)
            if not name.endswith((".pyc", ".pyo", ".swp", "~")) and not name.startswith(".")
        ]
    return found


def _mapped(entry: Any, where: str) -> MappedFile:
    from d2lib.admission.records import parse_record

    return parse_record(MappedFile, entry, where)
