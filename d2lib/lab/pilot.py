"""The pilot: matched FAST and REF arms on the same blocks, scored on the frozen sample, judged."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from d2lib.admission.records import (
    Arithmetic,
    PilotArm,
    PilotArms,
    PilotReceipt,
    SampleRecord,
    ScoresFile,
    write_record,
)
from d2lib.admission.source import SOURCE_MAP, check_numerical, check_source, snapshot_source
from d2lib.data.assembly import Assembly
from d2lib.data.manifest import Split
from d2lib.data.sample import SAMPLED, frozen_sample
from d2lib.drafter.config import DrafterConfig
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.lora import Adapter, load_adapter, save_adapter
from d2lib.drafter.weights import Weights
from d2lib.errors import Refused
from d2lib.files import fsync_folder, sha256_file, write_json
from d2lib.gates.evaluate import PROBE_ROUNDS
from d2lib.gates.pilot import PilotAdapters, PilotScores, PilotVerdict, judge_pilot
from d2lib.gates.scoring import Scorer, score_sample
from d2lib.train.arms import Precision
from d2lib.train.loop import TrainResult, arithmetic, finished, train
from d2lib.train.recipe import Recipe
from d2lib.train.schedule import total_updates


@dataclass(frozen=True)
class Pilot:
    """The verdict, both arms' runs, the record, and how scoring was computed."""

    verdict: PilotVerdict
    arms: Mapping[str, TrainResult]
    receipt: PilotReceipt
    scores: PilotScores
    scoring: str
    scoring_rate: float
    """Measured seconds per round and pass."""

    @property
    def rates(self) -> dict[str, float]:
        """Measured seconds per update, by arm."""
        return {name: arm.seconds_per_update for name, arm in self.arms.items()}

    def curves(self, arm: str) -> dict[str, Tensor]:
        """Loss (mean over the update's blocks), rate and gradient norm per update."""
        metrics = self.arms[arm].metrics
        return {
            "loss": metrics["loss_sum"] / metrics["blocks"],
            "lr": metrics["lr"],
            "grad_norm": metrics["grad_norm"],
        }


