"""A run small enough for a live check: a byte LM of 24 tokens and a drafter that knows its commonest bigrams."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from data_case import write_dataset
from tiny import tiny_config

from d2lib.data.assembly import Assembly
from d2lib.data.sidecar import Sidecar
from d2lib.drafter.weights import initialize, save_weights
from d2lib.files import write_json
from d2lib.lab.live import decode_alone
from d2lib.lab.model import LanguageModel, load_model
from d2lib.lab.target import Target, TargetConfig, save_target

VOCABULARY = 24
ROWS, GEN_START = 44, 12


def write_byte_target(folder: Path) -> LanguageModel:
    """A random byte LM, peaked enough not to fall into one token for ever."""
    config = TargetConfig(vocab_size=VOCABULARY, dim=24, n_layers=3, n_heads=2, mlp_dim=32, tap_layers=(0, 2))
    save_target(folder, Target(config, torch.Generator().manual_seed(3)))
    return load_model(folder)


def write_run(folder: Path, target: LanguageModel, **sizes: Any) -> Assembly:
    """An assembly around a target that is in the folder already: contexts at random, and the drafter."""
    vocabulary, dim = target.head.shape
    config = tiny_config(
        dim=dim,
        vocab_size=vocabulary,
        noise_token_id=vocabulary - 1,
        block_size=5,
        target_layer_ids=target.tap_layers,
        markov_rank=vocabulary,
        window=16,
        hc_sinkhorn_iters=2,
        **sizes,
    )
    lengths = {split: [ROWS] * 2 for split in ("train", "dev", "heldout_legal", "heldout_general")}
    manifest = write_dataset(folder, config, head=target.head, lengths=lengths, gen_start=GEN_START)  # type: ignore[arg-type]
    write_json(folder / "drafter.json", config.model_dump(mode="json"))
    weights = initialize(config, target.embed, target.head, torch.Generator().manual_seed(1))
    bigrams: Counter[tuple[int, int]] = Counter()
    for entry in manifest.split("heldout_legal"):
        context = Sidecar.open(folder, entry, manifest).rows("tokens", 0, GEN_START).long()
        tokens = decode_alone(target, context, ROWS, stop_tokens=target.stop_tokens).tokens.tolist()
        bigrams.update(zip(tokens[GEN_START:], tokens[GEN_START + 1 :], strict=False))
    weights["mtp.1.markov_head.embed.weight"] = torch.eye(vocabulary)
    head = torch.zeros(vocabulary, vocabulary)
    for (before, after), count in bigrams.items():
        head[after, before] = 30.0 * count / sum(n for (b, _), n in bigrams.items() if b == before)
    weights["mtp.1.markov_head.head.weight"] = head
    save_weights(folder / "native.safetensors", weights, config)
    return Assembly(folder)
