"""Faults inside a child process: at its n-th write, fsync, link, rename or unlink under a folder, something happens.

Nothing of this is in d2lib. A child gets it through a `sitecustomize` first on its PYTHONPATH (see `write_plan`), which
a phase's kernel inherits; there it wraps the functions of `os` and the streams of `open`. Calls are numbered per role
(engine, kernel) in the order in which they are made; a fault happens once, however often the command is run again.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS: dict[str, tuple[str, ...]] = {
    "write": ("ENOSPC", "EIO", "short", "short, kill", "kill", "kill both", "term"),
    "fsync": ("ENOSPC", "EIO", "kill", "late kill", "kill both", "term"),
    "link": ("ENOSPC", "EIO", "late EIO", "kill", "late kill", "kill both", "term"),
    "rename": ("ENOSPC", "EIO", "late EIO", "kill", "late kill", "kill both", "term"),
    "unlink": ("EIO", "late EIO", "kill", "late kill", "kill both", "term"),
}
"""Operation → what can happen at it. `late`: after it was done; `short`: half is written; `term`: SIGTERM to the
engine; `kill`: SIGKILL to the process itself, or to engine and kernel both."""


def write_plan(folder: Path, root: Path, *, role: str = "", number: int = 0, place: str = "", kind: str = "") -> Path:
    """Put a sitecustomize and its plan into a new folder, to be first on PYTHONPATH; without a kind it only records.

    Args:
        root: the folder whose files count.
        role, number: which call, from 1. Calls are logged to FOLDER/engine.log and FOLDER/kernel.log.
        place: instead of a number, the end of `OPERATION PATH`.
    """
    folder.mkdir(parents=True)
    plan = {"root": os.path.realpath(root), "role": role, "number": number, "place": place, "kind": kind}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import faults\nsys.path.pop(0)\nfaults.install({str(folder)!r})\n"
    )
    return folder


def read_log(folder: Path, role: str) -> list[str]:
    """The operations of a role, in order, as `OPERATION PATH`."""
    path = folder / f"{role}.log"
    return path.read_text().splitlines() if path.exists() else []


def fired(folder: Path) -> bool:
    """Whether the fault has happened."""
    return (folder / "fired").exists()


def install(folder: str | Path, role: str | None = None) -> None:
    """Wrap this process's file operations, when it is an engine or a kernel, or is said to be one."""
    arguments = " ".join(sys.orig_argv)
    if role is None:
        role = "kernel" if "ipykernel_launcher" in arguments else "engine" if "d2lib.cli" in arguments else None
    if role is not None:
        plan = json.loads(Path(folder, "plan.json").read_text())
        _Faults(Path(folder), role, plan).wrap()


class _Faults:
    def __init__(self, folder: Path, role: str, plan: dict[str, Any]) -> None:
        self.folder, self.role, self.plan = folder, role, plan
        self.pid = os.getpid()
        self.count = 0
        self.full: set[int] = set()
        self.write, self.unlink = os.write, os.unlink
        self.log = os.open(folder / f"{role}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def wrap(self) -> None:
        os.write = self.on_write  # type: ignore[assignment]
        os.fsync = self.on(os.fsync, "fsync", self.named)  # type: ignore[assignment]
        os.link = self.on(os.link, "link", lambda source, target, **_: str(target))  # type: ignore[assignment]
        for name in ("rename", "replace"):
            setattr(os, name, self.on(getattr(os, name), "rename", lambda source, target, **_: str(target)))
        for name in ("unlink", "remove"):
            setattr(os, name, self.on(getattr(os, name), "unlink", self.at))
        opened = builtins.open

        def stream(*arguments: Any, **options: Any) -> Any:
            made = opened(*arguments, **options)
            return _Stream(made, self) if made.writable() and self.counts(self.named(made.fileno())) else made

        builtins.open = io.open = os.fdopen = stream  # type: ignore[assignment]

    def named(self, descriptor: int) -> str:
        """The path of an open file."""
        try:
            return os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            return ""

    def at(self, path: Any, *, dir_fd: int | None = None) -> str:
        return str(path) if dir_fd is None else f"{self.named(dir_fd)}/{path}"

    def counts(self, path: str) -> bool:
        return os.path.abspath(path).startswith(f"{self.plan['root']}/")

    def on(self, function: Callable[..., Any], operation: str, place: Callable[..., str]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            kind = self.next(operation, place(*arguments, **options))
            if kind is None:
                return function(*arguments, **options)
            self.before(kind)
            result = function(*arguments, **options)
            self.after(kind)
            return result

        return wrapped

    def on_write(self, descriptor: int, data: Any) -> int:
        if descriptor in self.full:
            self.full.discard(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        kind = self.next("write", self.named(descriptor))
        if kind is None:
            return self.write(descriptor, data)
        self.before(kind)
        if kind.startswith("short"):
            written = self.write(descriptor, bytes(data)[: len(data) // 2])
            self.after(kind)
            self.full.add(descriptor)
            return written
        return self.write(descriptor, data)

    def next(self, operation: str, path: str) -> str | None:
        """Count a call; returns what happens at it."""
        if os.getpid() != self.pid or not self.counts(path):
            return None
        self.count += 1
        line, place = f"{operation} {os.path.abspath(path)}", self.plan["place"]
        self.write(self.log, f"{line}\n".encode())
        here = line.startswith(place.split(" ")[0]) and line.endswith(place.split(" ")[-1]) if place else None
        if self.role != self.plan["role"] or not (self.count == self.plan["number"] if here is None else here):
            return None
        try:
            os.close(os.open(self.folder / "fired", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return None
        return str(self.plan["kind"])

    def before(self, kind: str) -> None:
        if kind in ("ENOSPC", "EIO"):
            number = getattr(errno, kind)
            raise OSError(number, os.strerror(number))
        if kind in ("kill", "kill both"):
            self.end(kind)
        if kind == "term":
            os.kill(os.getppid() if self.role == "kernel" else self.pid, signal.SIGTERM)

    def after(self, kind: str) -> None:
        if kind == "late EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if kind in ("late kill", "short, kill"):
            self.end(kind)

    def end(self, kind: str) -> None:
        if kind == "kill both":
            others = [os.getppid()] if self.role == "kernel" else _children()
            for pid in others:
                os.kill(pid, signal.SIGKILL)
        os.kill(self.pid, signal.SIGKILL)


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(word) for word in text.split()]


class _Stream:
    """A stream under the folder, whose writes count."""

    def __init__(self, stream: Any, faults: _Faults) -> None:
        self._stream, self._faults = stream, faults

    def write(self, data: Any) -> int:
        kind = self._faults.next("write", self._faults.named(self._stream.fileno()))
        if kind is not None:
            self._faults.before(kind)
            if kind.startswith("short"):
                self._stream.write(data[: len(data) // 2])
                self._stream.flush()
                self._faults.after(kind)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(self._stream.write(data))

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *arguments: object) -> None:
        self._stream.close()

    def __iter__(self) -> Any:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
