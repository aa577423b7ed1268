"""A judged adapter as a PEFT folder, or merged into its projections; created exclusively, complete or not at all.

PEFT's layout (huggingface.co/docs/peft, "PEFT checkpoint format"): adapter_config.json, and adapter_model.safetensors
whose keys are `base_model.model.` + module + `.lora_A.weight` or `.lora_B.weight`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import family_of
from d2lib.drafter.lora import lora_targets, merge
from d2lib.errors import Refused, Unexpected
from d2lib.export.candidate import Candidate, open_candidate
from d2lib.export.card import Kind, build_card, render_readme
from d2lib.files import FileRecord, canonical_json, publish_folder, sha256_bytes, write_exclusive

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
MERGED = "merged.safetensors"
README = "README.md"
CARD = "card.json"

_PREFIX = "base_model.model."


def export_adapter(run: Path, to: Path, *, unqualified: bool = False) -> Candidate:
    """Write a run's judged adapter as a new PEFT folder: adapter, its configuration, README.md and card.json.

    Args:
        run: the run root.
        to: the folder to make.
        unqualified: export without a PASS; the card then says UNQUALIFIED.

    Raises:
        Refused: `to` exists or lies in the run, or for any reason of `open_candidate`. Nothing was made.
    """
    _check_target(run, to)
    candidate = open_candidate(run, unqualified=unqualified)
    settings = peft_config(candidate.config, candidate.rank)
    files = {
        ADAPTER_MODEL: save(peft_tensors(candidate.adapter), metadata={"format": "pt"}),
        ADAPTER_CONFIG: (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode(),
    }
    publish_folder(to, _with_card(candidate, "peft adapter", files).items())
    return candidate


def merge_adapter(run: Path, to: Path, *, unqualified: bool = False) -> Candidate:
    """Write the adapted projections, W + B·A in fp32 under the release's names, and nothing else.

    Args:
        run: the run root.
        to: a new file (`*.safetensors`; the card stands in its header's metadata), or a new folder with the file, its
            README.md and card.json.
        unqualified: merge without a PASS; the card then says UNQUALIFIED.

    Raises:
        Refused: `to` exists or lies in the run, or for any reason of `open_candidate`. Nothing was made.
    """
    _check_target(run, to)
    candidate = open_candidate(run, unqualified=unqualified)
    tensors = merged_projections(candidate)
    if to.suffix == ".safetensors":
        card = canonical_json(build_card(candidate, "merged projections", {})).decode()
        data = save(tensors, metadata={"card": card})  # one entry: the order of several is not deterministic
        try:
            write_exclusive(to, data)
        except OSError as error:
            raise _not_written(to, error) from None
    else:
        publish_folder(to, _with_card(candidate, "merged projections", {MERGED: save(tensors)}).items())
    return candidate


def peft_tensors(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapter under PEFT's keys: `base_model.model.NAME.lora_A.weight` [rank, in], `.lora_B.weight` [out, rank]."""
    return {f"{_PREFIX}{name}.weight": tensor.detach().cpu().contiguous() for name, tensor in adapter.items()}


def peft_config(config: DrafterConfig, rank: int) -> dict[str, Any]:
    """What PEFT must know: a LoRA of scale 1 on exactly these modules."""
    modules = family_of(config).peft_modules or lora_targets
    return {
        "peft_type": "LORA",
        "task_type": None,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "revision": None,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "bias": "none",
        "target_modules": modules(config),
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def merged_projections(candidate: Candidate) -> dict[str, Tensor]:
    """Release name → W + B·A, fp32, of the adapted projections alone."""
    merged = merge(candidate.native(), candidate.adapter, candidate.config)
    return {f"{name}.weight": merged[f"{name}.weight"].contiguous() for name in lora_targets(candidate.config)}


def _with_card(candidate: Candidate, kind: Kind, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files with README.md and card.json, which names the others' digests."""
    records = {name: FileRecord(len(data), sha256_bytes(data)) for name, data in files.items()}
    card = build_card(candidate, kind, records)
    return {
        **files,
        README: render_readme(candidate, card).encode(),
        CARD: canonical_json(card) + b"\n",
    }


def _check_target(run: Path, to: Path) -> None:
    if os.path.lexists(to):
        raise _exists(to)
    if not to.parent.is_dir():
        raise Refused("the folder that is to hold the export is missing", expected="a folder", where=to.parent)
    if Path(os.path.realpath(run)) in Path(os.path.realpath(to)).parents:
        raise Refused("an export does not lie among a run's evidence", expected=f"a place outside of {run}", where=to)


def _exists(to: Path) -> Refused:
    return Refused("an export exists already and is never overwritten", where=to, remedy="choose a new name")


def _not_written(to: Path, error: OSError) -> Unexpected:
    return Unexpected("an export could not be written", found=error.strerror, where=to, remedy="see to the disk")
