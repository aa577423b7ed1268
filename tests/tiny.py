"""Drafters and batches small enough for a test, with every tensor random so that no term can hide."""

from __future__ import annotations

import math
from typing import Any

import torch

from d2lib.drafter.batch import BlockBatch
from d2lib.drafter.deepseek.config import DeepseekConfig
from d2lib.drafter.lora import Adapter, initialize_adapter
from d2lib.drafter.weights import Weights, expected_shapes


def tiny_config(**overrides: Any) -> DeepseekConfig:
    """Two stages, window 7, K = 3. Sizes differ so that a transposed axis shows; epsilons are large, to show too."""
    fields: dict[str, Any] = {
        "dim": 24,
        "vocab_size": 53,
        "n_stages": 2,
        "block_size": 3,
        "noise_token_id": 52,
        "target_layer_ids": (0, 2),
        "window": 7,
        "n_heads": 4,
        "head_dim": 10,
        "rope_head_dim": 4,
        "q_lora_rank": 14,
        "o_lora_rank": 6,
        "o_groups": 2,
        "n_routed_experts": 5,
        "n_activated": 2,
        "moe_inter_dim": 18,
        "swiglu_limit": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 6,
        "hc_eps": 0.01,
        "norm_eps": 1e-3,
        "markov_rank": 8,
    }
    return DeepseekConfig(**(fields | overrides))


def tiny_weights(config: DeepseekConfig, seed: int = 0) -> Weights:
    """Random weights: linear of variance 1/in, norms around one, and non-zero sinks, biases and mixes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.2 * noise
        if name.endswith(("_base", "attn_sink")):
            return noise
        if name.endswith("_scale"):
            return 0.7 + 0.2 * noise
        if name.endswith("gate.bias"):
            return 0.3 * noise
        if name == "embed.weight":
            return noise
        return noise * (1.5 / math.sqrt(shape[-1]))

    return {name: draw(name, shape) for name, shape in expected_shapes(config).items()}


def tiny_adapter(config: DeepseekConfig, rank: int = 3, seed: int = 23) -> Adapter:
    """An adapter away from its start: B is random too."""
    adapter = initialize_adapter(config, rank, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in adapter.items():
        if name.endswith("lora_B"):
            adapter[name] = 0.3 * torch.randn(tensor.shape, generator=generator)
    return adapter


def random_batch(config: DeepseekConfig, blocks: int, seed: int = 0, *, rows: int | None = None) -> BlockBatch:
    """Rounds on one random sequence of `rows` rows, anchors anywhere: short contexts and masked tails included.

    The first anchors are 0 (no context), 1, and the last possible one (a single valid target), as far as `blocks`
    allows; the others are drawn with replacement.
    """
    rows = config.window * 3 if rows is None else rows
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (rows,), generator=generator)
    taps = torch.randn(rows, config.n_taps * config.dim, generator=generator).bfloat16()
    hidden = torch.randn(rows, config.dim, generator=generator).bfloat16()
    drawn = torch.randint(rows - 1, (blocks,), generator=generator)
    anchor = torch.cat([torch.tensor([0, 1, rows - 2]), drawn])[:blocks]

    back = torch.arange(-config.window, 0)
    wanted = anchor[:, None] + back
    context_valid = wanted >= 0
    used = wanted[context_valid].unique()
    context = torch.searchsorted(used, wanted.clamp(min=0)) if len(used) else torch.zeros_like(wanted)
    ahead = anchor[:, None] + torch.arange(config.block_size)
    teacher_rows = ahead.clamp(max=rows - 1).unique()
    return BlockBatch(
        taps=taps[used],
        positions=used,
        context=torch.where(context_valid, context, 0),
        context_valid=context_valid,
        anchor=anchor,
        anchor_token=tokens[anchor],
        previous=tokens[ahead.clamp(max=rows - 1)],
        target=tokens[(ahead + 1).clamp(max=rows - 1)],
        valid=ahead + 1 <= rows - 1,
        teacher_hidden=hidden[teacher_rows],
        teacher=torch.searchsorted(teacher_rows, ahead.clamp(max=rows - 1)),
    )
