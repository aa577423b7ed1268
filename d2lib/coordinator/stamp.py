"""Append what a job says to its log, each line with UTC time and the job's name.

A process of its own, so that a job whose runner was killed can still speak while it saves its boundary. It reads until
the last writer is gone, takes no notice of signals, and goes on reading when the log cannot be written.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from datetime import UTC, datetime

from d2lib.entry import run_command

_END = re.compile(rb"[\r\n]+")
_MOST = 1 << 16


def main(arguments: list[str]) -> int:
    """`stamp JOB LOG`: stdin to LOG."""
    job, log = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    rest = b""
    while chunk := os.read(0, 1 << 16):
        *lines, rest = _END.split(rest + chunk)
        if len(rest) > _MOST:
            lines, rest = [*lines, rest], b""
        _append(descriptor, job, lines)
    _append(descriptor, job, [rest])
    return 0


def _append(descriptor: int, job: str, lines: list[bytes]) -> None:
    head = f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')} {job} ".encode()
    data = b"".join(head + line + b"\n" for line in lines if line.strip())
    with suppress(OSError):  # a full disk must not stop the job through its log
        os.write(descriptor, data)


if __name__ == "__main__":
    raise SystemExit(run_command("stamp", lambda: main(sys.argv[1:])))
