"""The whole benchmark, in the order in which its notebook shows it."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from d2lib.benchmark.cases import dense_config, drafter_config
from d2lib.benchmark.data import measure_bootstrap, measure_dataset
from d2lib.benchmark.drafting import (
    DENSE_GROWTH,
    GROWTH,
    measure_growth,
    measure_scoring,
    measure_sharing,
    measure_update,
    slope,
)
from d2lib.benchmark.head import measure_head
from d2lib.benchmark.measure import Place, Row
from d2lib.benchmark.step import measure_training_step
from d2lib.benchmark.threads import measure_threads
from d2lib.progress import bar

Scale = Literal["tiny", "full"]


@dataclass
class Results:
    """What was measured: the table, and the points of two plots.

    sharing: milliseconds a block by blocks per stretch. growth: seconds of an update by size.
    """

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    sharing: list[dict[str, float]] = field(default_factory=list)
    growth: list[dict[str, float | str]] = field(default_factory=list)

    @property
    def slopes(self) -> dict[str, float]:
        """Size → exponent of cost at its upper end."""
        return {
            size: slope([(float(p["value"]), float(p["seconds"])) for p in self.growth if p["size"] == size])
            for size in dict.fromkeys(str(point["size"]) for point in self.growth)
        }

    @property
    def missed(self) -> list[Row]:
        """Rows whose bound is not kept."""
        return [row for row in self.rows if row.met is False]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "machine": self.machine,
            "rows": [row.as_dict() for row in self.rows],
            "sharing": self.sharing,
            "growth": self.growth,
            "slopes": self.slopes,
        }


def benchmark(
    scale: Scale,
    *,
    repeats: int,
    threads: int,
    device: str | None = None,
    precision: str | None = None,
    speculators_python: str | None = None,
) -> Results:
    """Measure everything.

    Args:
        scale: full for the sizes that the bounds are stated for; tiny to see that all of it runs, which says nothing
            of speed.
        repeats: runs whose median counts.
        threads: of torch, in this process and in the children.
        device: cpu or cuda; by default a GPU where there is one. precision: fp32 or bf16, of FAST's large products; by
            default bf16 on a GPU. Bounds that are stated for two CPU cores are only stated there.
        speculators_python: interpreter of an environment that has speculators 0.9; without one, the dense training
            step is not compared with it.
    """
    torch.set_num_threads(threads)
    full = scale == "full"
    sizes: dict[str, Any] = {} if full else {"dim": 32, "vocab_size": 128}
    config, dense = drafter_config(**sizes), dense_config(**sizes)
    published = _PUBLISHED if full else sizes
    place = Place.of(device, precision)
    results = Results(describe_machine(threads) | {"FAST": str(place)})

    def table(measure: Callable[[], list[Row]]) -> Callable[[], None]:
        return lambda: results.rows.extend(measure())

    head = (129_280, 1_024, 128) if full else (4_096, 32, 8)
    growth, dense_growth = (
        table if full else {name: values[:2] for name, values in table.items()} for table in (GROWTH, DENSE_GROWTH)
    )
    parts: dict[str, Callable[[], None]] = {
        "head and loss": table(
            lambda: measure_head(
                vocabulary=head[0], dim=head[1], blocks=head[2], repeats=repeats, threads=threads, place=place
            )
        ),
        "update": table(lambda: measure_update(config, blocks=128 if full else 8, repeats=repeats, place=place)),
        "context sharing": lambda: results.sharing.extend(
            measure_sharing(config, blocks=128 if full else 8, repeats=repeats, place=place)
        ),
        "scoring": table(
            lambda: measure_scoring(
                config,
                rounds=2_000 if full else 20,
                literal=100 if full else 5,
                repeats=repeats,
                bound=25,
                place=place,
            )
        ),
        "dense update": table(
            lambda: measure_update(
                dense,
                blocks=128 if full else 8,
                repeats=repeats,
                rows=4_096 if full else 128,
                literal=8 if full else 4,
                place=place,
            )
        ),
        "dense scoring": table(
            lambda: measure_scoring(
                dense,
                rounds=500 if full else 20,
                literal=20 if full else 5,
                repeats=repeats,
                bound=20,
                rows=1_024 if full else 128,
                place=place,
            )
        ),
        "dense training step": table(
            lambda: measure_training_step(
                speculators_python,
                repeats=repeats,
                threads=threads,
                place=place,
                rows=1_024 if full else 128,
                blocks=64 if full else 8,
                **published,
            )
        ),
        "threads": table(lambda: measure_threads(seconds=3.0 if full else 0.0, **sizes)),
        "bootstrap": table(lambda: measure_bootstrap(repeats=repeats, resamples=10_000 if full else 100)),
        "dataset": table(
            lambda: measure_dataset(threads=threads) if full else measure_dataset(threads=threads, production=_SMALL)
        ),
        "growth": lambda: results.growth.extend(
            measure_growth(drafter_config, repeats=repeats, growth=growth, place=place)
        ),
        "dense growth": lambda: results.growth.extend(
            measure_growth(
                dense_config,
                repeats=repeats,
                growth=dense_growth,
                name="dense ",
                rows=1_024 if full else 300,
                place=place,
            )
        ),
    }
    with bar(len(parts), "benchmark", "part") as shown:
        for name, part in parts.items():
            shown.set_postfix_str(name)
            part()
            shown.update()
    return results


_PUBLISHED: dict[str, Any] = {
    "dim": 1_024,
    "vocab_size": 151_936,
    "inter_dim": 3_072,
    "n_heads": 16,
    "n_kv_heads": 8,
    "markov_rank": 256,
}
"""`dense_config` at the widths that are published for a target of dim 1,024."""

_SMALL: dict[Any, tuple[int, int]] = {"train": (2, 600), "dev": (1, 200)}


def describe_machine(threads: int) -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    return {
        "processor": _processor(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "threads": threads,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
