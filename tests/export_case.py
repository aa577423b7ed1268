"""A small finished run: a trained adapter, three judged splits, and their receipts; no kernel runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from evidence_case import make_receipt
from gates_cases import digest, part
from tiny import tiny_adapter, tiny_config, tiny_weights

from d2lib.data.assembly import SCORED
from d2lib.data.manifest import FileEntry, Manifest, SequenceEntry
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.lora import Adapter
from d2lib.drafter.weights import Weights, save_weights
from d2lib.files import sha256_file, write_json
from d2lib.gates.g2 import bind
from d2lib.train.checkpoint import MOMENTS, Position, State, save
from d2lib.train.recipe import RECIPES

CONFIG = tiny_config()
RECIPE = RECIPES["KL"]
WEIGHTS = tiny_weights(CONFIG)
ADAPTER = tiny_adapter(CONFIG, rank=RECIPE.rank)
GAINING, LOSING = 8, -20


@dataclass(frozen=True)
class Drafter:
    """What the run adapted, and what it adapted it with."""

    config: DrafterConfig = CONFIG
    weights: Weights = field(default_factory=lambda: WEIGHTS)
    adapter: Adapter = field(default_factory=lambda: ADAPTER)


def make_judged(
    root: Path,
    plus: int,
    *,
    drafter: Drafter | None = None,
    forged: Mapping[str, Any] | None = None,
    verdict: str | None = None,
    **trained: object,
) -> Path:
    """A run root with all that finish leaves behind.

    drafter: the tiny one of DeepSeek's family by default. plus: as in gates_cases.scored, positive passes every gate.
    forged: fields of g2.json that do not follow from its parts. verdict: the receipt's, where it is not that of
    g2.json. trained: what the adapter's checkpoint is bound to other than the admission.
    """
    drafter = drafter or Drafter()
    (root / "assembly").mkdir(parents=True)
    (root / "full").mkdir()
    (root / "admission").mkdir()
    save_weights(root / "assembly" / "native.safetensors", drafter.weights, drafter.config)
    write_json(root / "assembly" / "drafter.json", drafter.config.model_dump(mode="json"))
    file = FileEntry(path="a.safetensors", size=1, sha256=digest("8"))
    Manifest(
        namespace="demo",
        dim=drafter.config.dim,
        vocab_size=drafter.config.vocab_size,
        n_taps=drafter.config.n_taps,
        target={"name": "case", "config": digest("9"), "sha256": digest("a")},
        sequences=(SequenceEntry(id="a", split="train", family="a", rows=9, gen_start=4, file=file),),
    ).write(root / "assembly" / "MANIFEST.json")
    admitted = {
        "namespace": "demo-full",
        "manifest": str(sha256_file(root / "assembly" / "MANIFEST.json")),
        "native": str(sha256_file(root / "assembly" / "native.safetensors")),
        "drafter": str(sha256_file(root / "assembly" / "drafter.json")),
        "pilot": digest("4"),
        "recipe": str(RECIPE.sha256),
        "initialization": digest("7"),
    }
    value = {"admitted": True, "recipe": RECIPE.model_dump(mode="json"), "identities": admitted}
    write_json(root / "admission" / "admitted.json", value)
    save_checkpoint(root / "full" / "full-fast.pt", admitted, drafter.adapter, **trained)
    admission = {"admission": "admission/admitted.json"}
    make_receipt(
        root,
        "train",
        1,
        inputs={"assembly": "assembly", **admission},
        outputs={"adapter": "full/full-fast.pt"},
        result={"updates": 1},
    )
    names = {name: admitted[name] for name in ("manifest", "native", "drafter", "pilot", "recipe")}
    names["adapter"] = str(sha256_file(root / "full" / "full-fast.pt"))
    parts = {split: part(split, plus, **names) for split in SCORED}
    for split, judged in parts.items():
        write_json(root / "full" / f"{split}.json", judged.model_dump(mode="json"))
    g2 = bind(parts)
    write_json(root / "full" / "g2.json", g2.model_dump(mode="json") | dict(forged or {}))
    make_receipt(
        root,
        "finish",
        1,
        inputs={**admission, **{split: f"full/{split}.json" for split in SCORED}},
        outputs={"g2": "full/g2.json"},
        result={"splits": {}},
        verdict=verdict or g2.verdict,
    )
    return root


def save_checkpoint(path: Path, admitted: dict[str, str], adapter: Adapter = ADAPTER, **changed: object) -> None:
    """A completed full run of one update."""
    recipe = RECIPE.model_dump()
    identity = {**admitted, "run": "full-fast", "backend": "fast", "recipe": recipe, "blocks": 5, "total": 1, **changed}
    position = Position(update=1, total=1, epoch=0, place=1, presented=5, order=digest("9"), lr=0.5)
    metrics = {"blocks": torch.tensor([5.0]), "lr": torch.tensor([0.5])}
    save(
        path,
        State(
            identity=identity,
            position=position,
            adapter=adapter,
            moments={f"{name}.{moment}": torch.zeros_like(t) for name, t in adapter.items() for moment in MOMENTS},
            rng={"cpu": torch.get_rng_state()},
            metrics={name: column.double() for name, column in metrics.items()},
            complete=True,
            seconds=1.0,
        ),
    )
