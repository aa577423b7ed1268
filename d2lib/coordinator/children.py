"""Short-lived children: git and tmux, with an environment that leaks nothing into them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from d2lib.errors import Refused, Unexpected
from d2lib.evidence.environment import child_environment

TIMEOUT = 120.0
"""Seconds that git may take for one answer."""
ANSWER_SECONDS = 10.0
"""Seconds that tmux may take for one answer."""


class NoAnswer(Refused):
    """tmux or the driver gives no answer: a start refuses, a running job is asked for again (see watch)."""


def clean_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allowlisted environment and where tmux keeps its sockets; no GIT_*, no TMUX, no D2_*."""
    source = os.environ if source is None else source
    kept = child_environment(source=source)
    if "TMUX_TMPDIR" in source:
        kept["TMUX_TMPDIR"] = source["TMUX_TMPDIR"]
    return kept


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[bytes]:
    """Run a short command to its end and keep what it says; its exit status is the caller's to judge.

    Raises:
        Unexpected: the program is not there.
        NoAnswer: it did not end within `timeout` seconds.
    """
    try:
        return subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=dict(clean_environment() if environment is None else environment),
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise Unexpected(
            f"{command[0]} is not installed", expected=f"{command[0]} on PATH", remedy=f"install {command[0]}"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} does not answer", expected=f"an answer within {timeout:.0f} s") from None


def last_line(output: bytes) -> str:
    """The last line that a program said, for an error's `found`."""
    lines = output.decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
