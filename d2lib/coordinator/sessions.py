"""Detached tmux sessions under exact names. None is ever killed, renamed or attached to."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from d2lib.coordinator.children import ANSWER_SECONDS, NoAnswer, clean_environment, last_line, run
from d2lib.coordinator.contract import Start
from d2lib.errors import Refused, Unexpected

SOCKET_PATH_BYTES = 108
"""sizeof(sockaddr_un.sun_path) on Linux, the NUL included."""
_ABSENT = ("no server running", "no sessions", "No such file or directory")
_TRIES = 5


def socket_path(environment: Mapping[str, str] | None = None) -> Path:
    """The socket that tmux uses by default."""
    environment = os.environ if environment is None else environment
    return Path(environment.get("TMUX_TMPDIR") or "/tmp", f"tmux-{os.getuid()}", "default")


def check_socket(environment: Mapping[str, str] | None = None) -> None:
    """Raises Refused when tmux could not make its socket, because the path is too long or its folder missing."""
    path = socket_path(environment)
    length = len(os.fsencode(path)) + 1
    if length > SOCKET_PATH_BYTES:
        raise Refused(
            "the path of tmux's socket is too long",
            expected=f"at most {SOCKET_PATH_BYTES} bytes with the closing NUL",
            found=f"{length} bytes",
            where=path,
            remedy="set TMUX_TMPDIR to a short existing folder",
        )
    if not path.parent.parent.is_dir():
        raise Refused(
            "tmux's folder is missing", where=path.parent.parent, remedy="make it, or set TMUX_TMPDIR to a folder"
        )


def exists(name: str, *, timeout: float = ANSWER_SECONDS) -> bool:
    """Whether a session of exactly this name is there.

    The names are listed and compared here, because tmux takes the beginning of a name for the name (`-t =NAME` apart).

    Args:
        timeout: seconds that one answer may take.

    Raises:
        NoAnswer: tmux does not say, asked several times, or hangs.
    """
    said = ""
    for _ in range(_TRIES):
        result = run(("tmux", "list-sessions", "-F", "#{session_name}"), timeout=timeout)
        if result.returncode == 0:
            return name in result.stdout.decode("utf-8", "replace").splitlines()
        said = last_line(result.stderr)
        if any(words in said for words in _ABSENT):
            return False
        time.sleep(0.05)  # for example, the last session ended while tmux was asked
    raise NoAnswer("tmux does not say which sessions are there", found=said, where=name)


def start_session(start: Start) -> None:
    """Start a job's script in its own detached session; raises Refused when the name is taken."""
    check_socket()
    if exists(start.session):
        raise Refused(
            "the session exists already and is not touched",
            found=start.session,
            remedy="it may still run this job: tmux attach -r -t '=" + start.session + "'",
        )
    at = start.tmux.index("--") + 1
    environment = (f"{name}={value}" for name, value in sorted(clean_environment().items()))
    result = run((*start.tmux[:at], "env", "-i", *environment, *start.tmux[at:]))
    if result.returncode:
        said = last_line(result.stderr)
        if "duplicate session" in said:
            raise Refused("the session exists already and is not touched", found=start.session)
        raise Unexpected("tmux cannot start the session", found=said, where=start.session)
