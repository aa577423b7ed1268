"""A small case that is admitted: real rows, a real drafter's live rounds, a real source snapshot, every digest bound.

A test spoils one thing, binds the rest again, and sees which check says no.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from data_case import write_dataset
from safetensors.torch import load_file, save
from tiny import tiny_config, tiny_weights

from d2lib.admission.admit import Admission, run_admission
from d2lib.admission.case import AdmissionInputs, ArmName
from d2lib.admission.recompute import recompute_verdict
from d2lib.admission.records import SCORED
from d2lib.admission.source import SOURCE_MAP, numerical_files, snapshot_source
from d2lib.data.assembly import Assembly
from d2lib.data.blocks import D2Blocks
from d2lib.data.integrity import coverage_rows, integrity_rows
from d2lib.data.k2 import K2File, K2Header, K2Round, leading_matches, write_k2
from d2lib.data.manifest import FileEntry, Manifest
from d2lib.data.sample import SAMPLED, frozen_sample
from d2lib.data.sidecar import Sidecar
from d2lib.drafter.family import reference_drafter
from d2lib.drafter.lora import initialization_sha256, initialize_adapter, load_adapter, save_adapter
from d2lib.drafter.reference import Reference
from d2lib.drafter.weights import save_weights
from d2lib.files import canonical_json, digest_tree, record_file, record_tree, sha256_file
from d2lib.gates.pilot import PilotScores, judge_pilot
from d2lib.gates.scoring import Scorer
from d2lib.params import PilotDemands
from d2lib.train import checkpoint
from d2lib.train.loop import train
from d2lib.train.recipe import to_qualify

CONFIG = tiny_config(block_size=5)
WEIGHTS = tiny_weights(CONFIG)
LENGTHS = {"train": [30, 26], "dev": [38, 33], "heldout_legal": [36, 40], "heldout_general": [30, 31]}
PILOT = "tiny-p1"
SAMPLE_SIZE = 16
RECIPE = to_qualify("ACE", 0.05)
"""At a rate at which three updates change what is drafted."""
UPDATES = 3
DEMANDS = PilotDemands(
    presented_blocks=UPDATES * RECIPE.batch,
    sample_size=SAMPLE_SIZE,
    sequences={split: len(rows) for split, rows in LENGTHS.items()},
)
ARMS: tuple[ArmName, ...] = ("fast", "ref")
Change = Callable[[dict[str, Any]], Any]


def rewrite(path: Path, value: Any) -> None:
    """Replace a JSON file."""
    path.unlink(missing_ok=True)
    path.write_bytes(canonical_json(value) + b"\n")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def small_library(folder: Path) -> Path:
    """A copy of the running d2lib with the files that a verdict hangs on and one other, so that a test is quick."""
    snapshot_source(folder)
    kept = numerical_files(folder / "d2lib") | {"plots.py"}
    for path in sorted((folder / "d2lib").rglob("*.*")):
        if path.relative_to(folder / "d2lib").as_posix() not in kept:
            path.unlink()
    return folder / "d2lib"


class AdmittedCase:
    """The folders of a run, and the binding of one to the next."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.assembly, self.pilot, self.g1 = root / "assembly", root / "pilot", root / "g1/g1.json"

    @property
    def inputs(self) -> AdmissionInputs:
        """Nothing is computed again: the tests that are about that ask for it."""
        return AdmissionInputs(
            self.assembly, self.g1, self.pilot, DEMANDS, parity_rounds=0, replayed_sequences=0, rescored_rounds=0
        )

    def k2(self, split: str) -> Path:
        return self.assembly / f"k2/{split}.k2_drafts.jsonl"

    @property
    def manifest(self) -> Manifest:
        return Manifest.load(self.assembly / "MANIFEST.json")

    def run(self, **options: Any) -> Admission:
        return run_admission(self.inputs, **{"recompute": remembered} | options)

    def build(self, library: Path) -> AdmittedCase:
        """Make everything; the pilot's source is a snapshot of this library."""
        self.assembly.mkdir(parents=True)
        (self.assembly / "target.safetensors").write_bytes(b"the target's weights")
        target = str(sha256_file(self.assembly / "target.safetensors"))
        manifest = write_dataset(self.assembly, CONFIG, head=WEIGHTS["head.weight"], lengths=LENGTHS, target=target)
        save_weights(self.assembly / "native.safetensors", WEIGHTS, CONFIG)
        rewrite(self.assembly / "drafter.json", CONFIG.model_dump(mode="json"))
        rewrite(
            self.assembly / "provenance.json",
            {"namespace": manifest.namespace, "sources": [{"name": "rows", "status": "VALID"}]},
        )
        blocks = D2Blocks(manifest, self.assembly, "train", CONFIG)
        for arm in ARMS:
            result = train(
                blocks,
                CONFIG,
                WEIGHTS,
                RECIPE,
                self.pilot,
                name=arm,
                identity={},  # bound when everything is there
                backend=arm,
                limit_updates=UPDATES,
                progress=False,
            )
            save_adapter(self.pilot / f"{arm}.safetensors", result.adapter, CONFIG)
            shutil.rmtree(self.pilot / f"{arm}.checkpoints")
        adapted = reference_drafter(CONFIG, WEIGHTS, load_adapter(self.pilot / "fast.safetensors", CONFIG))
        for split in SAMPLED:
            commit_drafts(adapted, manifest, self.assembly, split)
        manifest = self.rebind_manifest()
        native, live = str(sha256_file(self.assembly / "native.safetensors")), reference_drafter(CONFIG, WEIGHTS)
        (self.assembly / "k2").mkdir()
        for split in SCORED:
            header = K2Header(
                namespace=manifest.namespace, split=split, block_size=5, live={"native": native, "target": target}
            )
            write_k2(self.k2(split), header, live_run(live, manifest, self.assembly, split))
        (self.root / "g1").mkdir()
        snapshot_source(self.pilot / "repo", {"d2lib": library})
        rows = integrity_rows(manifest, self.assembly, WEIGHTS["head.weight"])
        rows += coverage_rows(manifest, self.assembly, {split: self.k2(split) for split in SCORED})
        rewrite(self.root / "rows.json", [row.model_dump(mode="json") for row in rows])
        rewrite(self.root / "scores.json", self._score(manifest))
        self.bind()
        return self

    def rebind_manifest(self) -> Manifest:
        """MANIFEST.json with the digests of the sidecars that are there."""
        value = read(self.assembly / "MANIFEST.json")
        for entry in value["sequences"]:
            entry["file"] = FileEntry.of(self.assembly, entry["file"]["path"]).model_dump()
        rewrite(self.assembly / "MANIFEST.json", value)
        return self.manifest

    def _score(self, manifest: Manifest) -> dict[str, Any]:
        """Every complete round of the sampled splits, scored: split → request → anchor → arm → accepted."""
        arms = {"baseline": reference_drafter(CONFIG, WEIGHTS)}
        arms |= {
            arm: reference_drafter(CONFIG, WEIGHTS, load_adapter(self.pilot / f"{arm}.safetensors", CONFIG))
            for arm in ARMS
        }
        found: dict[str, Any] = {}
        for split in SAMPLED:
            blocks = D2Blocks(manifest, self.assembly, split, CONFIG)
            population = K2File.load(self.k2(split), manifest).population(manifest, split)
            for request, anchors in population.items():
                probe = blocks.rounds_batch(request, anchors[:2])
                scored = Scorer(arms, probe).rounds(blocks, request, anchors)
                found.setdefault(split, {})[request] = {
                    str(anchor): {arm: scored[arm].accepted[place] for arm in arms}
                    for place, anchor in enumerate(anchors)
                }
        return found

    def bind(
        self,
        *,
        g1: Change = lambda value: None,
        training: Change = lambda value: None,
        scores: Change = lambda value: None,
        receipt: Change = lambda value: None,
        sample_namespace: str = PILOT,
    ) -> AdmittedCase:
        """Write manifest, source map, G1 receipt, scores and pilot receipt again, each with the digests of what is
        there; the changes are applied before a file is written and hashed."""
        self.rebind_manifest()
        repo = self.pilot / "repo"
        files = record_tree(repo, skip=lambda name: name == SOURCE_MAP)
        rewrite(repo / SOURCE_MAP, {name: {"size": f.size, "sha256": str(f.sha256)} for name, f in files.items()})
        manifest = self.manifest
        bound = {"manifest_sha256": self.digest("assembly/MANIFEST.json")}
        bound["k2"] = {split: str(sha256_file(self.k2(split))) for split in SCORED}  # type: ignore[assignment]

        found = self._g1(manifest) | bound
        g1(found)
        rewrite(self.g1, found)

        trajectories = {split: K2File.load(self.k2(split), manifest) for split in SAMPLED}
        populations = {split: (file.sha256, file.population(manifest, split)) for split, file in trajectories.items()}
        sample = frozen_sample(sample_namespace, populations, SAMPLE_SIZE)
        drawn: dict[str, dict[str, Any]] = {}
        for split, pairs in sample.rounds.items():
            for request, anchor in pairs:
                rounds = drawn.setdefault(split, {}).setdefault(request, {"anchors": []})
                rounds["anchors"].append(anchor)
            for request, rounds in drawn[split].items():
                known = read(self.root / "scores.json")[split].get(request, {})
                for arm in (
                    "baseline",
                    *ARMS,
                ):  # a round that no spoiled trajectory had was not scored; it gets any score
                    rounds[arm] = [known.get(str(anchor), {}).get(arm, 1) for anchor in rounds["anchors"]]
        raw = {
            "schema_version": 1,
            "namespace": PILOT,
            "sample_identity": str(sample.identity),
            "adapters": {arm: self.digest(f"pilot/{arm}.safetensors") for arm in ("fast", "ref")},
            "block_size": 5,
            "splits": drawn,
        }
        scores(raw)
        rewrite(self.pilot / "scores.json", raw)

        recipe = RECIPE
        verdict = judge_pilot(PilotScores.model_validate(raw))
        final = bound | {
            "schema_version": 1,
            "namespace": PILOT,
            "verdict": verdict.verdict,
            "recipe": recipe.model_dump(mode="json"),
            "g1_sha256": self.digest("g1/g1.json"),
            "initialization_sha256": str(initialization_sha256(initialize_adapter(CONFIG, recipe.rank, recipe.seed))),
            "sample": sample.as_dict() | {"namespace": sample_namespace},
            "arms": {
                arm: {
                    "checkpoint": f"{arm}.safetensors",
                    "sha256": self.digest(f"pilot/{arm}.safetensors"),
                    "updates": UPDATES,
                    "seconds": 12.5,
                }
                for arm in ("fast", "ref")
            },
            "source_map_sha256": self.digest(f"pilot/repo/{SOURCE_MAP}"),
            "scores": {"file": "scores.json", "sha256": self.digest("pilot/scores.json")},
            "statistics": verdict.model_dump(mode="json"),
        }
        receipt(final)
        rewrite(self.pilot / "receipt.json", final)
        identities = Assembly(self.assembly).identities if (self.assembly / "drafter.json").exists() else {}
        for arm in ARMS:
            state = checkpoint.load(self.pilot / f"{arm}.pt")
            identity = {**state.identity, **identities, "namespace": PILOT, "g1": self.digest("g1/g1.json")}
            value = {"identity": identity, "arm": arm}
            training(value)
            (self.pilot / f"{arm}.pt").unlink()
            checkpoint.save(self.pilot / f"{arm}.pt", replace(state, identity=value["identity"]))
        return self

    def digest(self, name: str) -> str:
        return str(sha256_file(self.root / name))

    def _g1(self, manifest: Manifest) -> dict[str, Any]:
        native = self.digest("assembly/native.safetensors")
        dev = manifest.split("dev")
        sources = ["native.safetensors", "target.safetensors", "provenance.json"]
        sources += [self.k2(split).relative_to(self.assembly).as_posix() for split in SCORED]
        parity = {}
        for split in SCORED:
            rounds = len(self.k2(split).read_text().splitlines()) - 1
            parity[split] = {
                "k2": str(sha256_file(self.k2(split))),
                "native": native,
                "rounds": rounds,
                "drafts": 2 * rounds,
                "differing": 0,
                "near_ties": 0,
                "tolerance": 1e-4,
            }
        return {
            "schema_version": 1,
            "namespace": manifest.namespace,
            "rows": read(self.root / "rows.json"),
            "replay": {
                "split": "dev",
                "exact": True,
                "positions": sum(entry.span_positions for entry in dev),
                "sequences": {entry.id: entry.file.sha256 for entry in dev},
                "target": self.digest("assembly/target.safetensors"),
            },
            "parity": parity,
            "live_sources": [
                {"name": name, "status": "VALID", "sha256": self.digest(f"assembly/{name}")} for name in sources
            ],
        }


