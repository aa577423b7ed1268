"""Pins: what is known of a production run from outside of it.

Everything else that admission compares comes from the inputs themselves and shows no more than that they agree with
each other. A pins file is part of the reviewed commit; admission, stage and train compare what they find with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from d2lib.data.manifest import SPLITS, Digest, Manifest, Split
from d2lib.errors import Refused
from d2lib.files import Record, canonical_json, inside
from d2lib.strict import read_yaml
from d2lib.train.recipe import Objective, Recipe
from d2lib.train.schedule import total_updates

UNPINNED = "no pins: the inputs were compared with each other only, with nothing from outside of them"


class Pins(Record):
    """The pinned values; each has its own source in the file's comments."""

    source_commit: str = Field(pattern=r"^[0-9a-f]{7,40}$")
    """The pilot source's commit, or the beginning of it that is known."""
    source_map: Digest | None
    """Of the pilot source's file map, where it is known."""
    assembly: str = Field(min_length=1)
    """The assembly folder's name."""
    namespace: str = Field(min_length=1)
    """The pilot's."""
    manifest: Digest
    sequences: dict[Split, int]
    rows: dict[Split, int]
    blocks: int = Field(gt=0)
    """Training blocks."""
    updates: int = Field(gt=0)
    """Of full training."""
    objective: Objective
    learning_rate: float = Field(gt=0)
    epochs: int = Field(ge=1)
    sample_size: int = Field(ge=1)

    def compare(self, where: object, **found: Any) -> None:
        """Refuse the first of the named values that is not the pinned one; `source_commit` must begin with the pin."""
        for name, value in found.items():
            pinned = getattr(self, name)
            if name == "source_commit":
                agrees = isinstance(value, str) and value.startswith(pinned)
            else:
                agrees = canonical_json(value) == canonical_json(pinned)
            if not agrees:
                raise Refused(
                    f"{name} is not the pinned one",
                    expected=pinned,
                    found="none" if value is None else value,
                    where=where,
                )

    def compare_data(self, where: object, manifest: Manifest, recipe: Recipe) -> None:
        """The manifest's counts, the recipe and the updates that follow from both."""
        counts = manifest.counts()
        self.compare(
            where,
            sequences={split: counts.splits[split].sequences for split in SPLITS},
            rows={split: counts.splits[split].rows for split in SPLITS},
            blocks=counts.blocks,
        )
        self.compare_recipe(where, recipe)
        self.compare(where, updates=total_updates(counts.blocks, recipe))

    def compare_recipe(self, where: object, recipe: Recipe) -> None:
        """The recipe's free parts: objective, rate and epochs."""
        self.compare(where, objective=recipe.objective, learning_rate=recipe.lr, epochs=recipe.epochs)


def read_pins(path: Path) -> Pins:
    """Pins from a YAML file; raises Refused when it cannot be read or a field is missing, unknown or wrong."""
    return Pins.parse(read_yaml(path, what="the pins"), path, message="the pins are malformed")


def source_commit(source: Path) -> str | None:
    """The commit of a staged source tree: SOURCE_COMMIT in it, or beside it as staging leaves it."""
    for folder in (source, source.parent):
        if (folder / "SOURCE_COMMIT").exists():
            return inside(folder, "SOURCE_COMMIT").read_text(encoding="utf-8", errors="replace").strip()
    return None
