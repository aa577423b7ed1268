"""How much device memory a job needs, from the drafter's sizes: what a start asks of a card.

Estimates that are too high rather than too low; the frozen weights are most of either.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from d2lib.data.manifest import Manifest
from d2lib.drafter.config import DrafterConfig, load_config
from d2lib.drafter.family import family_of
from d2lib.drafter.head_loss import GPU_CHUNK, TILE_BYTES
from d2lib.drafter.lora import adapter_shapes
from d2lib.drafter.weights import expected_shapes, kept_dtypes
from d2lib.gates.evaluate import PROBE_ROUNDS
from d2lib.train.arms import DTYPES, Precision
from d2lib.train.recipe import RECIPES

Work = Literal["train", "g2"]
"""The notebooks that compute on a card."""

LIBRARIES = 1 << 30
"""Bytes that a CUDA context and the libraries' workspaces take."""


def weights_bytes(config: DrafterConfig, precision: Precision = "fp32") -> int:
    """The frozen drafter, its projections in the precision of the large products."""
    kept = kept_dtypes(config, DTYPES[precision])
    return sum(math.prod(shape) * kept[name].itemsize for name, shape in expected_shapes(config).items())


def training_bytes(
    config: DrafterConfig, *, batch: int, rank: int, anchor: int, precision: Precision = "fp32", device: bool = True
) -> int:
    """FAST over one update.

    Args:
        batch: blocks of an update. rank: the adapter's.
        anchor: the largest anchor; with it a round sees the most context rows.
        device: whether `LIBRARIES` counts.
    """
    seen = config.context_rows(anchor)
    adapter = sum(math.prod(shape) for shape in adapter_shapes(config, rank).values())
    rows = batch * config.block_size
    head = TILE_BYTES + rows * min(GPU_CHUNK, config.vocab_size) * 4
    return (
        weights_bytes(config, precision)
        + 5 * 4 * adapter  # values, gradients, two moments, one more while they change
        + 4 * family_of(config).activations(config, batch, seen)
        + head
        + (LIBRARIES if device else 0)
    )


def scoring_bytes(config: DrafterConfig, *, rank: int, anchor: int, device: bool = True) -> int:
    """REF on the rounds that are scored together, baseline and candidate sharing the frozen weights.

    Args: as `training_bytes`.
    """
    adapter = sum(math.prod(shape) for shape in adapter_shapes(config, rank).values())
    logits = PROBE_ROUNDS * config.block_size * config.vocab_size
    return (
        weights_bytes(config)
        + 4 * adapter
        + 4 * family_of(config).activations(config, PROBE_ROUNDS, config.context_rows(anchor))
        + 8 * 8 * logits  # a few copies in float64
        + (LIBRARIES if device else 0)
    )


def card_bytes(assembly: Path, work: Work) -> int:
    """What a job needs of a card, from an assembly's drafter.json and MANIFEST.json; no row and no weight is read."""
    config, manifest = load_config(assembly / "drafter.json"), Manifest.load(assembly / "MANIFEST.json")
    recipe = RECIPES["KL"]  # batch and rank are every recipe's
    anchor = max(entry.rows for entry in manifest.sequences)
    if work == "train":
        return training_bytes(config, batch=recipe.batch, rank=recipe.rank, anchor=anchor)
    return scoring_bytes(config, rank=recipe.rank, anchor=anchor)
