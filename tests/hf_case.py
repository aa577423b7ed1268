"""A random Llama of two layers with a byte-level tokenizer, in a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>"]
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """Two special tokens, the 256 byte symbols, and `extra` words that never occur."""
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"unused{n}" for n in range(extra))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


def write_llama(folder: Path, *, tokenizer: Any = None, tied: bool = True, **overrides: Any) -> LlamaForCausalLM:
    """Save a random model and its tokenizer; returns the model."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
    }
    model = LlamaForCausalLM(LlamaConfig(**(sizes | overrides))).eval()
    model.save_pretrained(folder)
    (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return model
