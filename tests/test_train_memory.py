"""The memory that a start asks of a card: never below what is really held, and not absurdly above it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from d2lib.benchmark.cases import drafter_config, random_adapter, random_blocks, random_weights
from d2lib.drafter.family import fast_drafter
from d2lib.drafter.objectives import OBJECTIVES
from d2lib.drafter.weights import kept_dtypes
from d2lib.train.arms import DTYPES, Precision
from d2lib.train.memory import TILE_BYTES, scoring_bytes, training_bytes, weights_bytes


@pytest.mark.parametrize(
    ("sizes", "blocks", "precision"),
    [
        ({}, 32, "fp32"),
        ({}, 8, "bf16"),
        ({"n_heads": 32}, 8, "fp32"),
        ({"hc_mult": 8, "hc_sinkhorn_iters": 5}, 8, "fp32"),
        ({"n_activated": 4, "moe_inter_dim": 512}, 8, "fp32"),
        ({"window": 32, "vocab_size": 16384}, 8, "fp32"),
    ],
)
def test_the_estimate_is_above_what_an_update_holds_at_most(
    sizes: dict[str, Any], blocks: int, precision: Precision
) -> None:
    """Torch's own tracker follows every tensor through the update, forward and backward."""
    config = drafter_config(**sizes)
    kept = kept_dtypes(config, DTYPES[precision])
    weights = {name: tensor.to(kept[name]) for name, tensor in random_weights(config).items()}
    drafter = fast_drafter(config, weights, random_adapter(config, 32), DTYPES[precision])
    batch = random_blocks(config, blocks)
    tracker = MemTracker()
    with tracker:
        drafter.loss(batch, OBJECTIVES["ACE"]).loss.backward()
    held = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    tiles = 8 * blocks * config.block_size * config.vocab_size  # so few blocks do not fill the tiles
    estimate = training_bytes(config, batch=blocks, rank=32, anchor=8192, precision=precision, device=False)
    assert held < estimate - TILE_BYTES + tiles < 2 * held


def test_the_parts_grow_with_what_they_depend_on() -> None:
    config = drafter_config()
    values = sum(tensor.numel() for tensor in random_weights(config).values())
    assert weights_bytes(config) == 4 * values
    assert 2 * values < weights_bytes(config, "bf16") < 4 * values
    few, many = (training_bytes(config, batch=batch, rank=32, anchor=8192) for batch in (8, 16))
    assert few < many
    near, far = (training_bytes(config, batch=8, rank=32, anchor=anchor) for anchor in (16, 128))
    assert near < far
    assert scoring_bytes(config, rank=32, anchor=8192) > weights_bytes(config)
