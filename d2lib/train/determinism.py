"""The same bits every time: deterministic kernels, a fixed number of threads, a seeded generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def reproducible(device: str, threads: int | None, seed: int) -> Iterator[None]:
    """Deterministic kernels, a number of threads and a seeded generator; everything is put back at the end.

    Even on a CPU some gradients are summed in no fixed order otherwise. On a GPU an operation that has no deterministic
    form warns; the host sets CUBLAS_WORKSPACE_CONFIG=:4096:8.
    """
    cuda = torch.device(device).type == "cuda"
    debug: Any = torch.utils.deterministic
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode(), debug.fill_uninitialized_memory
    with torch.random.fork_rng(devices=[torch.device(device)] if cuda else []):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True, warn_only=cuda)
        debug.fill_uninitialized_memory = False  # a debugging aid that costs time
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before[0])
            torch.set_deterministic_debug_mode(before[1])
            debug.fill_uninitialized_memory = before[2]
