"""Bytes on disk: canonical JSON, digests, exclusive publication, and the refusal of links and escapes.

Everything that is hashed here is hashed over its exact bytes; every JSON that is hashed is in the canonical form of
RFC 8785. Nothing in this module overwrites a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import rfc8785

from d2lib.errors import Refused, Unexpected
from d2lib.strict import Record as Record
from d2lib.strict import parse_json as parse_json
from d2lib.strict import read_json as read_json

_CHUNK = 1 << 20
_WORKING = re.compile(r"\..+\.[0-9a-f]{12}\.part")


@dataclass(frozen=True, order=True)
class Hashed:
    """A digest that knows its algorithm, so that it cannot be mistaken for another string."""

    algorithm: str
    digest: str

    def __post_init__(self) -> None:
        if self.algorithm != "sha256" or len(self.digest) != 64 or set(self.digest) - set("0123456789abcdef"):
            raise Refused("not a digest", expected="sha256:<64 lower-case hex digits>", found=str(self))

    @classmethod
    def parse(cls, text: str) -> Hashed:
        """`sha256:…` to a value; raises Refused on anything else."""
        algorithm, _, digest = text.partition(":")
        return cls(algorithm, digest)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.digest}"

    @property
    def short(self) -> str:
        """The first twelve hex digits, for people."""
        return self.digest[:12]


@dataclass(frozen=True)
class FileRecord:
    """One regular file's size in bytes and digest."""

    size: int
    sha256: Hashed


def sha256_bytes(data: bytes) -> Hashed:
    """Digest of bytes in memory."""
    return Hashed("sha256", hashlib.sha256(data).hexdigest())


def record_file(path: Path, *, progress: Callable[[int], None] | None = None) -> FileRecord:
    """Size and digest of a regular file, streamed; refuses links, folders and devices.

    Args:
        path: the file.
        progress: called with the bytes of each chunk read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Refused("a file is missing", expected="a regular file", found="nothing", where=path) from None
    except OSError as error:
        raise Refused(
            "a file cannot be opened", expected="a regular file, not a link", found=error.strerror, where=path
        ) from None
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise Refused("not a regular file", expected="a regular file", found="a folder or device", where=path)
        digest, size = hashlib.sha256(), 0
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if progress is not None:
                progress(len(chunk))
    return FileRecord(size, Hashed("sha256", digest.hexdigest()))


def sha256_file(path: Path) -> Hashed:
    """Digest of a regular file, streamed."""
    return record_file(path).sha256


def walk(root: Path, *, skip: Callable[[str], bool] = lambda _: False) -> Iterator[Path]:
    """Every regular file under a folder in path order; refuses links, hard links and devices, and names them.

    Args:
        skip: (name of a file or folder) → whether to pass it over unseen.
    """
    if root.is_symlink() or not root.is_dir():
        raise Refused("not a folder", expected="a folder, not a link", where=root)
    for folder, names, files in os.walk(root, followlinks=False):
        names[:] = sorted(name for name in names if not skip(name))
        for name in names:
            if os.path.islink(os.path.join(folder, name)):
                raise Refused(
                    "a link is not allowed here",
                    expected="a folder",
                    found="a symbolic link",
                    where=os.path.join(folder, name),
                )
        for name in sorted(name for name in files if not skip(name)):
            path = Path(folder, name)
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise Refused("not a regular file", expected="a regular file", found="a link or device", where=path)
            if status.st_nlink != 1:
                raise Refused(
                    "a hard link is not allowed here",
                    expected="a file with one name",
                    found=f"{status.st_nlink} names",
                    where=path,
                )
            yield path


def record_tree(root: Path, *, skip: Callable[[str], bool] = lambda _: False) -> dict[str, FileRecord]:
    """Relative POSIX path → record of every file under a folder, but for those that `skip` names."""
    found = {}
    for path in walk(root):
        name = path.relative_to(root).as_posix()
        if not skip(name):
            found[name] = record_file(path)
    return found


def digest_tree(records: Mapping[str, FileRecord]) -> Hashed:
    """One digest over names, sizes and digests of a set of files, in canonical JSON."""
    return sha256_bytes(canonical_json({name: [r.size, str(r.sha256)] for name, r in records.items()}))


def inside(root: Path, name: str | Path) -> Path:
    """`root/name`, refused when the name is absolute, climbs out, or passes through a link."""
    relative = Path(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise Refused("a path leaves its folder", expected=f"a path inside {root}", found=name)
    path = root
    for part in relative.parts:
        path = path / part
        if path.is_symlink():
            raise Refused(
                "a link is not allowed here", expected="a real file or folder", found="a symbolic link", where=path
            )
    return path


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of a JSON value; NaN, infinities and integers beyond 2^53 are refused."""
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, RecursionError) as error:
        raise Refused(
            "a value has no canonical JSON", expected="finite numbers, strings, lists, objects", found=str(error)
        ) from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of a call on an open descriptor (write, fsync) the file that it is about."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def fsync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(working: Path, final: Path, *, mode: int = 0o444) -> None:
    """Give a finished working file its final name in one step that cannot overwrite.

    The file's bytes and the folder's entry are durable on return; the working name is gone. Both must be on one file
    system. Raises Refused when the final name exists.
    """
    with naming(final), open(working, "rb") as stream:
        os.fchmod(stream.fileno(), mode)
        os.fsync(stream.fileno())
    try:
        with naming(final):
            os.link(working, final, follow_symlinks=False)
    except FileExistsError:
        raise Refused(
            "a file exists already and is never overwritten", where=final, remedy="use a new attempt or a new name"
        ) from None
    os.unlink(working)
    fsync_folder(final.parent)


