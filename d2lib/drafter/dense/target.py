"""The target beside a dense drafter: its sizes, and the embedding and LM head that the drafter shares with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d2lib.drafter.headers import StoredTensor, read_folder_headers, read_stored, require_finite
from d2lib.errors import Refused
from d2lib.files import read_json

CONFIG = "config.json"
FLOATS = ("F32", "BF16", "F16")

_BACKBONES = ("model.", "model.language_model.", "language_model.model.", "")


@dataclass(frozen=True)
class Target:
    """A Hugging Face target's folder by its config.json and headers; no value is read.

    config: the language model's fields. embed, head: the stored tensors, one and the same when they are tied.
    """

    folder: Path
    config: Mapping[str, Any]
    vocab_size: int
    dim: int
    n_layers: int
    embed: StoredTensor
    head: StoredTensor

    def read(self) -> tuple[Tensor, Tensor]:
        """Embedding and LM head, [vocab_size, dim] each, as stored; rows beyond the vocabulary are padding and cut.

        Raises:
            Refused: a value that is not finite.
        """
        embed = self._read(self.embed)
        return embed, embed if self.head == self.embed else self._read(self.head)

    def _read(self, tensor: StoredTensor) -> Tensor:
        value = read_stored(self.folder, tensor)[: self.vocab_size]
        require_finite(value, tensor.name, self.folder)
        return value


def read_target(folder: Path) -> Target:
    """The target in a folder with config.json and safetensors.

    Raises:
        Refused: a size or one of the two tensors is missing, not float, or not of the configuration's shape.
    """
    path = folder / CONFIG
    value = read_json(path)
    if not isinstance(value, dict) or not isinstance(value.get("text_config", {}), dict):
        raise Refused("not a target's configuration", expected="a JSON object", where=path)
    config = {**value, **value.get("text_config", {})}
    sizes: list[Any] = [config.get(name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise Refused(
            "the target's sizes are missing",
            expected="whole numbers vocab_size, hidden_size, num_hidden_layers",
            found=sizes,
            where=path,
        )
    vocab_size, dim, n_layers = sizes
    tensors = read_folder_headers(folder)
    heads = ["lm_head.weight", "language_model.lm_head.weight"]
    embeds = [f"{prefix}embed_tokens.weight" for prefix in _BACKBONES]
    if config.get("tie_word_embeddings"):  # a head that is stored all the same is the one that is used
        heads += embeds
    shape = (vocab_size, dim)
    embed, head = _find(tensors, embeds, shape, folder), _find(tensors, heads, shape, folder)
    return Target(folder, config, vocab_size, dim, n_layers, embed, head)


def _find(tensors: Mapping[str, StoredTensor], names: list[str], shape: tuple[int, int], folder: Path) -> StoredTensor:
    """The first of these tensors that is there; at least as many rows as the vocabulary, and float."""
    tensor = next((tensors[name] for name in names if name in tensors), None)
    if tensor is None:
        raise Refused(
            "the target lacks a tensor that its drafter shares",
            expected=" or ".join(names),
            found=f"{len(tensors)} other tensors",
            where=folder,
        )
    rows, columns = shape
    if tensor.dtype not in FLOATS or tensor.shape[1:] != (columns,) or tensor.shape[0] < rows:
        raise Refused(
            "a tensor of the target has another type or shape than its drafter needs",
            expected=f"{' or '.join(FLOATS)}, at least {rows} × {columns}",
            found=f"{tensor.dtype} {list(tensor.shape)}",
            where=f"{folder}: {tensor.name}",
        )
    return tensor


def same_bits(stored: Tensor, target: Tensor) -> bool:
    """Whether a drafter's copy of a target's tensor is that tensor, bit for bit after the cast to the copy's type."""
    cast = target.to(stored.dtype)
    whole = {2: torch.int16, 4: torch.int32}[stored.element_size()]
    return stored.shape == cast.shape and torch.equal(stored.contiguous().view(whole), cast.contiguous().view(whole))
