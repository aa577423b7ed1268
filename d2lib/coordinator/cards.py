"""What NVML says about the cards, behind one seam. Nothing here changes a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from pydantic import Field

from d2lib.coordinator.children import NoAnswer
from d2lib.errors import Refused
from d2lib.files import Record
from d2lib.strict import read_json


class Cards(Protocol):
    """What the coordinator needs to know about cards; a UUID is always the whole one."""

    def uuids(self) -> list[str]:
        """Every card of the host."""
        ...

    def enforced_power_limit_watts(self, uuid: str) -> float:
        """The limit that the driver enforces now."""
        ...

    def free_memory_bytes(self, uuid: str) -> int:
        """Free card memory."""
        ...

    def compute_processes(self, uuid: str) -> list[int]:
        """The pids that compute on the card now."""
        ...


def find_card(cards: Cards, name: str) -> str:
    """The whole UUID that a name or beginning of one means; raises Refused when it is none or several."""
    known = cards.uuids()
    found = [uuid for uuid in known if uuid.startswith(name)]
    if len(found) != 1:
        raise Refused(
            "no such card" if not found else "the name means several cards",
            expected=f"one card whose UUID begins with {name}",
            found=", ".join(found or known) or "no card",
        )
    return found[0]


class NvmlCards:
    """The driver's own answers, through pynvml."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # the module raises its own kinds, and OSError where there is no driver
            raise Refused(
                "NVML does not answer",
                expected="the NVIDIA driver's library",
                found=f"{type(error).__name__}: {error}",
                remedy="check nvidia-smi on this host",
            ) from None
        self._nvml: Any = pynvml

    def uuids(self) -> list[str]:
        """Every card of the host."""
        count = int(self._ask("nvmlDeviceGetCount"))
        handles = (self._ask("nvmlDeviceGetHandleByIndex", number) for number in range(count))
        return [_text(self._ask("nvmlDeviceGetUUID", handle)) for handle in handles]

    def enforced_power_limit_watts(self, uuid: str) -> float:
        """The limit that the driver enforces now; NVML counts milliwatts."""
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid)
        return float(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)) / 1000.0

    def free_memory_bytes(self, uuid: str) -> int:
        """Free card memory."""
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid)
        return int(self._ask("nvmlDeviceGetMemoryInfo", handle).free)

    def compute_processes(self, uuid: str) -> list[int]:
        """The pids that compute on the card now, as the host counts them."""
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid)
        return sorted(int(process.pid) for process in self._ask("nvmlDeviceGetComputeRunningProcesses", handle))

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError as error:
            raise NoAnswer("NVML gives no answer", found=f"{function}: {error}", where=arguments or None) from None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class RecordedCard(Record):
    """One card of a recorded stand-in."""

    enforced_power_limit_watts: float
    free_memory_bytes: int = Field(ge=0)
    compute_processes: list[int] = Field(default_factory=list)


class Recording(Record):
    """What a recorded stand-in's file holds."""

    cards: dict[str, RecordedCard]


class RecordedCards:
    """Answers from a JSON file, read anew each time: for rehearsals and tests on hosts without a card."""

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


def open_cards(recorded: str | None) -> Cards:
    """The driver's answers, or a recording where the profile names one."""
    return NvmlCards() if recorded is None else RecordedCards(Path(recorded))
