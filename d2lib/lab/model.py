"""What the lab needs of a target, whatever it is made of: the byte LM of the demo, or a Hugging Face causal LM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from d2lib.files import read_json
from d2lib.lab.target import TargetOutput, load_target


class Cache(Protocol):
    """The rows that a model has run, of B sequences side by side."""

    @property
    def length(self) -> int:
        """How many."""
        ...

    def rewind(self, length: int) -> None:
        """Forget the rows from `length` on: drafts that were not accepted."""
        ...


class LanguageModel(Protocol):
    """A target: its distribution of the next token is softmax(head · hidden), over the whole vocabulary."""

    @property
    def embed(self) -> Tensor:
        """[vocab_size, dim] the token embedding."""
        ...

    @property
    def head(self) -> Tensor:
        """[vocab_size, dim] the LM head."""
        ...

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The layers whose input residual is tapped, in the order of concatenation."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    def cache(self, batch: int, capacity: int) -> Any:
        """A `Cache` for `batch` sequences of up to `capacity` rows."""
        ...

    def __call__(self, tokens: Tensor, cache: Any = None) -> TargetOutput:
        """Taps and final hidden states of tokens [B, L] int64, which follow the rows that are in the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """head · hidden: [..., dim] to [..., vocab_size] fp32."""
        ...


def load_model(folder: Path) -> LanguageModel:
    """The target of an assembly, from its target.json and target.safetensors; refuses what does not fit."""
    described = read_json(folder / "target.json")
    if isinstance(described, dict) and described.get("kind") == "huggingface":
        from d2lib.lab.hf_target import load_huggingface

        return load_huggingface(folder)
    return load_target(folder)