def write_exclusive(path: Path, data: bytes, *, mode: int = 0o444) -> None:
    """Create a file with these bytes, durable and complete or not at all; never overwrites."""
    descriptor, working = _open_working(path)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            publish(working, path, mode=mode)
    finally:
        working.unlink(missing_ok=True)


def _open_working(path: Path) -> tuple[int, Path]:
    """A new working file beside `path`, locked for as long as its writer lives (see `remove_abandoned`)."""
    while True:
        working = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
        descriptor = os.open(working, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, working
        os.close(descriptor)  # taken for abandoned between the two calls


def write_once(path: Path, data: bytes, *, mode: int = 0o444) -> None:
    """Create a file with these bytes, or find the same bytes there: a product that an earlier attempt finished.

    Raises:
        Refused: the file is there with other bytes, or is a link.
    """
    if not os.path.lexists(path):
        return write_exclusive(path, data, mode=mode)
    expected, found = sha256_bytes(data), sha256_file(path)
    if found != expected:
        raise Refused(
            f"{path.name} exists already and is not what is made now",
            expected=expected,
            found=found,
            where=path,
            remedy="it is never overwritten: go on with the inputs, parameters and code that made it, or in a new run",
        )
    return fsync_folder(path.parent)


def is_unfinished(name: str) -> bool:
    """Whether a path names, or lies in, something at work: `.NAME.part`. It is never an input, output or evidence."""
    return any(part.startswith(".") and part.endswith(".part") for part in PurePosixPath(name).parts)


def remove_abandoned(folder: Path, *, remove: bool = True) -> list[Path]:
    """Remove working files and folders under a folder whose writer died, and return them.

    A living writer holds a lock on its own. Such a file may be a second name of what was published from it; that name
    stays.

    Args:
        remove: false only lists them.
    """
    found, waiting = [], [folder]
    while waiting:  # not os.walk, which recurses
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError):  # a folder that is gone, or not to be read
            entries = list(os.scandir(waiting.pop()))
        for entry in entries:
            if _WORKING.fullmatch(entry.name):
                if is_abandoned(Path(entry), remove=remove):
                    found.append(Path(entry))
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry))
    return sorted(found)


def is_abandoned(path: Path, *, remove: bool = False) -> bool:
    """Whether nobody holds the lock of a working file or folder; removes it while that is sure."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # gone, or nothing that a writer makes
        return False
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if remove and stat.S_ISDIR(mode):
            shutil.rmtree(path, ignore_errors=True)
        elif remove:
            path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def write_json(path: Path, value: Any, *, mode: int = 0o444, once: bool = False) -> Hashed:
    """Create a file of canonical JSON and a newline; returns the file's digest.

    Args:
        once: take a file with the same bytes as it is (see `write_once`); otherwise an existing file is refused.
    """
    data = canonical_json(value) + b"\n"
    (write_once if once else write_exclusive)(path, data, mode=mode)
    return sha256_bytes(data)


def publish_folder(to: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Make a folder with these files under a working name, then give it its own; never overwrites.

    Args:
        to: the folder, which must not exist.
        files: name and bytes of each, taken one at a time.

    Raises:
        Refused: the folder exists. Unexpected: the disk refused. Nothing is left behind.
    """
    if os.path.lexists(to):
        raise _folder_exists(to)
    working = to.with_name(f".{to.name}.{secrets.token_hex(6)}.part")
    try:
        working.mkdir()
        descriptor = os.open(working, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for name, data in files:
                write_exclusive(working / name, data)
            fsync_folder(working)
            if os.path.lexists(to):
                raise _folder_exists(to)
            os.rename(working, to)  # replaces nothing but an empty folder that was made in this very moment
            fsync_folder(to.parent)
        finally:
            shutil.rmtree(working, ignore_errors=True)
            os.close(descriptor)
    except OSError as error:
        raise Unexpected(
            "a folder could not be written", found=error.strerror, where=to, remedy="see to the disk"
        ) from None


def _folder_exists(to: Path) -> Refused:
    return Refused("a folder exists already and is never overwritten", where=to, remedy="choose a new name")
