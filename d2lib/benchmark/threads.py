"""What a second thread is worth, alone and beside a busy process, with idle threads that spin and that sleep."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from d2lib.benchmark.cases import drafter_config, random_adapter, random_blocks, random_weights
from d2lib.benchmark.drafting import fast_update
from d2lib.benchmark.measure import Row, in_child
from d2lib.drafter.batched import BatchedReference
from d2lib.drafter.family import fast_drafter
from d2lib.evidence.environment import WAITING

SPINNING = {"OMP_WAIT_POLICY": "ACTIVE"}


def measure_threads(*, seconds: float, dim: int = 64, vocab_size: int = 256) -> list[Row]:
    """Two threads against one; each policy in a process of its own, since OpenMP reads it once.

    Args:
        seconds: that each rate is measured for.
    """
    asleep, spinning = (
        in_child("threads", environment=policy, dim=dim, vocab_size=vocab_size, seconds=seconds)
        for policy in (WAITING, SPINNING)
    )
    rows = []
    for beside in ("alone", "beside a busy process"):
        for what, how, rates in (
            ("REF scoring", "which takes one of them", asleep),
            ("FAST update", "asleep while idle", asleep),
            ("FAST update", "spinning while idle", spinning),
        ):
            ratio = rates[f"{what}, 2, {beside}"] / rates[f"{what}, 1, {beside}"]
            rows.append(Row(f"{what}, 2 threads", f"{how}, {beside}", "1 thread", ratio, "times faster"))
    return rows


def rates(*, dim: int, vocab_size: int, seconds: float) -> dict[str, float]:
    """Calls a second of 32 rounds and of an update of a small drafter, by number of threads and by what else runs.

    Busy processes and thread counts are this process's own affair, so it is run in a child.
    """
    config = drafter_config(dim=dim, vocab_size=vocab_size, n_heads=4, n_routed_experts=4)
    weights, adapter = random_weights(config), random_adapter(config)
    reference = BatchedReference(config, weights, {name: tensor.detach() for name, tensor in adapter.items()})
    fast, batch = fast_drafter(config, weights, adapter), random_blocks(config, 32, rows=512)

    def score() -> None:
        with torch.no_grad():
            reference.forward_batch(batch)

    tasks: dict[str, Callable[[], object]] = {
        "REF scoring": score,
        "FAST update": lambda: fast_update(fast, batch, "KL"),
    }
    found = {}
    for beside, neighbours in (("alone", 0), ("beside a busy process", 1)):
        with _busy(neighbours):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for name, task in tasks.items():
                    found[f"{name}, {threads}, {beside}"] = _rate(task, seconds)
    return found


def _rate(task: Callable[[], object], seconds: float) -> float:
    """Calls a second, after one to warm up."""
    task()
    calls, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds or not calls:
        task()
        calls += 1
    return calls / max(passed, 1e-9)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but run."""
    started = [subprocess.Popen((sys.executable, "-c", "while True: pass")) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
