"""A stored dense drafter as it lies in a folder: its layout, its fields where the layout has them, its tensors.

Three layouts are known. DeepSpec's (NeMo AutoModel's too) is flat: a copy of the target's configuration with the
drafter's fields laid over it. SpecForge's keeps the drafter's own fields under `dflash_config`. speculators' keeps the
sizes under `transformer_layer_config` and names itself in `speculators_model_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from d2lib.drafter.dense.target import CONFIG, Target, read_target
from d2lib.drafter.headers import StoredTensor, read_folder_headers
from d2lib.errors import Refused
from d2lib.files import read_json

Store: TypeAlias = Literal["deepspec", "specforge", "speculators"]
"""A layout of files, by the trainer that writes it."""

KEYS = ("speculators_model_type", "dflash_config", "target_layer_ids")
"""The fields by which a layout is known, in the order in which they are looked for."""

SIZES_OF_SPECULATORS = "transformer_layer_config"
DRAFT_OF_SPECFORGE = "dflash_config"

_OLD_HEADS = "logit_head."
_TARGETS_COPIES = ("verifier_norm.weight", "verifier_lm_head.weight")
"""The target's, which speculators once stored."""
VOCABULARY_MAPS = ("d2t", "t2d")


@dataclass(frozen=True)
class Source:
    """A dense drafter's folder by its config.json and headers; no value is read.

    config: where the fields lie. tensors: by our names. dropped: the target's tensors that the layout stores too, and
    vocabulary maps. target: None where none is at hand.
    """

    folder: Path
    config: Path
    store: Store
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    dropped: Mapping[str, StoredTensor]
    target: Target | None

    @property
    def sizes(self) -> Mapping[str, Any]:
        """The fields of the drafter's layers: `hidden_size` and its like."""
        return _object(self.fields, SIZES_OF_SPECULATORS) if self.store == "speculators" else self.fields

    @property
    def draft(self) -> Mapping[str, Any]:
        """What SpecForge keeps under `dflash_config`; nothing elsewhere."""
        return _object(self.fields, DRAFT_OF_SPECFORGE) if self.store == "specforge" else {}

    def places(self, name: str) -> list[tuple[str, Any]]:
        """Where one of the drafter's own fields stands, with its value there; null counts as absent."""
        found = [(f"{DRAFT_OF_SPECFORGE}.{name}", self.draft.get(name)), (name, self.fields.get(name))]
        return [(place, value) for place, value in found if value is not None]

    def own(self, name: str, default: Any = None) -> Any:
        """One of the drafter's own fields."""
        return next((value for _, value in self.places(name)), default)

    def size_place(self, name: str) -> str:
        """Where the layout has a field of the layers."""
        return f"{SIZES_OF_SPECULATORS}.{name}" if self.store == "speculators" else name


def open_source(folder: Path, target: Path | None = None, config: Path | None = None) -> Source:
    """The dense drafter in a folder.

    Args:
        folder: holds config.json and model.safetensors, or its index and shards.
        target: the folder of the target that it drafts for.
        config: another file in place of config.json.

    Raises:
        Refused: no layout that is known, or more than one; or weights that are damaged or stand there twice.
    """
    config = config or folder / CONFIG
    fields = read_json(config)
    if not isinstance(fields, dict):
        raise Refused("not a drafter's configuration", expected="a JSON object", where=config)
    store = recognise(fields, config)
    tensors: dict[str, StoredTensor] = {}
    for stored in read_folder_headers(folder).values():
        name = our_name(stored.name, store)
        if name in tensors:
            raise Refused(
                "a tensor is there under two names",
                expected="one of them",
                found=f"{tensors[name].name} and {stored.name}",
                where=folder,
                remedy="remove the one that is not the drafter's",
            )
        tensors[name] = stored
    unused = (*_TARGETS_COPIES, *VOCABULARY_MAPS) if store == "speculators" else ()
    dropped = {name: tensors.pop(name) for name in unused if name in tensors}
    return Source(folder, config, store, fields, tensors, dropped, None if target is None else read_target(target))


def recognise(fields: Mapping[str, Any], where: object = None) -> Store:
    """The layout whose fields these are; raises Refused when they are none's, or two layouts'."""
    if "speculators_model_type" in fields:
        others = [name for name in (DRAFT_OF_SPECFORGE, "target_layer_ids") if name in fields]
        if others:
            raise Refused(
                "a configuration is in two layouts, whose tap numbers differ by one",
                expected=f"speculators_model_type or {others[0]}",
                found="both",
                where=where,
                remedy="remove the fields of the layout that it was not saved in",
            )
        return "speculators"
    if DRAFT_OF_SPECFORGE in fields:
        return "specforge"
    if "target_layer_ids" in fields:
        return "deepspec"
    raise Refused(
        "not a dense drafter's configuration",
        expected=" or ".join(KEYS),
        found=", ".join(sorted(fields)[:8]) or "no fields",
        where=where,
        remedy="name the folder of the drafter, not of the target",
    )


def our_name(stored: str, store: Store) -> str:
    """Our name of a stored tensor: without a leading `model.`, and without SpecForge's former `logit_head.`."""
    name = stored.removeprefix("model.")
    return name.removeprefix(_OLD_HEADS) if store == "specforge" else name


def _object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, dict) else {}
