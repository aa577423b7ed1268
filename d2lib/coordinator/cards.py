"""What NVML says about the cards, behind one seam. Nothing here changes a card."""

from __future__ import annotations

from typing import Any, Protocol

from d2lib.coordinator.children import NoAnswer
from d2lib.errors import Refused


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
