"""The assembly: one folder with the captured sequences, the native drafter and the live run's trajectories.

MANIFEST.json  shards/ID.safetensors  drafter.json  native.safetensors  target.json  target.safetensors
k2/SPLIT.k2_drafts.jsonl  provenance.json

A target.json may also say where a large target lies, with the digests of its files (see d2lib.lab.model).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch

from d2lib.data.blocks import D2Blocks
from d2lib.data.k2 import K2File
from d2lib.data.manifest import Manifest, Split
from d2lib.drafter.config import DrafterConfig, load_config
from d2lib.drafter.weights import Weights, load_weights
from d2lib.errors import Refused
from d2lib.files import Hashed, inside, sha256_file

ScoredSplit = Literal["dev", "heldout_legal", "heldout_general"]
SCORED: tuple[ScoredSplit, ...] = get_args(ScoredSplit)
"""The splits that a live K2 trajectory exists for."""
K2_NAMES: dict[ScoredSplit, str] = {split: f"k2/{split}.k2_drafts.jsonl" for split in SCORED}
"""Where a split's live K2 trajectory stands in an assembly."""


def k2_file(folder: Path, split: ScoredSplit, given: Mapping[ScoredSplit, Path]) -> Path:
    """A split's live K2 trajectory: the given one, or the assembly folder's; raises Refused when it is a link."""
    path = given.get(split)
    return inside(folder, K2_NAMES[split]) if path is None else inside(path.parent, path.name)


class Assembly:
    """Opens an assembly folder; reads no rows, and the weights only when asked for.

    Args:
        folder: the assembly.
        k2: split → its live K2 trajectory, where these lie elsewhere than in the assembly.

    Raises:
        Refused: a file is missing, malformed, or leaves the folder.
    """

    def __init__(self, folder: Path, k2: Mapping[ScoredSplit, Path] | None = None) -> None:
        self.folder = folder
        self._k2 = dict(k2 or {})
        self.manifest = Manifest.load(folder / "MANIFEST.json")

    @cached_property
    def config(self) -> DrafterConfig:
        """The drafter's configuration, checked against the manifest's sizes."""
        path = inside(self.folder, "drafter.json")
        config = load_config(path)
        for name in ("dim", "vocab_size", "n_taps"):
            if getattr(config, name) != getattr(self.manifest, name):
                raise Refused(
                    "the drafter and the manifest disagree",
                    expected=f"{name} {getattr(self.manifest, name)}",
                    found=getattr(config, name),
                    where=path,
                )
        return config

    @property
    def native(self) -> Path:
        """The native drafter's weights file."""
        return inside(self.folder, "native.safetensors")

    @cached_property
    def weights(self) -> Weights:
        """The native drafter, with the target's embedding and LM head."""
        return load_weights(self.native, self.config)

    def load_weights(self, device: str, projections: torch.dtype = torch.float32) -> Weights:
        """The native drafter on a device, put there tensor by tensor (see d2lib.drafter.weights.load_weights).

        On the CPU in fp32 these are `weights`, which all who ask share.
        """
        if device == "cpu" and projections == torch.float32:
            return self.weights
        return load_weights(self.native, self.config, device=device, projections=projections)

    def blocks(self, split: Split) -> D2Blocks:
        """A split's blocks; opens the sidecars, reads no rows."""
        return D2Blocks(self.manifest, self.folder, split, self.config)

    def k2_path(self, split: ScoredSplit) -> Path:
        """The split's live K2 trajectory; raises Refused when it is a link."""
        return k2_file(self.folder, split, self._k2)

    def k2(self, split: ScoredSplit) -> K2File:
        """The split's live K2 trajectory, validated."""
        return K2File.load(self.k2_path(split), self.manifest)

    @cached_property
    def identities(self) -> dict[str, str]:
        """Digests of what a verdict hangs on: manifest, native weights, drafter configuration, K2 files."""
        files = {
            "manifest": self.folder / "MANIFEST.json",
            "native": self.native,
            "drafter": self.folder / "drafter.json",
        }
        files |= {f"k2_{split}": self.k2_path(split) for split in SCORED if self.k2_path(split).exists()}
        digests: dict[str, Hashed] = {name: sha256_file(path) for name, path in files.items()}
        return {name: str(digest) for name, digest in digests.items()}
