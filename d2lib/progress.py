"""How far long work is: a bar on a terminal, and in logs and receipts now and then a whole line with the time of day.

A kernel's standard error is never a terminal; when the engine passes it on to one, it says so with `TERMINAL`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tqdm import tqdm

TERMINAL = "D2_TERMINAL"
"""Environment variable: what is written to standard error reaches a terminal."""

LOG_SECONDS = 15.0
"""Between two lines of a log."""


class _Lines:
    """A stream in which each state of a bar becomes a line of its own, stamped in UTC."""

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            sys.stderr.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def on_terminal() -> bool:
    """Whether standard error reaches a terminal."""
    return sys.stderr.isatty() or os.environ.get(TERMINAL) == "1"


def bar(total: int, name: str, unit: str, *, shown: bool = True, **options: Any) -> tqdm[Any]:
    """A progress bar; a context manager with `update(steps)` and `set_postfix_str(text, refresh=False)`.

    Args:
        total: steps in all; 0 where that is not known.
        name, unit: of the work and of one step.
        shown: False for silence.
        options: tqdm's own, e.g. initial, unit_scale.
    """
    if not on_terminal():
        options = {"file": _Lines(), "mininterval": LOG_SECONDS, "miniters": 1, "ncols": 0} | options
    return tqdm(total=total or None, desc=name, unit=unit, disable=not shown, **options)
