"""Dense drafters small enough for a test, with every tensor random so that no term can hide."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from d2lib.drafter.batch import BlockBatch, Round
from d2lib.drafter.dense.config import DenseConfig, Rope, lora_targets, shapes

ROPES: dict[str, dict[str, Any]] = {
    "default": {"type": "default", "theta": 100.0},
    "linear": {"type": "linear", "theta": 100.0, "factor": 2.5},
    "llama3": {
        "type": "llama3",
        "theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "type": "yarn",
        "theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
    },
}
"""One of each type, of a theta and lengths at which every type bends some channel of a few."""


def dense_config(**overrides: Any) -> DenseConfig:
    """Two full layers, anchor first, K = 3, vanilla Markov, confidence with Markov. Sizes differ so that a transposed
    axis shows; epsilon is large, to show too."""
    layers = overrides.get("n_layers", 2)
    fields: dict[str, Any] = {
        "dim": 16,
        "vocab_size": 37,
        "n_layers": 2,
        "inter_dim": 18,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 6,
        "norm_eps": 1e-3,
        "rope": ROPES["default"],
        "max_position_embeddings": 256,
        "layer_types": ("full_attention",) * layers,
        "causal": (False,) * layers,
        "layout": "anchor_first",
        "block_size": 3,
        "mask_token_id": 36,
        "target_layer_ids": (0, 2),
        "n_target_layers": 4,
        "markov_rank": 5,
        "confidence": True,
        "confidence_with_markov": True,
    }
    if overrides.get("markov_rank") == 0:
        fields["confidence_with_markov"] = False
    return DenseConfig(**(fields | overrides))


def dense_weights(config: DenseConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights: linear of variance near 2/in, norms around one, and non-zero biases."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            return 1 + 0.3 * noise
        if name.endswith(".bias"):
            return 0.3 * noise
        if name.endswith(("embed_tokens.weight", "markov_w1.weight")):
            return noise
        return noise * (1.5 / math.sqrt(shape[-1]))

    return {name: draw(name, shape) for name, shape in shapes(config).items()}


def dense_adapter(config: DenseConfig, rank: int = 3, seed: int = 23) -> dict[str, Tensor]:
    """An adapter away from its start: B is random too."""
    generator, sizes, adapter = torch.Generator().manual_seed(seed), shapes(config), dict[str, Tensor]()
    for name in lora_targets(config):
        out, inner = sizes[f"{name}.weight"]
        adapter[f"{name}.lora_A"] = torch.randn(rank, inner, generator=generator) / math.sqrt(inner)
        adapter[f"{name}.lora_B"] = 0.3 * torch.randn(out, rank, generator=generator)
    return adapter


def dense_sequence(config: DenseConfig, rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [rows] int64, raw taps [rows, n_taps·dim] and teacher hidden [rows, dim] in bf16."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(config.vocab_size, (rows,), generator=generator),
        torch.randn(rows, config.n_taps * config.dim, generator=generator).bfloat16(),
        torch.randn(rows, config.dim, generator=generator).bfloat16(),
    )


def dense_round(config: DenseConfig, anchor: int, *, rows: int | None = None, seed: int = 0) -> Round:
    """The round at a row of a random sequence, with every context row that exists."""
    rows = anchor + config.block_size + 2 if rows is None else rows
    tokens, taps, hidden = dense_sequence(config, rows, seed)
    return round_of(config, tokens, taps, hidden, anchor)


def round_of(config: DenseConfig, tokens: Tensor, taps: Tensor, hidden: Tensor, anchor: int) -> Round:
    """The round at an anchor, all rows before it."""
    ahead, last = anchor + torch.arange(config.block_size), len(tokens) - 1
    return Round(
        taps=taps[:anchor],
        positions=torch.arange(anchor),
        anchor=anchor,
        anchor_token=int(tokens[anchor]),
        previous=tokens[ahead.clamp(max=last)],
        target=tokens[(ahead + 1).clamp(max=last)],
        valid=ahead + 1 <= last,
        teacher_hidden=hidden[ahead.clamp(max=last)],
    )


def dense_batch(config: DenseConfig, blocks: int, seed: int = 0, *, rows: int = 21) -> BlockBatch:
    """Rounds on one random sequence, anchors anywhere, with every context row that a layer can see.

    The first anchors are 0 (no context), 1, and the last possible one (a single valid target), as far as `blocks`
    allows; the others are drawn with replacement.
    """
    tokens, taps, hidden = dense_sequence(config, rows, seed)
    drawn = torch.randint(rows - 1, (blocks,), generator=torch.Generator().manual_seed(seed + 1))
    anchor = torch.cat([torch.tensor([0, 1, rows - 2]), drawn])[:blocks]
    count = torch.tensor([config.context_rows(int(a)) for a in anchor])
    wanted = anchor[:, None] + torch.arange(-int(count.max()), 0)
    context_valid = wanted >= (anchor - count)[:, None]
    used = wanted[context_valid].unique()
    context = torch.searchsorted(used, wanted.clamp(min=0)) if len(used) else torch.zeros_like(wanted)
    ahead, last = anchor[:, None] + torch.arange(config.block_size), rows - 1
    return BlockBatch(
        taps=taps[used],
        positions=used,
        context=torch.where(context_valid, context, 0),
        context_valid=context_valid,
        anchor=anchor,
        anchor_token=tokens[anchor],
        previous=tokens[ahead.clamp(max=last)],
        target=tokens[(ahead + 1).clamp(max=last)],
        valid=ahead + 1 <= last,
        teacher_hidden=hidden,
        teacher=ahead.clamp(max=last),
    )


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    """Any rotary type with random figures."""
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    fields: dict[str, Any] = {"type": kind, "theta": draw(st.sampled_from([50.0, 1e3, 1e4, 1e6]))}
    if kind != "default":
        fields["factor"] = draw(st.floats(1.0, 16.0))
    if kind == "llama3":
        low = draw(st.floats(0.5, 3.0))
        fields |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 4.0))}
    if kind == "llama3" or (kind == "yarn" and draw(st.booleans())):
        fields["original_max_position_embeddings"] = draw(st.integers(16, 4096))
    if kind == "yarn":
        slow = draw(st.floats(0.5, 4.0))
        fields |= {"beta_slow": slow, "beta_fast": slow * draw(st.floats(1.5, 32.0)), "truncate": draw(st.booleans())}
        scale = draw(st.sampled_from(["factor", "given", "mscales"]))
        if scale == "given":
            fields["attention_factor"] = draw(st.floats(0.5, 2.0))
        elif scale == "mscales":
            fields |= {"mscale": draw(st.floats(0.3, 2.0)), "mscale_all_dim": draw(st.floats(0.3, 2.0))}
    return Rope(**fields)


@st.composite
def dense_configs(draw: st.DrawFn, **fixed: Any) -> DenseConfig:
    """Any dense drafter: layouts, heads, layer types, causality, biases, rope, and sizes that differ."""
    layers = draw(st.integers(1, 2))
    layout = fixed.get("layout") or draw(st.sampled_from(["anchor_first", "one_plus_n"]))
    rank = fixed["markov_rank"] if "markov_rank" in fixed else draw(st.sampled_from([0, 1, 4]))
    heads = ["vanilla", "gated"] + ["rnn"] * (layout == "anchor_first")
    block = fixed.get("block_size") or draw(st.integers(1, 4))
    taps = draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))
    confidence, kv_heads = draw(st.booleans()), draw(st.integers(1, 2))
    fields: dict[str, Any] = {
        "n_layers": layers,
        "layer_types": tuple(draw(st.sampled_from(["full_attention", "sliding_attention"])) for _ in range(layers)),
        "sliding_window": draw(st.integers(block + 1, block + 6)),
        "causal": tuple(draw(st.booleans()) for _ in range(layers)),
        "layout": layout,
        "block_size": block,
        "markov_rank": rank,
        "markov_head_type": draw(st.sampled_from(heads)) if rank else "vanilla",
        "confidence": confidence,
        "confidence_with_markov": bool(confidence and rank and draw(st.booleans())),
        "attention_bias": draw(st.booleans()),
        "n_kv_heads": kv_heads,
        "n_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": 2 * draw(st.integers(1, 4)),
        "target_layer_ids": tuple(sorted(taps)),
        "rope": draw(ropes()),
    }
    return dense_config(**(fields | fixed))
