"""Stop on request: a signal asks, the work stops at its next boundary."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While it is open, SIGTERM and SIGINT only set a flag; the work asks it and stops at a boundary of its own.

    Calling it says whether a stop was asked for. A second signal changes nothing, so impatience cannot tear a save.
    Works in a notebook's cell, which runs in the kernel's main thread; in another thread, where handlers cannot be
    set, only `ask` reaches it. The handlers that were there before are put back at the end.
    """

    def __init__(self) -> None:
        self._asked = False
        self._earlier: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        return self._asked

    def ask(self) -> None:
        """Ask from within the process."""
        self._asked = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._earlier.setdefault(number, signal.signal(number, self._handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            # None: a handler that was not set from Python, which Python cannot set again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._earlier.clear()
