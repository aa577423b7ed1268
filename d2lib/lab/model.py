"""What the lab needs of a target, whatever it is made of: the byte LM of the demo, or a Hugging Face causal LM."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field
from torch import Tensor

from d2lib.data.manifest import Digest
from d2lib.errors import Refused
from d2lib.files import Record, read_json, sha256_file
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


WEIGHTS = "target.safetensors"


class Elsewhere(Record):
    """A target.json that stands for a target which lies in another folder: where, and the digests of its two files."""

    kind: Literal["elsewhere"] = "elsewhere"
    folder: str = Field(min_length=1)
    """Absolute; holds target.json and target.safetensors."""
    description: Digest
    weights: Digest


def target_folder(assembly: Path) -> Path:
    """The folder of an assembly's target: the assembly itself, or the one that its target.json names by its digests.

    Raises:
        Refused: a file of the target that lies elsewhere is missing or is another one.
    """
    described = read_json(assembly / "target.json")
    if not isinstance(described, dict) or described.get("kind") != "elsewhere":
        return assembly
    named = Elsewhere.parse(described, assembly / "target.json", message="not a target that lies elsewhere")
    folder = Path(named.folder)
    if not folder.is_absolute():
        raise Refused("a target's folder is an absolute path", found=named.folder, where=assembly / "target.json")
    for name, digest in (("target.json", named.description), (WEIGHTS, named.weights)):
        found = str(sha256_file(folder / name))
        if found != digest:
            raise Refused("the target is not the assembly's", expected=digest, found=found, where=folder / name)
    return folder


def load_model(folder: Path) -> LanguageModel:
    """The target of an assembly, from its target.json and target.safetensors; refuses what does not fit."""
    folder = target_folder(folder)
    described = read_json(folder / "target.json")
    if isinstance(described, dict) and described.get("kind") == "huggingface":
        from d2lib.lab.hf_target import load_huggingface

        return load_huggingface(folder)
    return load_target(folder)
