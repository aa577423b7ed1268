"""What is measured: drafters of the production's shape with random weights, and random blocks for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.dense.config import DenseConfig
from d2lib.drafter.lora import Adapter, initialize_adapter
from d2lib.drafter.weights import Weights, expected_shapes


def drafter_config(**overrides: Any) -> DeepseekConfig:
    """Window 128, five slots, three stages as in production; dim 256 so that two CPU cores can run the reference."""
    fields: dict[str, Any] = {
        "dim": 256,
        "vocab_size": 4096,
        "n_stages": 3,
        "block_size": 5,
        "noise_token_id": 0,
        "target_layer_ids": (1, 2, 3),
        "window": 128,
        "n_heads": 8,
        "head_dim": 32,
        "rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "n_routed_experts": 8,
        "n_activated": 2,
        "moe_inter_dim": 128,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "markov_rank": 32,
    }
    return DeepseekConfig(**(fields | overrides))


def dense_config(**overrides: Any) -> DenseConfig:
    """A published drafter of dim 1,024 at a quarter of every width, so that two CPU cores can run the reference."""
    layers = overrides.get("n_layers", 5)
    fields: dict[str, Any] = {
        "dim": 256,
        "vocab_size": 4096,
        "n_layers": layers,
        "inter_dim": 768,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 128,
        "rope": {"theta": 1e6},
        "max_position_embeddings": 40_960,
        "layer_types": ("full_attention",) * layers,
        "causal": (False,) * layers,
        "layout": "anchor_first",
        "block_size": 7,
        "mask_token_id": 0,
        "target_layer_ids": (2, 8, 14, 20, 26),
        "n_target_layers": 28,
        "markov_rank": 64,
    }
    return DenseConfig(**(fields | overrides))


def random_weights(config: DrafterConfig, seed: int = 23) -> Weights:
    """Random tensors that keep activations near one: linear maps of variance 1/in, norms of one, mixes near rest."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        noise = torch.randn(shape, generator=generator)
        return 0.1 * noise if len(shape) == 1 else noise / math.sqrt(shape[-1])

    return {name: draw(name, shape) for name, shape in expected_shapes(config).items()}


def random_adapter(config: DrafterConfig, rank: int = 8, seed: int = 23) -> Adapter:
    """An adapter away from its start, so that every gradient is at work; its tensors ask for one."""
    generator = torch.Generator().manual_seed(seed)
    adapter = initialize_adapter(config, rank, seed)
    for name, tensor in adapter.items():
        if name.endswith("lora_B"):
            adapter[name] = 0.02 * torch.randn(tensor.shape, generator=generator)
    return {name: tensor.requires_grad_() for name, tensor in adapter.items()}


def random_blocks(
    config: DrafterConfig, blocks: int, *, stretch: int = 1, rows: int = 8192, seed: int = 23
) -> BlockBatch:
    """Blocks on one random sequence, in stretches of neighbouring anchors that have half of it, or all they can see,
    before them.

    Args:
        config: the drafter's.
        blocks: B, a multiple of `stretch`.
        stretch: neighbouring anchors that share most of their context rows; 1 for anchors drawn one by one.
        rows: the sequence's; more than a block's context, stretch and block_size.
        seed: of tokens, taps, hidden states and places.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (rows,), generator=generator)
    taps = torch.randn(rows, config.n_taps * config.dim, generator=generator).bfloat16()
    hidden = torch.randn(rows, config.dim, generator=generator).bfloat16()
    first, last = min(config.context_rows(rows), rows // 2), rows - config.block_size - stretch
    begins = torch.randint(first, last + 1, (blocks // stretch, 1), generator=generator)
    return blocks_at(config, (begins + torch.arange(stretch)).flatten(), tokens, taps, hidden)


def blocks_at(config: DrafterConfig, anchor: Tensor, tokens: Tensor, taps: Tensor, hidden: Tensor) -> BlockBatch:
    """The blocks at these rows [B] of one sequence, given its tokens, taps and hidden states; every target exists."""
    count = torch.tensor([config.context_rows(row) for row in anchor.tolist()])
    wanted = anchor[:, None] + torch.arange(-int(count.max()), 0)
    context_valid = wanted >= (anchor - count)[:, None]
    used = torch.unique(wanted[context_valid])
    ahead = anchor[:, None] + torch.arange(config.block_size)
    taught = torch.unique(ahead)
    return BlockBatch(
        taps=taps[used],
        positions=used,
        context=torch.where(context_valid, torch.searchsorted(used, wanted), 0),
        context_valid=context_valid,
        anchor=anchor,
        anchor_token=tokens[anchor],
        previous=tokens[ahead],
        target=tokens[ahead + 1],
        valid=torch.ones_like(ahead, dtype=torch.bool),
        teacher_hidden=hidden[taught],
        teacher=torch.searchsorted(taught, ahead),
    )
