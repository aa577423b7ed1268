"""Recipes as data. A pilot qualifies one at its own rate; full training reads it from the pilot's receipt alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from d2lib.errors import Refused
from d2lib.files import Hashed, Record, canonical_json, sha256_bytes

Objective = Literal["KL", "TVD", "LR", "ACE"]

_COMMON: Mapping[str, Any] = {
    "batch": 128,
    "vocab_chunk": 8192,
    "rank": 32,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "clip": 1.0,
    "seed": 23,
    "taps": "raw",
}
"""What all recipes share."""

_OWN: Mapping[str, Mapping[str, Any]] = {
    "KL": {"schedule": "cosine", "warmup_fraction": 0.0},
    "TVD": {"schedule": "cosine", "warmup_fraction": 0.0},
    "LR": {"schedule": "warmup_cosine", "warmup_fraction": 0.1},
    "ACE": {"schedule": "cosine", "warmup_fraction": 0.0},
}
"""What an objective brings with it, besides its rate."""


class Recipe(Record):
    """Everything that decides a training run but the data and the drafter.

    No field has a default, and only `lr` and `epochs` are free: a recipe that differs from its objective's in anything
    else cannot be made.
    """

    objective: Objective
    lr: float = Field(ge=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "warmup_cosine"]
    """Down to 0; see d2lib.train.schedule."""
    warmup_fraction: float
    """Share of all updates that the linear warm-up takes, rounded up to whole updates."""
    epochs: int = Field(ge=1)
    batch: int
    """Blocks per update; the last batch of an epoch may be short."""
    vocab_chunk: int
    """Vocabulary entries that head and loss take at a time. How they are tiled decides no more than rounding."""
    rank: int
    """LoRA rank, and alpha."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    """Decoupled (AdamW, arXiv 1711.05101)."""
    clip: float
    """Largest global gradient norm."""
    seed: int
    """Of the adapter's initialization, the epochs' order and the generator."""
    taps: Literal["raw"]

    @model_validator(mode="after")
    def _is_its_objectives(self) -> Self:
        for name, value in {**_COMMON, **_OWN[self.objective]}.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} {value!r} for {self.objective}, not {getattr(self, name)!r}")
        return self

    @property
    def name(self) -> str:
        """What people call it."""
        return self.objective

    @property
    def sha256(self) -> Hashed:
        """The recipe's identity."""
        return sha256_bytes(canonical_json(self.model_dump()))


def _recipe(objective: Objective, lr: float, epochs: int = 3) -> Recipe:
    return Recipe(objective=objective, lr=lr, epochs=epochs, **_COMMON, **_OWN[objective])


RECIPES: Mapping[str, Recipe] = {
    "KL": _recipe("KL", 2e-4),
    "TVD": _recipe("TVD", 2e-4),
    "LR": _recipe("LR", 5e-5),
    "ACE": _recipe("ACE", 2e-4),
}
"""The production's recipes."""


def to_qualify(objective: str, learning_rate: float | None = None, epochs: int = 3) -> Recipe:
    """The recipe that a pilot is to qualify: a known objective, at the pilot's own rate where one is given."""
    if objective not in RECIPES:
        raise Refused("an unknown objective", expected=sorted(RECIPES), found=objective)
    known = RECIPES[objective]
    return _parse(
        known.model_dump() | {"epochs": epochs, "lr": known.lr if learning_rate is None else learning_rate},
        "a recipe to qualify",
    )


def from_receipt(receipt: Mapping[str, Any], *, where: object = None) -> Recipe:
    """The recipe that a pilot's or an admission's record holds, the only source that full training has.

    Raises:
        Refused: no recipe there, a field missing or unknown, a value that is not its objective's; names the field.
    """
    recipe = receipt.get("recipe")
    if not isinstance(recipe, Mapping):
        raise Refused("no recipe in the receipt", expected="recipe: {…}", found=type(recipe).__name__, where=where)
    return _parse(dict(recipe), where)


def _parse(recipe: dict[str, Any], where: object) -> Recipe:
    place = "recipe" if where is None else f"{where}: recipe"
    return Recipe.parse(recipe, place, message="not a known recipe")
