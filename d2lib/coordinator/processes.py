"""A job's process tree: how much memory it holds, no swap, and how it is brought to an end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Usage:
    """Memory of a set of processes, in bytes. Pages that processes share are counted in each."""

    resident: int
    swapped: int


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that none is lost (Linux)."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def before_exec(cpus: tuple[int, ...] | None, parent: int) -> Callable[[], None]:
    """What a child does between fork and exec: SIGTERM when its runner dies, and its own CPUs."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the runner died before the line above
            os._exit(4)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)

    return prepare


def descendants(*, but: int | None = None) -> list[psutil.Process]:
    """The job's living processes: this process's descendants but for one, and but for its own questions."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.pid == but or _is_question(process.pid):
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_question(pid: int) -> bool:
    """Whether a process is a short question of the runner's own (to tmux), whose thread awaits it.

    Such a one stays in the runner's session; a job has a session of its own and cannot enter another.
    """
    try:
        return os.getsid(pid) == os.getsid(0)
    except ProcessLookupError:
        return False


def reap(*, but: Iterable[int]) -> None:
    """Take the exit statuses of dead adopted orphans; those of `but` belong to somebody else."""
    kept = set(but)
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.pid in kept or _is_question(process.pid):
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def usage(processes: Iterable[psutil.Process]) -> Usage:
    """Resident and swapped memory from /proc/PID/status; processes that are gone count nothing."""
    resident = swapped = 0
    for process in processes:
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith(("VmRSS:", "VmSwap:")):
                    name, kib = line.split()[:2]
                    if name == "VmRSS:":
                        resident += int(kib) << 10
                    else:
                        swapped += int(kib) << 10
    return Usage(resident, swapped)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL, for what did not end in its grace time."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def end_leftovers(grace: float, child: subprocess.Popen[bytes], *, but: int, say: Callable[[str], None]) -> None:
    """End what is left of a job: SIGTERM, its grace time, SIGKILL; returns when nothing is left.

    Args:
        grace: seconds between the two signals.
        child: the job's own process, whose exit status is kept.
        but: pid of the one descendant that stays.
    """

    def left() -> list[psutil.Process]:
        child.poll()
        reap(but=(child.pid, but))
        return descendants(but=but)

    remaining = left()
    if not remaining:
        return
    say(f"left behind by the job, SIGTERM: {', '.join(str(process.pid) for process in remaining)}")
    for process in remaining:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    until = time.monotonic() + grace
    while (remaining := left()) and time.monotonic() < until:
        time.sleep(0.05)
    while remaining:
        say(f"left behind after {grace:g} s, SIGKILL: {', '.join(str(process.pid) for process in remaining)}")
        kill_all(remaining)
        time.sleep(0.05)
        remaining = left()
