"""A process that takes a step whenever it is told to, and the memory that a piece of work takes.

A peer's interpreter runs this too, so it needs torch alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from d2lib.errors import Unexpected


class Peak:
    """Memory that a piece of work takes beyond what was there before it, as a context manager: a GPU's, or resident
    memory (Linux).

    extra: MB, known at the end.
    """

    extra: float = float("nan")

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = device == "cuda"

    def __enter__(self) -> Peak:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated() // 1000
            return self
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak starts anew from here
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        most = torch.cuda.max_memory_allocated() // 1000 if self._cuda else _status("VmHWM")
        self.extra = (most - self._before) / 1000


def _status(name: str) -> int:
    """A field of /proc/self/status, in kB (of 1,024 bytes, as the kernel counts), as kB of 1,000 bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024 // 1000
    raise Unexpected("the kernel does not say how much memory is used", expected=name, where="/proc/self/status")


def take_turns(step: Callable[[], float], device: str) -> None:
    """Take one step, print its result and its memory; then, for every line read, take one more and print its seconds.

    What the step prints goes to the error stream, so that only JSON lines come out.
    """
    out, sys.stdout = sys.stdout, sys.stderr
    with Peak(device) as peak:
        loss = step()
    print(json.dumps({"loss": loss, "extra": peak.extra}), file=out, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - began}), file=out, flush=True)
