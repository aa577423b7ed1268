"""FAST of the dense drafter."""

from __future__ import annotations

from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.dense.reference import DenseReference
from d2lib.drafter.fast import FastDrafter


def activations(config: DenseConfig, blocks: int, seen: int) -> int:
    """See Family.activations. Counted by what each part keeps for its gradient, rounded up."""
    c = config
    slots, rows = blocks * c.n_rows, blocks * seen
    kept = seen + c.n_rows
    queries, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    layer = slots * (5 * c.dim + 4 * queries + 4 * c.n_heads * kept + 4 * c.inter_dim)
    layer += (rows + slots) * 5 * keys + 6 * blocks * kept * keys
    return c.n_layers * layer + rows * (c.n_taps + 2) * c.dim + slots * 4 * c.dim


class DenseFast(FastDrafter, DenseReference):
    """The training path; arguments as `FastDrafter`."""
