"""The learning rate of every update."""

from __future__ import annotations

import math

from d2lib.errors import Refused
from d2lib.train.recipe import Recipe


def updates_per_epoch(blocks: int, recipe: Recipe) -> int:
    """ceil(blocks / batch): the last batch of an epoch may be short."""
    return -(-blocks // recipe.batch)


def total_updates(blocks: int, recipe: Recipe) -> int:
    """epochs · ceil(blocks / batch)."""
    return recipe.epochs * updates_per_epoch(blocks, recipe)


def blocks_presented(update: int, blocks: int, recipe: Recipe) -> int:
    """Blocks that the first `update` updates see, repeated epochs counted again."""
    epochs, place = divmod(update, updates_per_epoch(blocks, recipe))
    return epochs * blocks + place * recipe.batch


def learning_rate(update: int, total: int, recipe: Recipe) -> float:
    """The rate that update number `update` (0 … total - 1) is made with.

    Linear warm-up over the first w = ceil(warmup_fraction · total) updates, (update + 1) / w of the peak; then a cosine
    from the peak to 0 over the rest (SGDR, arXiv 1608.03983, without restarts). The first update after warm-up is made
    with the peak, and rate 0 would be that of update number `total`, which there is none of.
    """
    if not 0 <= update < total:
        raise Refused("a run has no such update", expected=f"0 … {total - 1}", found=update)
    warmup = math.ceil(recipe.warmup_fraction * total)
    if update < warmup:
        return recipe.lr * ((update + 1) / warmup)
    return recipe.lr * (0.5 * (1 + math.cos(math.pi * (update - warmup) / (total - warmup))))
