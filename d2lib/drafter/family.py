"""A drafter family as the rest of the library sees it, and the table of those that there are.

A family is one folder with its arithmetic and one line in `FAMILIES`. What stands above `d2lib.drafter` asks here, by
a drafter's configuration, and knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from d2lib.errors import Refused

if TYPE_CHECKING:
    from d2lib.drafter.config import DrafterConfig
    from d2lib.drafter.fast import FastDrafter
    from d2lib.drafter.reference import Reference
    from d2lib.drafter.weights import Weights
    from d2lib.drafter.weights_card import Question, WeightsCard

Shapes: TypeAlias = dict[str, tuple[int, ...]]

FAMILIES: dict[str, str] = {
    "deepseek": "d2lib.drafter.deepseek",
    "dense": "d2lib.drafter.dense",
}
"""What `drafter.json` calls a family → the package whose `FAMILY` it is, imported when first asked for."""


@dataclass(frozen=True)
class ExportNotes:
    """Sentences on the page of an exported adapter.

    adapter: how a PEFT folder is put to use. merged: what merged projections replace. adapted: what was and was not.
    """

    adapter: str = "`peft.PeftModel.from_pretrained(drafter, FOLDER)` adapts a module tree that has these names."
    merged: str = "Every tensor is W + B · A in fp32 and replaces the tensor of that name."
    adapted: str = "The modules that card.json lists; everything else is the base's own and not in here."


@dataclass(frozen=True)
class Stored:
    """A drafter in a folder that someone else wrote, by its configuration and headers; no value is read yet.

    layout: whose, in a word. config: in normal form. read: its tensors in fp32, with the target's embedding and head.
    """

    folder: Path
    layout: str
    config: DrafterConfig
    read: Callable[[], Weights]


@dataclass(frozen=True)
class Family:
    """Everything that a family is asked for. Functions take its own configuration first.

    config: the record of its sizes; says how many context rows a round sees.
    embed, head: names of the target's token embedding and LM head among the weights.
    shapes: every tensor's name with its shape, those two included; linear weights are [out, in].
    fresh: (config, name, shape, generator) → a new tensor of a drafter that is to be trained.
    lora_targets: names of the adapted modules; `NAME.weight` is theirs.
    projections: names of the weights that are projections, which Muon can train: neither tables nor norms.
    reference, fast: REF, and the training path.
    activations: (config, blocks, seen) → fp32 numbers that FAST holds at most during an update of so many blocks, each
        with `seen` context rows of its own, head and loss aside; an estimate that is too high rather than too low.
    peft_modules: how PEFT is told the adapted modules; by their whole names where it is None.
    notes: what the page of an exported adapter says of the family.
    inspect: the card of a folder or file of released weights, None for one that is not the family's.
    stored: (drafter's folder, target's folder) → the drafter there, None where it is not the family's; raises Refused
        for one that is, and cannot be used.
    """

    config: type[DrafterConfig]
    embed: str
    head: str
    shapes: Callable[[Any], Shapes]
    fresh: Callable[[Any, str, tuple[int, ...], torch.Generator], Tensor]
    lora_targets: Callable[[Any], list[str]]
    projections: Callable[[Any], list[str]]
    reference: type[Reference]
    fast: type[FastDrafter]
    activations: Callable[[Any, int, int], int]
    peft_modules: Callable[[Any], list[str]] | None = None
    notes: ExportNotes = ExportNotes()
    inspect: Callable[[Question], WeightsCard | None] = lambda question: None
    stored: Callable[[Path, Path], Stored | None] = lambda folder, target: None


def family_named(name: object, *, where: object = None) -> Family:
    """The family of that name; raises Refused for one that is not in the table."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise Refused("no such family of drafters", expected=" or ".join(FAMILIES), found=name, where=where)
    family = import_module(FAMILIES[name]).FAMILY
    if not isinstance(family, Family):
        raise TypeError(f"{FAMILIES[name]}.FAMILY is no Family")
    return family


def family_of(config: DrafterConfig) -> Family:
    """The family of a drafter."""
    return family_named(config.family)


def open_stored(folder: Path, target: Path) -> Stored:
    """The drafter that someone else saved in a folder, of whichever family; raises Refused when it is of none."""
    for name in FAMILIES:
        if (found := family_named(name).stored(folder, target)) is not None:
            return found
    raise Refused(
        "no drafter is known in this folder",
        expected=f"a drafter of a family that is known: {', '.join(FAMILIES)}",
        found=", ".join(sorted(path.name for path in folder.iterdir())[:8]) if folder.is_dir() else "no folder",
        where=folder,
        remedy="d2 weights inspect says what is there",
    )


def reference_drafter(
    config: DrafterConfig, weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor] | None = None
) -> Reference:
    """REF of a drafter; arguments as `Reference`."""
    return family_of(config).reference(config, weights, adapter)


def fast_drafter(
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    adapter: Mapping[str, Tensor] | None = None,
    compute_dtype: torch.dtype = torch.float32,
) -> FastDrafter:
    """FAST of a drafter; arguments as `FastDrafter`."""
    return family_of(config).fast(config, weights, adapter, compute_dtype)
