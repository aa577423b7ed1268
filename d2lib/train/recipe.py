"""Recipes as data. A pilot qualifies one at its own rate; full training reads it from the pilot's receipt alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from d2lib.errors import Refused
from d2lib.files import Hashed, Record, canonical_json, sha256_bytes

Objective = Literal["KL", "TVD", "LR", "ACE"]


class Recipe(Record):
    """Everything that decides a training run but the data and the drafter.

    Optimizer: AdamW with decoupled weight decay. `lr` is the peak rate. Sizes: `batch` blocks an update.
    """

    objective: Objective
    lr: float = Field(ge=0)
    schedule: Literal["cosine", "warmup_cosine"]
    warmup_fraction: float = Field(ge=0, lt=1)
    epochs: int = Field(ge=1)
    batch: Literal[128] = 128
    vocab_chunk: Literal[8192] = 8192
    rank: Literal[32] = 32
    beta1: float = Field(default=0.9, ge=0.9, le=0.9)
    beta2: float = Field(default=0.999, ge=0.999, le=0.999)
    eps: float = Field(default=1e-8, ge=1e-8, le=1e-8)
    weight_decay: float = Field(default=0.01, ge=0.01, le=0.01)
    clip: float = Field(default=1.0, ge=1.0, le=1.0)
    seed: Literal[23] = 23
    taps: Literal["raw"] = "raw"

    @property
    def name(self) -> str:
        """What people call it."""
        return self.objective

    @property
    def sha256(self) -> Hashed:
        """The recipe's identity."""
        return sha256_bytes(canonical_json(self.model_dump()))


RECIPES: Mapping[str, Recipe] = {
    "KL": Recipe(objective="KL", lr=2e-4, schedule="cosine", warmup_fraction=0.0, epochs=3),
    "TVD": Recipe(objective="TVD", lr=2e-4, schedule="cosine", warmup_fraction=0.0, epochs=3),
    "LR": Recipe(objective="LR", lr=5e-5, schedule="warmup_cosine", warmup_fraction=0.1, epochs=3),
    "ACE": Recipe(objective="ACE", lr=2e-4, schedule="cosine", warmup_fraction=0.0, epochs=3),
}
"""The production's recipes."""


def to_qualify(objective: str, learning_rate: float | None = None, epochs: int = 3) -> Recipe:
    """The recipe that a pilot is to qualify: a known objective, at the pilot's own rate where one is given."""
    if objective not in RECIPES:
        raise Refused("an unknown objective", expected=sorted(RECIPES), found=objective)
    known = RECIPES[objective].model_dump()
    return Recipe(**(known | {"epochs": epochs} | ({} if learning_rate is None else {"lr": learning_rate})))


def from_receipt(receipt: Mapping[str, Any], *, where: object = None) -> Recipe:
    """The recipe that a pilot's or an admission's record holds; every field must be there and be a known value."""
    recipe = receipt.get("recipe")
    if not isinstance(recipe, Mapping):
        raise Refused("no recipe in the receipt", expected="recipe: {…}", found=type(recipe).__name__, where=where)
    missing = Recipe.model_fields.keys() - recipe.keys()
    if missing:
        raise Refused("the receipt's recipe is incomplete", expected=sorted(missing), where=where)
    try:
        found = Recipe.model_validate(dict(recipe))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise Refused(
            f"the receipt's recipe has a bad {field}", expected=first["msg"], found=first.get("input"), where=where
        ) from None
    shape = RECIPES[found.objective]
    if (found.schedule, found.warmup_fraction) != (shape.schedule, shape.warmup_fraction):
        raise Refused(
            "the receipt's schedule is not its objective's",
            expected=f"{shape.schedule}, warm-up {shape.warmup_fraction}",
            found=f"{found.schedule}, warm-up {found.warmup_fraction}",
            where=where,
        )
    return found
