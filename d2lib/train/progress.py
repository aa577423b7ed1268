"""How far a run is: a bar on a terminal, and now and then a line with the time of day."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tqdm import tqdm

LOG_SECONDS = 30.0


class Progress:
    """Shows a run's updates on standard error.

    The bar appears on a terminal only; lines come every `LOG_SECONDS` and at the end, so that a log or a notebook stays
    short.

    Args:
        name: the run's.
        update, total: updates made before, and in all.
        clock: monotonic seconds.
        shown: False for silence.
    """

    def __init__(self, name: str, update: int, total: int, clock: Callable[[], float], *, shown: bool) -> None:
        self.name, self.update, self.total = name, update, total
        self._clock, self._shown = clock, shown
        self._first, self._began = update, clock()
        self._logged = self._began
        self._loss, self._blocks = 0.0, 0
        self._bar = tqdm(total=total, initial=update, desc=name, unit="update", disable=None if shown else True)

    def advance(self, loss_sum: float, blocks: int, rate: float) -> None:
        """One more update, whose losses over `blocks` blocks sum to `loss_sum`."""
        self.update += 1
        self._loss += loss_sum
        self._blocks += blocks
        self._bar.update()
        now = self._clock()
        if now - self._logged < LOG_SECONDS and self.update < self.total:
            return
        pace = (now - self._began) / (self.update - self._first)
        left = round(pace * (self.total - self.update))
        line = (
            f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {self.name} update {self.update}/{self.total}"
            f" loss {self._loss / self._blocks:.5f} lr {rate:.3e} {pace:.3f} s/update"
            f" {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        )
        if self._shown:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()
        self._logged, self._loss, self._blocks = now, 0.0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
