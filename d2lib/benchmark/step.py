"""The dense family's whole training step against speculators' own class: forward, loss and backward, eager.

Each side is a process of its own that reads the same weights, rows and anchors from a file and steps when told to; the
sides take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2lib.benchmark.cases import blocks_at, dense_config, random_weights
from d2lib.benchmark.measure import Place, Row
from d2lib.benchmark.turns import take_turns
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.family import fast_drafter
from d2lib.drafter.lora import initialize_adapter
from d2lib.drafter.objectives import SlotStatistics
from d2lib.errors import Refused, Unexpected
from d2lib.evidence.environment import child_environment, library_folder

_SHARED = 1e-4
"""Relative difference of the two losses up to which the sides have computed the same."""


def decayed_kl(slots: SlotStatistics, valid: Tensor) -> Tensor:
    """The peer's loss: KL of slot i times exp(-i/4), averaged over the slots of a block; [B, K] to [B]."""
    weight = torch.exp(-torch.arange(valid.shape[1], device=valid.device) / 4) * valid
    return (slots.kl * weight).sum(1) / valid.sum(1)


def write_case(path: Path, config: DenseConfig, *, rows: int, blocks: int, seed: int = 23) -> None:
    """Weights (`weights.NAME`), tokens [rows], taps [rows, n_taps·dim], hidden [rows, dim] and anchor [blocks], all fp32.

    Hidden rows have a mean square of one, so that the peer, which norms them, gets what FAST is given.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, config.dim, generator=generator)
    tensors = {f"weights.{name}": value for name, value in random_weights(config).items()}
    tensors["tokens"] = torch.randint(config.vocab_size, (rows,), generator=generator)
    tensors["taps"] = torch.randn(rows, config.n_taps * config.dim, generator=generator)
    tensors["hidden"] = hidden / hidden.square().mean(1, keepdim=True).sqrt()
    drawn = torch.randperm(rows - config.block_size - 1, generator=generator)[:blocks]
    tensors["anchor"] = 1 + drawn.sort().values
    save_file(tensors, path)


def training_step(*, case: str, sizes: dict[str, Any], threads: int, device: str, learns: str) -> None:
    """FAST's side, in a process of its own; learns: `adapter`, or `weights`, all but embedding and LM head."""
    torch.set_num_threads(threads)
    config = DenseConfig.model_validate(sizes)
    given = {name: value.clone() for name, value in load_file(case).items()}
    weights = {name.removeprefix("weights."): given.pop(name).to(device) for name in list(given) if name.startswith("weights.")}
    adapter = None
    if learns == "adapter":
        adapter = {name: t.to(device) for name, t in initialize_adapter(config, 16, 23).items()}
    else:
        free = {name: value for name, value in weights.items() if name not in {"embed_tokens.weight", "lm_head.weight"}}
    leaves = [value.requires_grad_() for value in (adapter if adapter is not None else free).values()]
    drafter = fast_drafter(config, weights, adapter)
    batch = blocks_at(config, *(given[name] for name in ("anchor", "tokens", "taps", "hidden"))).to(device)

    def step() -> float:
        for leaf in leaves:
            leaf.grad = None
        measured = drafter.loss(batch, decayed_kl)
        measured.loss.backward()  # type: ignore[no-untyped-call]
        return float(measured.loss.detach())

    take_turns(step, device)


if __name__ == "__main__":
    training_step(**json.loads(sys.argv[1]))