def commit_drafts(drafter: Reference, manifest: Manifest, folder: Path, split: Any) -> None:
    """Make the committed tokens of a split what the drafter puts first after each of them, so that it gains there."""
    blocks = D2Blocks(manifest, folder, split, CONFIG)
    for entry in manifest.split(split):
        path = folder / entry.file.path
        tensors = load_file(path)
        tokens = tensors["tokens"]
        for anchor in range(entry.gen_start, entry.rows - 1):
            batch = blocks.rounds_batch(entry.id, [anchor]).round(0)
            previous = batch.previous.clone()
            previous[0] = tokens[anchor]
            with torch.no_grad():
                logits = drafter.forward(replace(batch, anchor_token=tokens[anchor].long(), previous=previous)).logits
            tokens[anchor + 1] = logits[0].argmax()
        path.unlink()
        path.write_bytes(save(tensors))


def live_run(reference: Reference, manifest: Manifest, folder: Path, split: Any) -> list[K2Round]:
    """The rounds that the native drafter makes over the committed tokens of a split, two drafts each."""
    blocks, rounds = D2Blocks(manifest, folder, split, CONFIG), []
    for entry in manifest.split(split):
        tokens = Sidecar.open(folder, entry, manifest).tensor("tokens").tolist()
        anchor = entry.gen_start
        while anchor <= entry.rows - 2:
            with torch.no_grad():
                one, two = reference.draft(blocks.rounds_batch(entry.id, [anchor]).round(0), 2).tolist()
            accepted = leading_matches((one, two), tokens, anchor)
            following = anchor + accepted + 1
            rounds.append(
                K2Round(request=entry.id, anchor=anchor, drafts=(one, two), accepted=accepted, next_anchor=following)
            )
            anchor = following
    return rounds


_VERDICTS: dict[tuple[str, str], Any] = {}


def remembered(source: Path, scores: Path) -> Any:
    """The real child process, run once for the same scores and the same code of the verdict."""
    code = record_tree(source, skip=lambda name: "/gates/" not in name and name.count("/") > 1)
    key = (str(digest_tree(code)), str(record_file(scores).sha256))
    if key not in _VERDICTS:
        _VERDICTS[key] = recompute_verdict(source, scores)
    return _VERDICTS[key]
