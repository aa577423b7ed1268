"""A tiny Qwen3 with a byte-level tokenizer, a tiny dense drafter of it in any layout, and conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from dense_case import dense_config, dense_weights
from hf_case import byte_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from d2lib.drafter.dense.checkpoint import write_dense
from d2lib.drafter.dense.config import Rope
from d2lib.drafter.dense.source import Store

DIM, VOCAB, DEPTH, POSITIONS = 32, 259, 4, 1024
WORDS = ["invoice", "parcel", "refund", "battery", "screen", "cable", "warranty", "delivery", "address", "account"]
WORDS += ["password", "order", "colour", "size", "return", "shop", "voucher", "charger", "manual", "repair"]


def write_qwen(folder: Path, *, template: bool = True, **changes: Any) -> Qwen3ForCausalLM:
    """Save a random target of `DEPTH` layers."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": 48,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        **changes,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(1)
    if not template:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return model


def write_drafter(folder: Path, model: Qwen3ForCausalLM, store: Store = "deepspec", **changes: Any) -> None:
    """Save a random drafter of the target's sizes, with its embedding and head."""
    fields: dict[str, Any] = {
        "dim": DIM,
        "vocab_size": VOCAB,
        "mask_token_id": VOCAB - 1,
        "n_target_layers": DEPTH,
        "target_layer_ids": [1, 3],
        "max_position_embeddings": POSITIONS,
        "rope": Rope(theta=10000.0),
        "inter_dim": 48,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "block_size": 5,
    }
    config = dense_config(**(fields | changes))
    weights = {name: value / 4 for name, value in dense_weights(config).items()}
    weights |= {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
        "lm_head.weight": model.get_output_embeddings().weight.detach(),
    }
    write_dense(folder, config, weights, store=store, dtype="float32")


def conversations(count: int = 40, seed: int = 3) -> list[dict[str, Any]]:
    """Conversations of one to three turns, of twenty customers; every other line is ShareGPT's."""
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        turns = [" ".join(draw.choices(WORDS, k=draw.randint(4, 14))) for _ in range(2 * draw.randint(1, 3))]
        customer = f"customer {number % (count // 2)}"
        if number % 2:
            roles = ("human", "gpt")
            said = [{"from": roles[n % 2], "value": text} for n, text in enumerate(turns)]
            lines.append({"customer": customer, "conversations": said})
        else:
            roles = ("user", "assistant")
            said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
            said.insert(0, {"role": "system", "content": "Be brief."})
            lines.append({"customer": customer, "messages": said})
    return lines


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    """One JSON value a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def profile(folder: Path, **changes: Any) -> dict[str, Any]:
    """A capture profile of the files in a folder."""
    traffic = {
        "files": [
            {
                "path": str(folder / "conversations.jsonl"),
                "shares": {"train": 0.4, "dev": 0.2, "heldout_legal": 0.2, "heldout_general": 0.2},
            }
        ],
        "group": "customer",
        "longest_prompt": 400,
        "longest_answer": 24,
        "least_answer": 12,
    }
    return {
        "namespace": "mine",
        "threads": 1,
        "target": {"kind": "huggingface", "folder": str(folder / "target")},
        "drafter": {"folder": str(folder / "drafter")},
        "temperature": 1.0,
        "traffic": traffic | changes.pop("traffic", {}),
        **changes,
    }
