"""No swap: a job runs in a scope that may not swap where systemd makes one, and its swap is watched in any case.

A process cannot set such a rule for the control group that it is in; systemd makes a group for the purpose. Without
one, a page or two of an idle helper may be swapped at any time and cost nothing, so that only the processes that
compute are watched, and only swap above an allowance in several samples in a row stops a job.

`python -m d2lib.coordinator.swap` prints memory.swap.max of its own control group; the probe runs it in such a scope.
"""

from __future__ import annotations

import getpass
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from d2lib.coordinator.children import clean_environment, last_line, run
from d2lib.errors import D2Error

LINGER = Path("/var/lib/systemd/linger")
"""Holds a file for every user whose services stay when their last login ends."""


@dataclass(frozen=True)
class Scope:
    """How a job's command is started: what is put before it, what its environment needs, and the rule in words."""

    prefix: tuple[str, ...]
    environment: Mapping[str, str]
    text: str


def find_scope(linger: Path = LINGER) -> Scope:
    """A scope of systemd's that may not swap, when a probe shows that the rule is in force there; else no prefix."""
    environment = {"XDG_RUNTIME_DIR": os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"}
    program = shutil.which("systemd-run")
    if program is None:
        return _watched("there is no systemd-run")
    user = getpass.getuser()
    if not (linger / user).exists():  # the job would end with the user's last login
        return _watched(f"{user}'s systemd ends with the last login; loginctl enable-linger {user} changes that")
    prefix = (program, "--user", "--scope", "--quiet", "--collect", "-p", "MemorySwapMax=0", "--")
    probe = (*prefix, sys.executable, "-m", "d2lib.coordinator.swap")
    try:
        result = run(probe, environment=clean_environment() | environment)
    except D2Error as error:
        return _watched(str(error))
    found = result.stdout.decode("utf-8", "replace").strip()
    if result.returncode or found != "0":
        return _watched(f"a scope's memory.swap.max is {found!r}" if found else last_line(result.stderr) or "no scope")
    return Scope(prefix, environment, "forbidden by a scope with MemorySwapMax=0")


def _watched(why: str) -> Scope:
    return Scope((), {}, f"watched ({why})")


def own_swap_limit(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> str:
    """memory.swap.max of the control group (version 2) that this process is in; empty when there is none."""
    try:
        line = next(line for line in own.read_text().splitlines() if line.startswith("0::"))
        return (mount / line.removeprefix("0::").lstrip("/") / "memory.swap.max").read_text().strip()
    except (OSError, StopIteration):
        return ""


def computing(processes: Sequence[psutil.Process], first: int) -> list[psutil.Process]:
    """The processes of a job that compute: all but its first (papermill, which waits), or that one when it is alone."""
    return [process for process in processes if process.pid != first] or list(processes)


class SwapRule:
    """Tells when a job's swap is more than a passing one.

    Args:
        allowance: bytes that the computing processes may have in swap. samples: looks in a row above it that stop.
    """

    def __init__(self, allowance: int, samples: int) -> None:
        self.allowance, self.samples = allowance, samples
        self._above = 0

    def broken(self, swapped: int) -> str | None:
        """Take one sample in bytes; returns why the job has to stop, or None."""
        self._above = self._above + 1 if swapped > self.allowance else 0
        if self._above < self.samples:
            return None
        return (
            f"{swapped >> 10} KiB of the processes that compute are in swap, {self._above} samples in a row above the "
            f"allowance of {self.allowance >> 10} KiB"
        )


if __name__ == "__main__":
    print(own_swap_limit())
