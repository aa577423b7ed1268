"""The host's conditions while a job runs, asked in a thread of their own: a question that hangs holds up nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from d2lib.coordinator.children import ANSWER_SECONDS, NoAnswer
from d2lib.errors import D2Error


class Watch:
    """Asks whether the conditions hold, again and again, until it is closed.

    A condition that is found not to hold is a reason to stop. No answer (tmux or the driver fails, or hangs) is none
    yet: the question is asked again and counted, and only when no answer has come for `patience` does that stop a job.

    Args:
        check: raises NoAnswer when there is none, and another D2Error when a condition does not hold.
        every: seconds between two questions. patience: seconds without an answer, beyond `every`.
    """

    def __init__(self, check: Callable[[], None], *, every: float, patience: float) -> None:
        self.unanswered = 0
        """Questions without an answer since the start."""
        self._check, self._every, self._patience = check, every, patience
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="watch", daemon=True)
        self._answered = time.monotonic()
        self._row = 0
        self._error = "the question hangs"
        self._broken: str | None = None

    def reason(self) -> str | None:
        """Why the job has to stop, or None."""
        if self._broken is not None:
            return self._broken
        silent = time.monotonic() - self._answered
        if silent < self._every + self._patience:
            return None
        return f"no answer for {silent:.0f} s, {self._row} questions failed in a row: {self._error}"

    def trouble(self) -> str | None:
        """Why the last question has no answer, or None when it has."""
        return None if self._row == 0 else f"no answer, asked again for {self._patience:g} s: {self._error}"

    def _ask(self) -> None:
        while not self._closed.wait(self._every):
            try:
                self._check()
            except Exception as error:
                if isinstance(error, D2Error) and not isinstance(error, NoAnswer):
                    self._broken = str(error)
                    return
                self.unanswered += 1
                self._row += 1
                self._error = str(error) if isinstance(error, D2Error) else f"{type(error).__name__}: {error}"
            else:
                self._answered = time.monotonic()
                self._row = 0

    def __enter__(self) -> Self:
        self._answered = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(ANSWER_SECONDS + 1.0)
