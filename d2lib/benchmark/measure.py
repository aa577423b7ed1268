"""How things are measured: sides take turns in one process, medians are compared; memory is that of a child."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch

from d2lib.errors import Unexpected
from d2lib.evidence.environment import child_environment, library_path


@dataclass(frozen=True)
class Row:
    """One line of the table.

    what, at, against: what was measured, on which sizes, compared with what. value: in `unit`.
    target: what it has to reach: at most (`<=`) or at least (`>=`) `bound`; None where only the number is stated.
    """

    what: str
    at: str
    against: str
    value: float
    unit: str
    sense: Literal["<=", ">="] | None = None
    bound: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the bound is kept; None without one. NaN keeps none."""
        if self.sense is None or self.bound is None:
            return None
        return self.value <= self.bound if self.sense == "<=" else self.value >= self.bound

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self) | {"met": self.met}


@dataclass(frozen=True)
class Place:
    """Where FAST runs and in which precision its large products are; REF is fp32 everywhere.

    bounded: whether the bounds that are stated for two CPU cores hold the rows to account.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, device: str | None, precision: str | None) -> Place:
        """By default a GPU with bf16 where there is one, else the CPU with fp32."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        precision = precision or ("bf16" if device == "cuda" else "fp32")
        return cls(device, torch.bfloat16 if precision == "bf16" else torch.float32)

    @property
    def bounded(self) -> bool:
        return self.device == "cpu" and self.dtype == torch.float32

    def row(
        self,
        what: str,
        at: str,
        against: str,
        value: float,
        unit: str,
        sense: Literal["<=", ">="],
        bound: float,
        gpu_bound: float | None = None,
    ) -> Row:
        """A row with the bound that is stated for two CPU cores or for a GPU; where none is, only with its number."""
        here = bound if self.bounded else gpu_bound if self.device == "cuda" else None
        return Row(what, at, against, value, unit, *(() if here is None else (sense, here)))

    def __str__(self) -> str:
        return f"{'bf16' if self.dtype == torch.bfloat16 else 'fp32'} on {self.device}"


CPU = Place()


def medians(sides: Mapping[str, Callable[[], object]], repeats: int, calls: int = 1) -> dict[str, float]:
    """Median seconds of each side over `repeats` runs; the sides take turns, and one run of each warms up.

    Args:
        sides: name → what is timed.
        repeats: runs that count.
        calls: calls in a run, so that what takes a millisecond is not timed alone; the seconds are those of one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, run in sides.items():
            began = time.perf_counter()
            for _ in range(calls):
                run()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a GPU works on after the call
                torch.cuda.synchronize()
            if turn:
                seconds[name].append((time.perf_counter() - began) / calls)
    return {name: median(values) for name, values in seconds.items()}


def in_child(task: str, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> dict[str, float]:
    """Run a task of `d2lib.benchmark.child` in a process of its own, with these variables set; its figures."""
    environment = child_environment(environment)
    path = library_path(environment.get("PYTHONPATH"))
    if path is not None:
        environment["PYTHONPATH"] = path
    command = [sys.executable, "-m", "d2lib.benchmark.child", task, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unexpected("a measurement failed", found=done.stderr.strip().rpartition("\n")[2], where=task)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures
