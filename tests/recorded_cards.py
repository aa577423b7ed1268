"""Cards that a file describes, in the place of a driver: `python recorded_cards.py CARDS.json ARGUMENTS…` is the locked
runner on them."""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field

from d2lib.coordinator.locked import main
from d2lib.strict import Record, read_json


class RecordedCard(Record):
    """One card of a recorded stand-in."""

    enforced_power_limit_watts: float
    free_memory_bytes: int = Field(ge=0)
    compute_processes: list[int] = Field(default_factory=list)


class Recording(Record):
    """What a recorded stand-in's file holds."""

    cards: dict[str, RecordedCard]


class RecordedCards:
    """Answers from a JSON file, read anew each time, so that a test can change them while a job runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _read(self) -> dict[str, RecordedCard]:
        return Recording.parse(
            read_json(self._path, what="the recorded cards"), self._path, message="the recorded cards cannot be read"
        ).cards

    def uuids(self) -> list[str]:
        """Every recorded card."""
        return list(self._read())

    def enforced_power_limit_watts(self, uuid: str) -> float:
        """The recorded limit."""
        return self._read()[uuid].enforced_power_limit_watts

    def free_memory_bytes(self, uuid: str) -> int:
        """The recorded free memory."""
        return self._read()[uuid].free_memory_bytes

    def compute_processes(self, uuid: str) -> list[int]:
        """The recorded pids."""
        return self._read()[uuid].compute_processes


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[2:], RecordedCards(Path(sys.argv[1]))))
