"""One job at a time on a solo: a nonblocking lock on a file that is never removed.

The lock is `flock` on a descriptor that no child inherits. Its file says who holds it: the runner, the job, since when,
and the child, which may outlive a runner that was killed; while such a child lives the solo is not free.

Other tools' lock files are only locked, never written. The child inherits those, since their tools cannot know of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from d2lib.errors import Refused
from d2lib.strict import parse_json


def utc_now() -> str:
    """UTC now, ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Lease:
    """A held lock."""

    solo: str
    path: Path
    descriptor: int
    job: str
    since: str

    def note_child(self, pid: int) -> None:
        """Write the child into the lock's file, so that it is found when this runner is gone."""
        self._write({"pid": pid, "created": psutil.Process(pid).create_time()})

    def _write(self, child: dict[str, Any] | None) -> None:
        holder = {"pid": os.getpid(), "job": self.job, "since": self.since, "child": child}
        data = json.dumps(holder).encode() + b"\n"
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)


def lock_path(folder: Path, solo: str) -> Path:
    """The lock's file."""
    return folder / f"{solo}.lock"


def prepare_folder(folder: Path) -> None:
    """Make the locks' folder, private; raises Refused when it is a link, another user's, or open to others."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise Refused(
            "the lock folder is not private",
            expected="an own folder with mode 0700, not a link",
            found=f"mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}",
            where=folder,
            remedy="chmod 700 it, or name another in the profile",
        )


@contextmanager
def hold(folder: Path, solo: str, job: str) -> Iterator[Lease]:
    """Hold a solo's lock; raises Refused at once, naming the holder, when it is taken."""
    prepare_folder(folder)
    path = lock_path(folder, solo)
    descriptor = _acquire(path, solo)
    try:
        child = living_child(path)
        if child is not None:
            raise Refused(
                f"{solo} is not free: its last job's process still runs though its runner is gone",
                expected="no process",
                found=f"pid {child['child']['pid']}, job {child['job']}",
                where=path,
                remedy="wait until it has saved and ended",
            )
        lease = Lease(solo, path, descriptor, job, utc_now())
        lease._write(None)
        yield lease
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def check_free(folder: Path, solo: str) -> None:
    """Raises Refused, naming the holder, when the solo is not free now. The lock is not kept."""
    if not lock_path(folder, solo).exists():
        return
    prepare_folder(folder)
    path = lock_path(folder, solo)
    os.close(_acquire(path, solo))
    child = living_child(path)
    if child is not None:
        raise Refused(
            f"{solo} is not free: its last job's process still runs though its runner is gone",
            found=f"pid {child['child']['pid']}, job {child['job']}",
            where=path,
        )


@contextmanager
def hold_further(paths: Iterable[str]) -> Iterator[tuple[int, ...]]:
    """Hold other tools' lock files; gives the descriptors. Raises Refused at once when one is missing or taken."""
    with ExitStack() as stack:
        held = []
        for name in paths:
            path = Path(os.path.expanduser(name))
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise Refused(
                    "a further lock cannot be opened",
                    expected="an existing file, not a link",
                    found=error.strerror,
                    where=path,
                    remedy="correct the profile, or touch the file where its own tool makes it only when it runs",
                ) from None
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(
                    "a further lock is taken: another tool uses the solo", where=path, remedy="wait until it has ended"
                ) from None
            held.append(descriptor)
        yield tuple(held)


def _acquire(path: Path, solo: str) -> int:
    """An open descriptor with the lock; the file that it locks is the one that has the name."""
    for _ in range(10):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Refused("a lock cannot be opened", found=error.strerror, where=path) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named, opened = os.stat(path, follow_symlinks=False), os.fstat(descriptor)
            if (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino):
                return descriptor
        except BlockingIOError:
            holder = read_holder(path) or {}
            os.close(descriptor)
            raise Refused(
                f"{solo} is taken",
                expected="a free lock",
                found=f"job {holder.get('job', '?')}, pid {holder.get('pid', '?')}, since {holder.get('since', '?')}",
                where=path,
                remedy="wait until that job has ended",
            ) from None
        except FileNotFoundError:
            pass  # removed between opening and locking, by somebody who should not
        os.close(descriptor)
    raise Refused("a lock's file keeps being replaced", where=path, remedy="nothing may remove lock files")


def read_holder(path: Path) -> dict[str, Any] | None:
    """Who holds (or, after a kill, held) a lock; None when the file says nothing sound."""
    try:
        value = parse_json(path.read_bytes() or b"null")
    except (OSError, Refused):
        return None
    return value if isinstance(value, dict) and {"pid", "job", "since", "child"} <= value.keys() else None


def living_child(path: Path) -> dict[str, Any] | None:
    """The holder's record when the child that it names still runs; a reused pid does not count."""
    holder = read_holder(path)
    child = holder.get("child") if holder is not None else None
    if not isinstance(child, dict):
        return None
    try:
        process = psutil.Process(int(child["pid"]))
        same = abs(process.create_time() - float(child["created"])) < 0.01
        return holder if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError, OverflowError):
        return None
