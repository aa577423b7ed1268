"""Stop on request: a signal asks, the work stops at its next boundary."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """While it is open, SIGTERM and SIGINT only set a flag; the work asks it and stops at a boundary of its own.

    Calling it says whether a stop was asked for. Outside the main thread, where handlers cannot be set, it is False.
    """

    def __init__(self) -> None:
        self._asked = False
        self._earlier: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._asked

    def ask(self) -> None:
        """Ask from within the process."""
        self._asked = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._earlier[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        self._earlier.clear()
