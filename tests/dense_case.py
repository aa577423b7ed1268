"""Tiny dense drafters, their targets, and folders of them in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from d2lib.drafter.dense.checkpoint import write_dense
from d2lib.drafter.dense.config import DenseConfig, Rope, shapes
from d2lib.drafter.dense.source import Store
from d2lib.files import read_json

VOCAB, DIM, DEPTH = 37, 8, 6


def dense_config(**changes: Any) -> DenseConfig:
    """An anchor-first drafter of two full layers with a vanilla Markov head and confidence, but for the changes."""
    fields: dict[str, Any] = {
        "dim": DIM,
        "vocab_size": VOCAB,
        "n_layers": 2,
        "inter_dim": 12,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 6,
        "rope": Rope(theta=10000.0),
        "max_position_embeddings": 256,
        "layer_types": ["full_attention"] * 2,
        "layout": "anchor_first",
        "block_size": 4,
        "mask_token_id": 36,
        "target_layer_ids": [1, 3, 5],
        "n_target_layers": DEPTH,
        "markov_rank": 3,
        "confidence": True,
        "confidence_with_markov": True,
        **changes,
    }
    fields.setdefault("causal", [kind == "sliding_attention" for kind in fields["layer_types"]])
    return DenseConfig.model_validate(fields)


def dense_weights(config: DenseConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights that bf16 and fp16 hold without rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-64, 65, shape, generator=generator) / 64 for name, shape in shapes(config).items()}


def write_target(
    folder: Path, weights: dict[str, Tensor], *, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """A target's folder: config.json, and of its tensors the embedding and the LM head."""
    folder.mkdir()
    vocab_size, dim = weights["lm_head.weight"].shape
    fields = {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "num_hidden_layers": DEPTH,
        "tie_word_embeddings": False,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {
        "model.embed_tokens.weight": weights["embed_tokens.weight"],
        "lm_head.weight": weights["lm_head.weight"],
        "model.norm.weight": torch.ones(dim),
    }
    save_file({name: tensor.to(dtype).clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def stored(tmp_path: Path, store: Store = "deepspec", **changes: Any) -> tuple[DenseConfig, dict[str, Tensor]]:
    """A drafter in `draft` with its target in `target`."""
    config = dense_config(**changes)
    weights = dense_weights(config)
    write_target(tmp_path / "target", weights)
    write_dense(tmp_path / "draft", config, weights, store=store, dtype="float32")
    return config, weights


def edit(folder: Path, change: Any) -> None:
    """Put another config.json in place of a folder's."""
    fields = read_json(folder / "config.json")
    change(fields)
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(fields))


def rename(folder: Path, change: Any) -> None:
    """Put other tensors in place of a folder's: `change` takes them by name and returns what to store."""
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    path.unlink()
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