def run_pilot(
    assembly: Assembly,
    recipe: Recipe,
    out: Path,
    *,
    namespace: str,
    g1: Path,
    presented_blocks: int,
    sample_size: int,
    precision: Precision = "fp32",
    device: str = "cpu",
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str], object] = lambda _: None,
) -> Pilot:
    """Run the pilot into its folder: repo/, both arms' checkpoints, scores.json, receipt.json.

    An interrupted pilot goes on from its arms' last checkpoints.

    Args:
        assembly: what capture made.
        recipe: to qualify; the pilot's schedule ends with its own updates.
        out: the pilot's folder.
        namespace: of the frozen sample and the receipt.
        g1: g1.json, which the receipt is bound to.
        presented_blocks: each arm presents so many, rounded up to whole updates.
        sample_size: rounds of each sampled split.
        precision: of the FAST arm's large products. device: what trains and scores; both stand in the receipt.
    """
    out.mkdir(parents=True, exist_ok=True)
    _snapshot(out, progress)
    blocks = assembly.blocks("train")
    updates = -(-presented_blocks // recipe.batch)
    identity: dict[str, Any] = {"namespace": namespace, "g1": str(sha256_file(g1)), **assembly.identities}
    weights = assembly.load_weights(device)
    computed = arithmetic(precision, device, torch.get_num_threads())
    arms = {}
    for name, backend in (("fast", "fast"), ("ref", "ref")):
        progress(f"{name.upper()} arm")
        own = computed | ({"precision": "fp32"} if backend == "ref" else {}) | {"device": device}
        arms[name] = _arm(blocks, assembly, weights, recipe, out, name, backend, identity, own, updates, stop)
        _export(out / f"{name}.safetensors", arms[name].adapter, assembly.config)
    digests = {name: str(sha256_file(out / f"{name}.safetensors")) for name in arms}

    populations: dict[Split, Any] = {}
    for split in SAMPLED:
        file = assembly.k2(split)
        populations[split] = (file.sha256, file.population(assembly.manifest, split))
    sample = frozen_sample(namespace, populations, sample_size)
    drafters = {
        "baseline": reference_drafter(assembly.config, weights),
        **{
            name: reference_drafter(assembly.config, weights, {key: t.to(device) for key, t in arm.adapter.items()})
            for name, arm in arms.items()
        },
    }
    request, anchors = next(iter(populations["dev"][1].items()))
    scorer = Scorer(drafters, assembly.blocks("dev").rounds_batch(request, anchors[:PROBE_ROUNDS]))
    found, began = {}, time.monotonic()
    for split in SAMPLED:
        progress(f"scoring {len(sample.rounds[split]):,} sampled rounds of {split}")
        found[split] = score_sample(scorer, assembly.blocks(split), sample.rounds[split], stop=stop)
    passes = len(drafters) * sum(map(len, sample.rounds.values()))
    rate = max(time.monotonic() - began, 1e-9) / passes
    scores = PilotScores.model_validate(
        {
            "namespace": namespace,
            "sample_identity": str(sample.identity),
            "adapters": PilotAdapters(**digests),
            "block_size": assembly.config.block_size,
            "splits": found,
        }
    )
    digest = write_json(out / "scores.json", scores.model_dump(mode="json"), once=True)
    verdict = judge_pilot(scores)
    receipt = PilotReceipt(
        namespace=namespace,
        verdict=verdict.verdict,
        recipe=recipe.model_dump(mode="json"),
        arithmetic=Arithmetic.model_validate(computed),
        manifest_sha256=assembly.identities["manifest"],
        k2={split: assembly.identities[f"k2_{split}"] for split in SAMPLED},
        g1_sha256=str(sha256_file(g1)),
        initialization_sha256=str(arms["fast"].initialization),
        sample=SampleRecord.of(sample),
        arms=PilotArms(
            **{
                name: PilotArm(
                    checkpoint=f"{name}.safetensors",
                    sha256=digests[name],
                    updates=arm.updates,
                    seconds=round(max(arm.seconds, 1e-6), 6),
                )
                for name, arm in arms.items()
            }
        ),
        source_map_sha256=str(sha256_file(out / "repo" / "SOURCE_MAP.json")),
        scores=ScoresFile(file="scores.json", sha256=str(digest)),
        statistics=verdict.model_dump(mode="json"),
    )
    write_record(out / "receipt.json", receipt)
    return Pilot(verdict, arms, receipt, scores, scorer.note, rate)


def _snapshot(out: Path, progress: Callable[[str], object]) -> None:
    """The running source as OUT/repo, whole or not at all; an earlier attempt's must have the same numerical files."""
    repo, working = out / "repo", out / ".repo.part"
    if not repo.exists():
        progress("snapshot of the source")
        shutil.rmtree(working, ignore_errors=True)
        snapshot_source(working)
        working.rename(repo)
        fsync_folder(out)
    check_source(repo, sha256_file(repo / SOURCE_MAP))
    check_numerical(repo)


def _export(path: Path, adapter: Adapter, config: DrafterConfig) -> None:
    """An arm's adapter as a file of its own, or the same one there."""
    if not path.exists():
        return save_adapter(path, adapter, config)
    stored = load_adapter(path, config)
    if stored.keys() != adapter.keys() or any(not torch.equal(stored[name], adapter[name]) for name in adapter):
        raise Refused("an exported adapter is not its checkpoint's", where=path)
    return None


def _arm(
    blocks: Any,
    assembly: Assembly,
    weights: Weights,
    recipe: Recipe,
    out: Path,
    name: str,
    backend: Any,
    identity: dict[str, Any],
    computed: dict[str, Any],
    updates: int,
    stop: Callable[[], bool],
) -> TrainResult:
    """One arm, trained now, or taken from its finished file when an earlier attempt got that far and computed alike."""
    final = out / f"{name}.pt"
    if final.exists():
        own = {"run": name, "recipe": recipe.model_dump(), "backend": backend, "blocks": len(blocks)}
        bound = identity | own | computed
        total = min(updates, total_updates(len(blocks), recipe))
        return finished(final, assembly.config, bound | {"total": total})
    return train(
        blocks,
        assembly.config,
        weights,
        recipe,
        out,
        name=name,
        identity=identity,
        backend=backend,
        precision=computed["precision"],
        device=computed["device"],
        resume=True,
        save_every=60.0,
        limit_updates=updates,
        stop=stop,
    )
