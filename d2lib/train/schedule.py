"""The learning rate of every update."""

from __future__ import annotations

import math

from d2lib.train.recipe import Recipe


def total_updates(blocks: int, recipe: Recipe) -> int:
    """epochs · ceil(blocks / batch): the last batch of an epoch may be short."""
    return recipe.epochs * math.ceil(blocks / recipe.batch)


def learning_rate(update: int, total: int, recipe: Recipe) -> float:
    """The rate that update number `update` (0 … total - 1) is made with.

    Linear warm-up over the first w = ceil(warmup_fraction · total) updates, (update + 1) / w of the peak; then a cosine
    from the peak to 0 over the rest (SGDR, arXiv 1608.03983, without restarts).
    """
    warmup = math.ceil(recipe.warmup_fraction * total)
    if update < warmup:
        return recipe.lr * (update + 1) / warmup
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, total - warmup)))
