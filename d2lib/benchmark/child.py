"""Tasks that are measured in a process of their own: `python -m d2lib.benchmark.child TASK JSON` prints figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from d2lib.benchmark.turns import Peak
from d2lib.entry import run_command


def head(*, blocks: int, vocabulary: int, dim: int, threads: int, device: str) -> dict[str, float]:
    """Memory of one fused loss with its gradient."""
    from d2lib.benchmark.head import LOSSES, HeadCase

    torch.set_num_threads(threads)
    objective = LOSSES["0.1 CE + 0.9 TV"]
    # the libraries' own memory is there before
    HeadCase.random(1, vocabulary=4096, dim=dim, device=device).fused(objective)
    case = HeadCase.random(blocks, vocabulary=vocabulary, dim=dim, device=device)
    with Peak(device) as peak:
        case.fused(objective)
    return {"extra": peak.extra}


def dataset(*, folder: str, dim: int, threads: int) -> dict[str, float]:
    """Open a dataset, then take a batch and an epoch's order."""
    from d2lib.benchmark.cases import drafter_config
    from d2lib.data.blocks import D2Blocks
    from d2lib.data.manifest import Manifest

    torch.set_num_threads(threads)
    config = drafter_config(dim=dim, vocab_size=64)
    began = time.perf_counter()
    with Peak() as opened:
        blocks = D2Blocks(Manifest.load(Path(folder, "MANIFEST.json")), Path(folder), "train", config)
    seconds = time.perf_counter() - began
    before = _pages(folder)
    blocks.batch(torch.tensor([len(blocks) // 2]))
    read = _pages(folder) - before
    order = blocks.epoch_order(23, 0)
    return {
        "seconds": seconds,
        "extra": opened.extra,
        "read": read / 1e6,
        "blocks": len(blocks),
        "order": order.numel() * order.element_size() / len(blocks),
    }


def threads(*, dim: int, vocab_size: int, seconds: float) -> dict[str, float]:
    """Rates by number of threads."""
    from d2lib.benchmark.threads import rates

    return rates(dim=dim, vocab_size=vocab_size, seconds=seconds)


def _pages(folder: str) -> int:
    """Bytes of a folder's files that this process holds in memory (Linux: smaps)."""
    total, ours = 0, False
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):  # a mapping's first line
                ours = words[-1].startswith(folder)
            elif ours and words[0] == "Rss:":
                total += int(words[1]) * 1024
    return total


TASKS: dict[str, Callable[..., dict[str, float]]] = {"head": head, "dataset": dataset, "threads": threads}


def main(arguments: list[str]) -> int:
    """Run one task and print its figures."""
    task, given = arguments
    options: dict[str, Any] = json.loads(given)
    print(json.dumps(TASKS[task](**options)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command("benchmark", lambda: main(sys.argv[1:])))
